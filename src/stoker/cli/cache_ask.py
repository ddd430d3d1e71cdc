"""`stoker cache status`, `ls`, `stat`, `refresh`, `evict`, `pin`, `unpin`: one question to a server each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from stoker.base.units import format_bytes, format_duration
from stoker.cache.client.client import CacheClient
from stoker.cache.client.entries import children, objects
from stoker.cli.cache_options import (
    SCHEME,
    Below,
    count,
    exit_code,
    leaf,
    parse_below,
    print_json,
    server_of,
    warn,
)
from stoker.cli.job_view import clean
from stoker.errors import EXIT_FAILED, EXIT_OK, ConfigError, ObjectNotFound
from stoker.wire.cache_api import LIST_LIMIT_MAX, BucketStatus, CacheStatus, FleetStatus, ObjectInfo, Pins

_PREFIX = "stoker://BUCKET or stoker://BUCKET/PREFIX"


def add_questions(commands: Any) -> None:
    """Add these commands to those of `stoker cache`."""
    leaf(
        commands, "status", "show a server's figures", _status,
        "  stoker cache status --endpoint http://127.0.0.1:7070\n"
        "  stoker cache status --endpoint unix:///run/stoker/cache.sock --token s3cret-token --json",
    )  # fmt: skip
    ls = leaf(
        commands, "ls", "list what lies below a prefix: objects, and folders with a slash at the end", _ls,
        "  stoker cache ls stoker://                        the buckets\n"
        "  stoker cache ls stoker://train/images/ -l\n"
        "  stoker cache ls stoker://train --recursive --json > objects.jsonl",
        url=_PREFIX,
    )  # fmt: skip
    ls.add_argument("-l", "--long", action="store_true", help="with sizes and versions")
    ls.add_argument("--recursive", action="store_true", help="what lies in folders, in place of the folders")
    ls.add_argument("--limit", metavar="N", type=count, help="so many at most")
    leaf(
        commands, "stat", "show what the server knows of an object; exit code 1 if there is none", _stat,
        "  stoker cache stat stoker://train/images/1.jpg", url="stoker://BUCKET/KEY",
    )  # fmt: skip
    leaf(
        commands, "refresh", "have the next reader of each key below a prefix ask the origin for its version",
        _refresh, "  stoker cache refresh stoker://train/images/", url=_PREFIX,
    )  # fmt: skip
    evict = leaf(
        commands, "evict", "give up what is held below a prefix, on all servers, pinned or not", _evict,
        "  stoker cache evict stoker://train/old/\n  stoker cache evict stoker://train --yes",
        url=_PREFIX,
    )  # fmt: skip
    evict.add_argument("--yes", action="store_true", help="do not ask before a whole bucket is given up")
    leaf(
        commands, "pin", "keep what is held below a prefix, now or later, from being evicted", _pin,
        "  stoker cache pin stoker://train/images/", url="stoker://BUCKET/PREFIX",
    )  # fmt: skip
    leaf(
        commands, "unpin", "let what lies below a pinned prefix be evicted again", _unpin,
        "  stoker cache unpin stoker://train/images/", url="stoker://BUCKET/PREFIX",
    )  # fmt: skip


def _status(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    with server.client() as client:
        status = client.status()
        fleet = fleet_of(client)
    if arguments.json:
        print_json(msgspec.to_builtins(status) | ({} if fleet is None else {"fleet": fleet}))
    else:
        print(describe(server.endpoint, status, fleet))
    return EXIT_OK


def fleet_of(client: CacheClient) -> FleetStatus | None:
    """The server's fleet; None if it is in none, or alone in it."""
    try:
        fleet = client.fleet()
    except ObjectNotFound:  # a server that knows no fleets
        return None
    return fleet if len(fleet.members) > 1 or fleet.down else None


def describe(endpoint: str, status: CacheStatus, fleet: FleetStatus | None = None) -> str:
    """A server's figures for people."""
    asked = status.hits + status.misses
    lines = [
        f"{endpoint}  {status.state}  up {format_duration(status.uptime_s)}  version {status.version}",
        f"  held {format_bytes(status.held_bytes)} of {format_bytes(status.capacity_bytes)} "
        f"in {status.held_blocks} blocks",
        f"  {asked} objects read, {status.hits / asked:.1%} from the cache"
        if asked
        else "  nothing read yet",
    ]
    if fleet is not None:
        lines.append(f"  {describe_fleet(fleet)}")
        lines += [f"  {line}" for line in describe_troubles(fleet)]
    for bucket in status.buckets:
        if bucket.kind == "blobs":
            taken = _taken(bucket.used_bytes, bucket.quota_bytes)
            lines.append(
                f"  {bucket.name}  blobs  held {format_bytes(bucket.held_bytes)}  hits {bucket.hits}  "
                f"misses {bucket.misses}"
            )
            lines.append(f"    {taken}")
            continue
        lines.append(
            f"  {bucket.name}  {bucket.policy}  held {format_bytes(bucket.held_bytes)}  hits {bucket.hits}  "
            f"misses {bucket.misses}  origin {format_bytes(bucket.origin_bytes)} in {bucket.origin_requests} "
            f"requests  {bucket.origin}"
        )
        lines += [f"    {clean(line)}" for line in describe_rules(bucket)]
    lines += [
        f"  {bucket.name}: its origin has failed again and again, and is left alone for a while"
        for bucket in status.buckets
        if bucket.origin_state != "closed"
    ]
    lines += [
        f"  tenant {tenant.name}  {_taken(tenant.used_bytes, tenant.quota_bytes)}"
        for tenant in status.tenants
    ]
    lines += [f"  note: {note}" for note in status.notes]
    return "\n".join(lines)


def describe_rules(bucket: BucketStatus) -> list[str]:
    """How a bucket is kept, and what of its quotas is used, a line for it and for each part with rules of its own."""
    number = bucket.max_replicas
    copies = (
        f"at most {number} cop{'y' if number == 1 else 'ies'}" if number else "a copy wherever it is read"
    )
    taken = _taken(bucket.used_bytes, bucket.quota_bytes) or "no quota"
    lines = [f"{taken}, {copies}, ttl {format_duration(bucket.ttl_s)}"]
    if bucket.nearer:
        alone = "" if bucket.nearer_state == "closed" else ", which failed and is left alone for a while"
        lines.append(
            f"{format_bytes(bucket.nearer_bytes)} came through the nearer fleet {bucket.nearer}{alone}"
        )
    for part in bucket.prefixes:
        said = [_taken(part.used_bytes, part.quota_bytes) or f"takes {format_bytes(part.used_bytes)}"]
        lines.append(f"{part.prefix}: {', '.join(said + ['pinned'] * part.pinned)}")
    return lines


def _taken(used_bytes: int, quota_bytes: int) -> str:
    if not quota_bytes:
        return ""
    share = used_bytes / quota_bytes
    return f"takes {format_bytes(used_bytes)} of its quota of {format_bytes(quota_bytes)} ({share:.0%})"


def describe_fleet(fleet: FleetStatus) -> str:
    """The members of a fleet, as one of them sees it, in one line."""
    names = [f"{member.name}{'' if member.weight else ' (leaving)'}" for member in fleet.members]
    down = f"; not reached: {', '.join(fleet.down)}" if fleet.down else ""
    return clean(f"{fleet.name} in a fleet of {len(names)}: {', '.join(names)}{down}")


def describe_troubles(fleet: FleetStatus) -> list[str]:
    """The members that the server does not use, and why, a line each."""
    return [
        clean(f"{trouble.name} is not used since {format_duration(trouble.since_s)}: {trouble.why}")
        for trouble in fleet.troubles
    ]


def _ls(arguments: argparse.Namespace) -> int:
    with server_of(arguments).client() as client:
        if arguments.url in (SCHEME, SCHEME.removesuffix("//")):
            return _ls_buckets(client, arguments)
        below = parse_below(arguments.url)
        walk = objects if arguments.recursive else children
        page_max = min(LIST_LIMIT_MAX, arguments.limit or LIST_LIMIT_MAX)
        entries: Iterator[ObjectInfo | str] = islice(
            walk(
                lambda prefix, after, limit: client.list_page(below.bucket, prefix, after, limit),
                below.prefix,
                page_max,
            ),
            arguments.limit,
        )
        found = False
        for entry in entries:
            found = True
            _show_entry(arguments, entry)
    if found or not below.prefix:
        return EXIT_OK
    warn(f"there is nothing below {below.url}")
    return EXIT_FAILED


def _ls_buckets(client: CacheClient, arguments: argparse.Namespace) -> int:
    for bucket in client.status().buckets[: arguments.limit]:
        _show_entry(arguments, f"{bucket.name}/")
    return EXIT_OK


def _show_entry(arguments: argparse.Namespace, entry: ObjectInfo | str) -> None:
    """An object, or a folder's key."""
    is_folder = isinstance(entry, str)
    if arguments.json:
        line = {"key": entry, "is_folder": True} if is_folder else msgspec.to_builtins(entry)
        print(msgspec.json.encode(line).decode())
    elif isinstance(entry, str):
        print(f"{'-':>9}  {'-':<28}  {clean(entry)}" if arguments.long else clean(entry))
    elif arguments.long:
        print(f"{format_bytes(entry.size_bytes):>9}  {clean(entry.version):<28}  {clean(entry.key)}")
    else:
        print(clean(entry.key))


def _stat(arguments: argparse.Namespace) -> int:
    below = parse_below(arguments.url)
    if not below.prefix:
        raise ConfigError(f"{arguments.url!r} names no object: write stoker://BUCKET/KEY")
    with server_of(arguments).client() as client:
        stat = client.known(*below)
    if arguments.json:
        print_json(stat)
    if stat.is_absent:
        warn(
            f"there is no object {below.prefix!r} in bucket {below.bucket!r}: its origin said so "
            f"{_ago(stat.age_s)}; `stoker cache refresh {below.url}` has it asked again"
        )
        return EXIT_FAILED
    if not arguments.json:
        print(clean(below.url))
        print(f"  size     {format_bytes(stat.size_bytes)} ({stat.size_bytes} bytes)")
        print(f"  version  {clean(stat.version)}")
        print(f"  age      its origin said so {_ago(stat.age_s)}")
    return EXIT_OK


def _ago(age_s: int) -> str:
    return f"{format_duration(age_s)} ago" if age_s > 0 else "just now"


def _refresh(arguments: argparse.Namespace) -> int:
    below = parse_below(arguments.url)
    with server_of(arguments).client() as client:
        said = client.refresh_fleet(*below)
    if arguments.json:
        print_json(said)
    else:
        print(f"{below.url}: {said.dropped} keys are asked of the origin again when they are read next")
    return exit_code(said.missed, "may believe what they know until the bucket's ttl is over")


def _evict(arguments: argparse.Namespace) -> int:
    below = parse_below(arguments.url)
    with server_of(arguments).client() as client:
        if not below.prefix and not arguments.yes and not _is_sure(client, below):
            warn("nothing is given up")
            return EXIT_FAILED
        said = client.evict(*below)
    if arguments.json:
        print_json(said)
    else:
        print(f"{below.url}: {said.blocks} blocks are given up, {format_bytes(said.size_bytes)}")
    return exit_code(said.missed, "may still hold some of it")


def _is_sure(client: CacheClient, below: Below) -> bool:
    """Whether somebody at a terminal says yes. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{below.url} is a whole bucket: add --yes to give up all of it, or name a prefix of it"
        )
    held = [bucket for bucket in client.status().buckets if bucket.name == below.bucket]
    if not held:
        raise ObjectNotFound(f"there is no bucket {below.bucket!r}: see `stoker cache ls stoker://`")
    print(
        f"Give up all that is held of {below.url} (here {format_bytes(held[0].held_bytes)})? [y/N] ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _part_of(url: str) -> Below:
    """What only a part of a bucket can be: pinned. Raises ConfigError."""
    below = parse_below(url)
    if not below.prefix:
        raise ConfigError(
            f"{url!r} is a whole bucket: say which part of it, as stoker://{below.bucket}/PREFIX"
        )
    return below


def _pin(arguments: argparse.Namespace) -> int:
    below = _part_of(arguments.url)
    with server_of(arguments).client() as client:
        said = client.pin(*below)
    return _show_pins(arguments, below, said, "may evict it")


def _unpin(arguments: argparse.Namespace) -> int:
    below = _part_of(arguments.url)
    with server_of(arguments).client() as client:
        said = client.unpin(*below)
    return _show_pins(arguments, below, said, "still keep it")


def _show_pins(arguments: argparse.Namespace, below: Below, said: Pins, what: str) -> int:
    if arguments.json:
        print_json(said)
    elif said.prefixes:
        print(clean(f"pinned in {below.bucket}: {', '.join(said.prefixes)}"))
    else:
        print(f"nothing is pinned in {below.bucket}")
    return exit_code(said.missed, what)
