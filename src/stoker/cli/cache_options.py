"""What the commands that ask a cache server have in common: where it is, what they are about, how they answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from stoker.base.units import format_bytes, parse_duration_s, parse_size_bytes
from stoker.cache.client.client import CacheClient
from stoker.errors import ConfigError
from stoker.settings import ClientTlsFiles, cache_settings

SCHEME = "stoker://"
CAPACITY_BYTES_MIN = 1_000_000
"""Less has no room for small objects either, which are written together; a block of a large one takes 4 MiB."""
WHERE = "Without --endpoint and --token, STOKER_CACHE_ENDPOINT and STOKER_CACHE_TOKEN say where."


class Below(NamedTuple):
    """What stoker://BUCKET/PREFIX names: keys of a bucket that begin with a prefix, or one key."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}" if self.prefix else f"{SCHEME}{self.bucket}"


class Server(NamedTuple):
    """A server to ask."""

    endpoint: str
    token: str | None
    timeout_s: float
    tls: ClientTlsFiles

    def client(self) -> CacheClient:
        """A client, to be closed."""
        return CacheClient(self.endpoint, self.token, timeout_s=self.timeout_s, tls=self.tls)


def leaf(commands: Any, name: str, help_text: str, handler: Any, examples: str, *, url: str = "") -> Any:
    """A command that asks a server; with `url` it is about something, which that text describes."""
    parser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"examples:\n{examples}\n\n{WHERE}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if url:
        parser.add_argument("url", metavar="URL", help=url)
    parser.add_argument(
        "--endpoint", metavar="URL", help="http://HOST:PORT, https://HOST:PORT or unix:///PATH"
    )
    parser.add_argument("--token", metavar="TOKEN")
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="who signed the certificate of an https:// server; default: STOKER_CACHE_CA",
    )
    parser.add_argument(
        "--timeout", metavar="TIME", type=seconds, default=10.0, help="the server's longest silence (10s)"
    )
    parser.add_argument("--json", action="store_true", help="JSON, for programs")
    parser.set_defaults(handler=handler)
    return parser


def server_of(arguments: argparse.Namespace) -> Server:
    """The server that arguments, or settings, name. Raises ConfigError."""
    settings = cache_settings()
    endpoint = arguments.endpoint or settings.endpoint
    if endpoint is None:
        raise ConfigError("say which server: --endpoint http://HOST:PORT, or set STOKER_CACHE_ENDPOINT")
    tls = settings.tls if arguments.ca is None else replace(settings.tls, ca=arguments.ca)
    return Server(endpoint, arguments.token or settings.token, arguments.timeout, tls)


def parse_below(url: str) -> Below:
    """`stoker://BUCKET` or `stoker://BUCKET/PREFIX`, as it stands. Raises ConfigError."""
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    if not url.startswith(SCHEME) or not bucket:
        raise ConfigError(f"{url!r} names no bucket: write stoker://BUCKET or stoker://BUCKET/PREFIX")
    return Below(bucket, prefix)


def print_json(said: Any) -> None:
    """One line."""
    print(msgspec.json.encode(said).decode(), flush=True)


def warn(text: str) -> None:
    """A line on stderr."""
    print(f"stoker: {text}", file=sys.stderr, flush=True)


def exit_code(missed: Sequence[str], what: str) -> int:
    """1, and a warning, if servers of the fleet could not be told."""
    if not missed:
        return 0
    warn(f"{', '.join(missed)} could not be told, and {what}; do it again when they are back")
    return 1


def seconds(text: str) -> float:
    """A time above 0, for argparse."""
    try:
        value = parse_duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a time above 0")
    return value


def parse_capacity_bytes(said: str | int, least_bytes: int) -> int:
    """What `--capacity` says: how much disk a cache takes at most. Raises ConfigError, also for less than the least."""
    try:
        size_bytes = said if isinstance(said, int) else parse_size_bytes(said)
    except ValueError as error:
        raise ConfigError(f"--capacity: {error}") from None
    except OverflowError:
        raise ConfigError(f"--capacity {said}: no disk is that large") from None
    if size_bytes < least_bytes:
        raise ConfigError(f"--capacity: {said} is too little: give at least {format_bytes(least_bytes)}")
    return size_bytes


def count(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
