"""`stoker cache load`: have what lies below a prefix held before it is read."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from stoker.base.units import format_bytes, format_duration
from stoker.cache.client.entries import objects
from stoker.cache.client.loading import Failure, LoadCounts, Loader, Wanted
from stoker.cache.client.servers import Servers, urls_of
from stoker.cli.cache_manifest import read_manifest
from stoker.cli.cache_options import Below, count, leaf, parse_below, print_json, server_of, warn
from stoker.cli.cache_progress import Progress
from stoker.cli.cache_room import Space, Sum, left_bytes, refusal, space_for
from stoker.cli.job_view import clean
from stoker.errors import EXIT_FAILED, EXIT_OK, ConfigError, StokerError

_NAMES_MAX = 20


def add_load_parser(commands: Any) -> None:
    """Add `load` to the commands of `stoker cache`."""
    load = leaf(
        commands, "load", "have what lies below a prefix fetched and held, before it is read", _load,
        "  stoker cache load stoker://train/images/\n"
        "  stoker cache load stoker://train --jobs 8 --replicas 2\n"
        "  stoker cache ls stoker://train --recursive --json | grep jpg > jpg.jsonl\n"
        "  stoker cache load stoker://train --manifest jpg.jsonl\n\n"
        "It ends when all is held, or could not be. Run it again after it was interrupted: what is held is not loaded\n"
        "again. Nothing of another bucket leaves for what is loaded. Exit code 1 if anything is missing at the end.",
        url="stoker://BUCKET or stoker://BUCKET/PREFIX",
    )  # fmt: skip
    load.add_argument("--jobs", metavar="N", type=count, default=4, help="so many requests at a time (4)")
    load.add_argument(
        "--replicas", metavar="N", type=count, default=0,
        help="hold it on so many servers of the fleet; default, and at most: the max_replicas of the bucket",
    )  # fmt: skip
    load.add_argument(
        "--manifest", metavar="FILE",
        help="load what it names: a key, a stoker:// URL, or a line of `ls --json` on each line; URL is the bucket",
    )  # fmt: skip
    load.add_argument("--force", action="store_true", help="load what fits, even if not all of it can")


def _load(arguments: argparse.Namespace) -> int:
    below = parse_below(arguments.url)
    if arguments.manifest is not None and below.prefix:
        raise ConfigError(
            f"with --manifest, URL is the bucket alone: write stoker://{below.bucket}, not {arguments.url}"
        )
    server = server_of(arguments)
    with Servers(server.endpoint, server.token, timeout_s=server.timeout_s, tls=server.tls) as servers:
        fleet = servers.fleet()
        urls = [server.endpoint] if fleet is None else urls_of(fleet.members)
        wanted = _source(servers, below, arguments.manifest)
        with Progress(f"counting {below.url}") as progress:
            rules = space_for(servers, urls, below.bucket)
            total = _sum(wanted(), rules, progress.counted)
        if not total.objects:
            where = below.url if arguments.manifest is None else arguments.manifest
            warn(f"there is nothing to load: {where} names no object")
            return EXIT_FAILED
        space = space_for(servers, urls, below.bucket)
        for url in space.unreachable:
            warn(f"{url} does not answer: its room is not counted")
        if total.unsized:
            warn(
                f"the manifest says nothing of the sizes of {total.unsized} objects: they count as 0 bytes of room"
            )
        why_not = refusal(below.url, total, space, arguments.replicas)
        if why_not and not arguments.force:
            return _refuse(arguments, total, space, why_not)
        loader = Loader(servers, below.bucket, jobs=arguments.jobs, replicas=arguments.replicas)
        look = partial(space_for, servers, urls, below.bucket)
        return _run(arguments, loader, wanted, total, space, look)


def _source(servers: Servers, below: Below, manifest: str | None) -> Callable[[], Iterable[Wanted]]:
    """What gives the objects to be loaded, from the first on each time, without keeping them."""
    if manifest is not None:
        return lambda: read_manifest(manifest, below.bucket)

    def listed() -> Iterator[Wanted]:
        found = objects(
            lambda prefix, after, limit: servers.call(
                lambda client: client.list_page(below.bucket, prefix, after, limit)
            ),
            below.prefix,
        )
        return (Wanted(info.key, info.size_bytes) for info in found)

    return listed


def _sum(wanted: Iterable[Wanted], space: Space, on_progress: Callable[[int, int], None]) -> Sum:
    number = size_bytes = unsized = 0
    parts: dict[str, int] = defaultdict(int)
    for number, one in enumerate(wanted, 1):
        size_bytes += one.size_bytes or 0
        if space.parts and (part := space.part_of(one.key)) is not None:
            parts[part] += one.size_bytes or 0
        unsized += one.size_bytes is None
        if number % 1000 == 0:
            on_progress(number, size_bytes)
    return Sum(number, size_bytes, unsized, parts)


def _refuse(arguments: argparse.Namespace, total: Sum, space: Space, why: str) -> int:
    if arguments.json:
        print_json(
            {
                "complete": False,
                "stopped": why,
                "wanted": total.said(),
                "room_bytes": space.room_bytes,
                "capacity_bytes": space.capacity_bytes,
                "others_bytes": space.others_bytes,
                "quota_bytes": space.quota_bytes,
            }
        )
    warn(f"nothing is loaded: {why}")
    return EXIT_FAILED


def _run(
    arguments: argparse.Namespace,
    loader: Loader,
    wanted: Callable[[], Iterable[Wanted]],
    total: Sum,
    space: Space,
    look: Callable[[], Space],
) -> int:
    """Load, and say what came of it, also when no server answers any more."""
    stopped: StokerError | None = None
    began_at = time.monotonic()
    counts: LoadCounts | None = None
    while stopped is None:
        first, before = counts, space
        with Progress(f"loading {arguments.url}", total.objects, total.size_bytes) as progress:
            try:
                loader.run(wanted(), progress.loaded)
                space = look()
            except StokerError as error:
                stopped = error
        counts = loader.counts if first is None else loader.counts.after(first)
        lost = set(space.unreachable) - set(before.unreachable)
        if not lost:
            break
        # What was loaded onto it is gone with it.
        warn(f"{', '.join(sorted(lost))} was lost meanwhile: what it held is loaded again, onto others")
    assert counts is not None
    # A manifest may name objects twice.
    there_bytes = 0 if arguments.manifest is not None else counts.held_bytes + counts.loaded_bytes
    gone_bytes = left_bytes(there_bytes, space) if stopped is None else 0
    _report(arguments, counts, total, gone_bytes, stopped, time.monotonic() - began_at)
    if stopped is not None:
        raise stopped
    return EXIT_OK if counts.is_complete and not gone_bytes else EXIT_FAILED


def _report(
    arguments: argparse.Namespace,
    counts: LoadCounts,
    total: Sum,
    gone_bytes: int,
    stopped: StokerError | None,
    took_s: float,
) -> None:
    if arguments.json:
        print_json(
            {
                "complete": counts.is_complete and not gone_bytes and stopped is None,
                "stopped": None if stopped is None else str(stopped),
                "wanted": total.said(),
                "objects": counts.objects,
                "size_bytes": counts.size_bytes,
                "held": {"objects": counts.held, "size_bytes": counts.held_bytes},
                "loaded": {"objects": counts.loaded, "size_bytes": counts.loaded_bytes},
                "passed": {
                    "objects": counts.passed,
                    "size_bytes": counts.passed_bytes,
                    "first": _named(counts.passed_first),
                },
                "failed": _named(counts.failures),
                "left_bytes": gone_bytes,
                "took_s": round(took_s, 3),
            }
        )
        return
    print(
        f"{clean(arguments.url)}: {counts.objects} objects, {format_bytes(counts.size_bytes)}, "
        f"in {format_duration(took_s)}"
    )
    for what, number, size_bytes in (
        ("held already", counts.held, counts.held_bytes),
        ("loaded", counts.loaded, counts.loaded_bytes),
        ("passed: no room", counts.passed, counts.passed_bytes),
    ):
        print(f"  {what:<15}  {number:>9}  {format_bytes(size_bytes):>9}")
    _print_names(counts.passed_first, counts.passed, "")
    print(f"  {'failed':<15}  {len(counts.failures):>9}")
    _print_names(counts.failures[:_NAMES_MAX], len(counts.failures), " (--json names all)")
    if gone_bytes:
        print(
            f"  left again       {format_bytes(gone_bytes):>20}  or more: there is no room for all of it at a time"
        )
    if stopped is not None and total.objects > counts.objects:
        print(f"  not done: {total.objects - counts.objects} objects; run it again to go on")


def _named(failures: list[Failure]) -> list[dict[str, str]]:
    return [{"key": failure.key, "error": failure.why} for failure in failures]


def _print_names(failures: list[Failure], number: int, where_all: str) -> None:
    for failure in failures:
        print(clean(f"    {failure.key}: {failure.why}"))
    if number > len(failures):
        print(f"    and {number - len(failures)} more{where_all}")
