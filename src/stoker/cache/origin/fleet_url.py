"""What an URL of another fleet says: `stoker+http://HOST:PORT[,HOST:PORT…]/BUCKET[/PREFIX]?token_file=PATH`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from stoker.errors import ConfigError

DEFAULT_TIMEOUT_S = 20.0
"""Less than readers wait for a server here: they should still have what the origin says instead."""
_TIMEOUT_S_MAX = 3600.0
SCHEMES = ("stoker+http", "stoker+https")
_SERVER = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_FIELDS = frozenset(("token_file", "ca_file", "timeout_s"))


class FleetPlace(NamedTuple):
    """A bucket of a fleet, or what lies below a prefix of it. `url` is for people, and has no secret. `prefix`: empty,
    or with a slash at its end. `timeout_s`: so long an answer is waited for, from all servers together, and each next
    piece of one, however alive they are."""

    url: str
    servers: tuple[tuple[str, int], ...]
    bucket: str
    prefix: str
    is_tls: bool
    token_file: str
    ca_file: str
    timeout_s: float = DEFAULT_TIMEOUT_S


def is_fleet(url: str) -> bool:
    """Whether an URL is one of another fleet."""
    return url.partition("://")[0] in SCHEMES


def parse_fleet_url(address: str, query: Mapping[str, str]) -> FleetPlace:
    """`address`: the URL without its query. Raises ConfigError."""
    scheme, _, rest = address.partition("://")
    listed, _, path = rest.partition("/")
    bucket, _, prefix = path.partition("/")
    if "@" in listed:
        raise ConfigError(
            f"an URL of a fleet names no user: write {scheme}://HOST:PORT/BUCKET?token_file=PATH, where the file "
            "holds the token"
        )
    servers = [_SERVER.fullmatch(one) for one in listed.split(",")]
    places = tuple((one["host"].strip("[]"), int(one["port"])) for one in servers if one is not None)
    if len(places) != len(servers) or not bucket or any(not 0 < port < 65536 for _, port in places):
        raise ConfigError(
            f"{address!r} is no URL of a fleet: write {scheme}://HOST:PORT/BUCKET, or several HOST:PORT with commas"
        )
    if unknown := sorted(query.keys() - _FIELDS):
        raise ConfigError(
            f"{address}: {unknown[0]!r} means nothing here; there are token_file, ca_file and timeout_s"
        )
    is_tls = scheme.endswith("s")
    if query.get("ca_file") and not is_tls:
        raise ConfigError(f"{address}: ca_file is for stoker+https://")
    prefix = unquote(prefix).strip("/")
    return FleetPlace(
        address,
        places,
        unquote(bucket),
        f"{prefix}/" if prefix else "",
        is_tls,
        query.get("token_file", ""),
        query.get("ca_file", ""),
        _seconds(address, query.get("timeout_s")),
    )


def _seconds(address: str, text: str | None) -> float:
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds <= _TIMEOUT_S_MAX:
        raise ConfigError(
            f"{address}: timeout_s is no number of seconds of up to {_TIMEOUT_S_MAX:g}: {text!r}"
        )
    return seconds
