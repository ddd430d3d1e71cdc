"""Open an origin by its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from stoker.cache.origin.fleet_origin import FleetOrigin
from stoker.cache.origin.fleet_url import is_fleet, parse_fleet_url
from stoker.cache.origin.fleet_writing import WritableFleetOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.local_removing import remove_folder
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.memory_writing import WritableMemoryOrigin
from stoker.cache.origin.port import Origin
from stoker.cache.origin.throttle import ThrottledOrigin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.errors import ConfigError, EnvironmentProblem

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_USER = re.compile("://([^/]*)@")
_NO_PORT = re.compile(r"(://[^/:@\[]+):(?!:|\d*(?:/|$))[^/]*")
"""What stands for a port and is none: a password that was not quoted."""


def open_origin(url: str, environment: Mapping[str, str] | None = None) -> Origin:
    """The origin at `url`: a path, `file:///…`, `memory://name`, `s3://bucket/prefix`,
    `stoker+http://host:port/bucket`, or what fsspec knows.

    `stoker_mbps` and `stoker_latency_ms` in the query put a limit in front of it. `environment` is where
    the AWS_* variables are looked up. Raises ConfigError.
    """
    address, mbps, latency_ms, query = _split(url)
    try:
        origin = _open(address, query, environment or {})
    except ValueError as error:  # a NUL in a path, a bracket that is not closed
        why = without_secrets(str(error), url)
        raise ConfigError(f"{without_query(address)!r} is no URL of an origin: {why}") from None
    if mbps is None and latency_ms == 0.0:
        return origin
    return ThrottledOrigin(origin, mbps, latency_ms)


def open_writable_origin(url: str, environment: Mapping[str, str] | None = None) -> WritableOrigin:
    """The origin at `url` as `open_origin` opens it, to be written to as well. Raises ConfigError, also for a kind that
    cannot be written to."""
    address, mbps, latency_ms, query = _split(url)
    try:
        origin = _open_writable(address, query, environment or {})
    except ValueError as error:
        why = without_secrets(str(error), url)
        raise ConfigError(f"{without_query(address)!r} is no URL of an origin: {why}") from None
    if mbps is None and latency_ms == 0.0:
        return origin
    raise ConfigError(f"{without_query(url)!r} cannot be written to with stoker_mbps or stoker_latency_ms")


def below(url: str, name: str) -> str:
    """The URL of what is named so below an origin."""
    address, mark, query = url.partition("?")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


def make_place(url: str) -> None:
    """Make the folder that the origin at `url` is, where it is one of this machine; others need none. Raises
    ConfigError, EnvironmentProblem."""
    kind, place = _place(_split(url)[0])
    if kind != "file":
        return
    try:
        os.makedirs(place, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the folder {place}: {error.strerror}") from error


def remove_place(url: str) -> bool | None:
    """Remove the folder that the origin at `url` is, where it is one of this machine; None: it has none. False: there
    are objects in it, and it stays. Raises ConfigError, EnvironmentProblem."""
    kind, place = _place(_split(url)[0])
    if kind != "file":
        return None
    try:
        return remove_folder(place)
    except OSError as error:
        raise EnvironmentProblem(f"cannot remove the folder {place}: {error.strerror}") from error


def open_fleet(url: str, *, is_sure: bool = False) -> FleetOrigin:
    """A bucket of another fleet. `is_sure`: see FleetOrigin. Raises ConfigError."""
    address, _, query = url.partition("?")
    place = parse_fleet_url(address, dict(parse_qsl(query, keep_blank_values=True)))
    return FleetOrigin(place, is_sure=is_sure)


def without_query(url: str) -> str:
    """The URL as it may be shown, also one that leads through others (`zip://inner::sftp://…`): queries and user names
    can hold secrets, and so can passwords in which an `@` or a `?` is not quoted."""
    shown = _USER.sub("://", url.partition("?")[0])
    return shown if is_fleet(url) else _NO_PORT.sub(r"\1", shown)


def without_secrets(text: str, url: str) -> str:
    """What a library says about an origin at `url`, as it may be shown."""
    for user in _USER.findall(url):
        text = text.replace(f"{user}@", "")
        password = user.partition(":")[2]
        for secret in {password, unquote(password)} - {""}:
            text = text.replace(secret, "…")
    query = url.partition("?")[2]
    text = text.replace(f"?{query}", "") if query else text
    return _URL.sub(lambda found: without_query(found[0]), text)


def _split(url: str) -> tuple[str, float | None, float, dict[str, str]]:
    address, _, text = url.partition("?")
    query = dict(parse_qsl(text, keep_blank_values=True))
    mbps = _number(url, query, "stoker_mbps")
    latency_ms = _number(url, query, "stoker_latency_ms")
    if mbps == 0.0:
        raise ConfigError(f"stoker_mbps in {without_query(url)!r} must be more than 0")
    return address, mbps, latency_ms or 0.0, query


def _number(url: str, query: dict[str, str], name: str) -> float | None:
    text = query.pop(name, None)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e9:
        raise ConfigError(f"{name} in {without_query(url)!r} is not a number of 0 or more: {text!r}")
    return value


def _open(address: str, query: dict[str, str], environment: Mapping[str, str]) -> Origin:
    kind, place = _place(address)
    if kind == "file":
        return LocalOrigin(place)
    if kind == "memory":
        return MemoryOrigin(place)
    # Imported only when asked for: obstore and fsspec are slow to import and s3 is an extra.
    if kind == "s3":
        from stoker.cache.origin.s3_origin import open_s3

        return open_s3(place, query, environment)
    if kind == "fleet":
        return FleetOrigin(parse_fleet_url(place, query))
    from stoker.cache.origin.fsspec_origin import FsspecOrigin

    return FsspecOrigin(_with_query(place, query))


def _open_writable(address: str, query: dict[str, str], environment: Mapping[str, str]) -> WritableOrigin:
    kind, place = _place(address)
    if kind == "file":
        return WritableLocalOrigin(place)
    if kind == "memory":
        return WritableMemoryOrigin(place)
    if kind == "fleet":
        return WritableFleetOrigin(parse_fleet_url(place, query))
    if kind == "s3":
        from stoker.cache.origin.s3_writing import open_writable_s3

        return open_writable_s3(place, query, environment)
    from stoker.cache.origin.fsspec_writing import WritableFsspecOrigin

    return WritableFsspecOrigin(_with_query(place, query))


def _with_query(address: str, query: dict[str, str]) -> str:
    return address + (f"?{urlencode(query)}" if query else "")


def _place(address: str) -> tuple[str, str]:
    """The kind of origin, and the folder, name or URL of that kind. Raises ConfigError."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        if not address:
            raise ConfigError("the origin URL is empty; write a folder, or a URL such as s3://bucket/prefix")
        return "file", address
    if scheme == "file":
        parts = urlsplit(address.replace("#", "%23"))
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{without_query(address)!r} names a host; a file URL has three slashes: file:///dir/"
            )
        return "file", unquote(parts.path)
    if scheme == "memory":
        return "memory", rest
    if scheme == "s3" and "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"{without_query(address)}: what stands before the @ is no part of a bucket's name; give keys as AWS_* "
            "variables, or as access_key_id and secret_access_key in the query"
        )
    if is_fleet(address):
        return "fleet", address
    return "s3" if scheme == "s3" else "fsspec", address
