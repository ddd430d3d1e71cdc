"""From where a fleet meets, as the user says it, to its membership.

http://HOST:PORT,http://HOST:PORT     these are the members; NAME=URL names one, `;weight=N` and `;zone=Z` may follow;
                                      https:// where a server speaks TLS
file:///PATH or /PATH                 they meet in this shared folder
etcd://HOST:PORT,…/PREFIX             they meet in etcd, below /PREFIX/caches/ (/stoker by default)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stoker.base.ids import check_name
from stoker.cache.fleet.folder import FolderMembership
from stoker.cache.fleet.port import Membership
from stoker.cache.fleet.static import StaticMembership
from stoker.errors import ConfigError
from stoker.wire.cache_api import FleetMember, host_of_url

FORMS = "http://HOST:PORT,http://HOST:PORT,… or file:///SHARED/FOLDER or etcd://HOST:PORT/PREFIX"

_FOLDERS = ("file:///", "/")


def open_membership(where: str, environment: Mapping[str, str]) -> Membership:
    """Raises ConfigError for what says no place."""
    if where.startswith("etcd://"):
        return _open_etcd(where)
    if where.startswith(_FOLDERS):
        return FolderMembership(Path(where.removeprefix("file://")))
    members = members_of(where)
    if not members:
        raise ConfigError(f"{where!r} names no fleet: write {FORMS}")
    return StaticMembership(members)


def members_of(where: str) -> list[FleetMember]:
    """Who is in a fleet that is said member by member; nobody, where it meets somewhere. Raises ConfigError."""
    if where.startswith(("etcd://", *_FOLDERS)):
        return []
    return [parse_member(part) for part in where.split(",") if part.strip()]


def parse_member(text: str) -> FleetMember:
    """`[NAME=]http[s]://HOST:PORT[;weight=N][;zone=Z]`. Raises ConfigError."""
    head, *options = text.strip().split(";")
    name, equals, url = head.partition("=")
    if not equals:
        name, url = "", head
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port is not None
    except ValueError:
        is_good = False
    if not is_good or parts.path not in ("", "/"):
        raise ConfigError(f"{text!r} is no member of a fleet: write {FORMS}")
    weight, zone = 1, ""
    for option in options:
        field, _, value = option.partition("=")
        if field == "weight" and value.isascii() and value.isdigit():
            weight = int(value)
        elif field == "zone" and value:
            zone = value
        else:
            raise ConfigError(f"{text!r}: {option!r} is neither weight=N nor zone=Z")
    url = url.rstrip("/")
    try:
        return FleetMember(check_name("server", name) if name else host_of_url(url), url, weight, zone)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _open_etcd(where: str) -> Membership:
    hosts, _, prefix = where.removeprefix("etcd://").partition("/")
    endpoints = [host if ":" in host else f"{host}:2379" for host in hosts.split(",") if host]
    if not endpoints:
        raise ConfigError(f"{where!r} names no host: write etcd://HOST:PORT/PREFIX")
    try:
        client = importlib.import_module("stoker.wire.etcd").EtcdClient(endpoints)
    except ImportError as error:
        raise ConfigError(f"{where} needs the etcd extra: pip install 'stoker[etcd]'") from error
    etcd = importlib.import_module("stoker.cache.fleet.etcd")
    membership: Membership = etcd.EtcdMembership(client, f"/{prefix.strip('/') or 'stoker'}/caches")
    return membership
