"""`stoker cache link`: an URL with which anybody may read an object, or what lies in a folder, for a while."""

from __future__ import annotations

import argparse
import time
from typing import Any

from stoker.base.units import parse_duration_s
from stoker.cache.auth.links import AGE_MAX_S, make_link
from stoker.cache.auth.principals import UNPROVEN
from stoker.cache.auth.tokens import Credential, split_key
from stoker.cache.client.client import CacheClient
from stoker.cli.cache_options import leaf, parse_below, print_json, seconds, server_of
from stoker.errors import ConfigError, ObjectNotFound
from stoker.wire.http import split_target

_EXAMPLES = """\
  stoker cache link stoker://builds/app-1.2.tar.gz --expires 24h
  stoker cache link stoker://wheels/team/ --expires 7d     a folder: pip install --find-links URL
  stoker cache link stoker://builds/app.tar.gz --key AKID:a-long-secret --base https://cache.example.org

The link is good for GET and HEAD of that object, or of all below that folder, for whoever has it. It opens no more than
its maker may read, and ends with the token or key that it was made with."""


def add_link_parser(commands: Any) -> None:
    """Add `stoker cache link`."""
    parser = leaf(
        commands,
        "link",
        "print an URL with which anybody may read an object, or what is in a folder, for a while",
        _link,
        _EXAMPLES,
        url="stoker://BUCKET/KEY, or stoker://BUCKET/FOLDER/ with a slash at its end",
    )
    parser.add_argument(
        "--expires", metavar="TIME", type=seconds, required=True, help="for how long, such as 24h"
    )
    parser.add_argument(
        "--key", metavar="ACCESS:SECRET", help="make it with this key of an S3 client, in place of a token"
    )
    parser.add_argument(
        "--base",
        metavar="URL",
        help="where those who use it reach the servers; default: the endpoint that is asked",
    )


def link_age_max_s(text: str | None) -> float:
    """What `--link-max-age` says. Raises ConfigError."""
    if text is None:
        return AGE_MAX_S
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"--link-max-age: {error}") from None


def _link(arguments: argparse.Namespace) -> int:
    below = parse_below(arguments.url)
    if not below.prefix and not arguments.url.endswith("/"):
        raise ConfigError(f"{arguments.url!r} names no object: for all of the bucket write {below.url}/")
    server = server_of(arguments)
    endpoint = server.endpoint.split(",")[0].strip()
    base = (arguments.base or endpoint).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"a link leads to http://HOST:PORT, not to {base!r}: say where with --base")
    target = make_link(_maker(arguments, server.token), *below, time.time(), arguments.expires)
    with CacheClient(endpoint, timeout_s=server.timeout_s) as client:
        is_there = _try(client, target)
    url = base + target
    if arguments.json:
        print_json({"url": url, "expires_s": arguments.expires, "is_there": is_there})
    else:
        print(url)
    return 0


def _maker(arguments: argparse.Namespace, token: str | None) -> Credential:
    if arguments.key:
        access, secret, _ = split_key("--key", arguments.key)
        return Credential(UNPROVEN, secret, access)
    if not token:
        raise ConfigError(
            "a link is made with a token or a key: give --token or --key (a server without tokens needs no links)"
        )
    return Credential(UNPROVEN, token)


def _try(client: CacheClient, target: str) -> bool:
    """Whether the link shows something now; a folder may have no index. Raises AccessDenied where the server does not
    take it."""
    bucket, path, _ = split_target(target.encode())
    try:
        client.read(bucket, path, 0, 1)
    except ObjectNotFound:
        return False
    return True
