"""How do signed S3 requests of which nine of ten are HEADs and lists go over one server, and over a fleet of four?

Each request goes to the next server in turn, whoever owns what it asks for. All servers share this machine's cores, so
that what counts is how many requests a second of their CPU is good for; all sides in turns, medians. Beside them four
servers that know nothing of each other: what the machine loses by four processes in place of one, the fleet is not to
blame for. `--kinds`: what requests of each kind alone cost as well.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import obstore
from _common import parser, report
from _serving import serve
from _web import TOKEN
from obstore.store import S3Store
from s3_get import AT_ONCE, OUR_KEY, Side, in_turns

from stoker.cache.client.client import CacheClient

OBJECTS, OBJECT_BYTES = 1000, 10 * 1024
FOLDERS = 10
SERVERS = 4
PATIENCE_S = 30.0
Do = Callable[[S3Store, str], Awaitable[None]]
"""One request about a key."""


def main() -> int:
    """Print the ratios."""
    flags = parser(__doc__ or "")
    flags.add_argument("--kinds", action="store_true", help="also what each kind of request costs")
    arguments = flags.parse_args()
    rounds, requests = (2, 500) if arguments.quick else (7, 5000)
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        for number in range(OBJECTS):
            path = folder / "origin" / key_of(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(number.to_bytes(4, "big") * (OBJECT_BYTES // 4))
        (folder / "members").mkdir()
        key = ("--key", f"{OUR_KEY.access_key}:{OUR_KEY.secret_key}")
        alone = running.enter_context(serve(folder / "alone", folder / "origin", *key))
        fleet = [
            running.enter_context(
                serve(folder / f"{n}", folder / "origin", *key, "--fleet", f"file://{folder / 'members'}")
            )
            for n in range(SERVERS)
        ]
        apart = [
            running.enter_context(serve(folder / f"apart-{n}", folder / "origin", *key))
            for n in range(SERVERS)
        ]
        for server in fleet:
            wait_for_members(server.url)
        groups = {"one": [alone], "four": fleet, "four apart": apart}
        stores = {group[0].url: [store_of(one.url) for one in group] for group in groups.values()}
        sides = {
            name: Side(group[0].url, "b", tuple(one.pid for one in group), OUR_KEY)
            for name, group in groups.items()
        }
        taken = in_turns(sides, lambda side: asyncio.run(mix(stores[side.url], requests)), rounds)
        one, four, four_apart = taken.values()
        costs = of_kinds(sides, stores, rounds, requests) if arguments.kinds else {}
    figures: dict[str, object] = {
        "requests for each CPU second, four servers over one (goal 0.9)": one.cpu_s / max(four.cpu_s, 1e-9),
        "requests for each CPU second, four servers over four apart": four_apart.cpu_s
        / max(four.cpu_s, 1e-9),
        "requests for each CPU second, four apart over one": one.cpu_s / max(four_apart.cpu_s, 1e-9),
        "requests/s on this machine, four servers over one": four.per_s / one.per_s,
        "one server: requests/s": round(one.per_s),
        "a request: us of server CPU, one server": round(one.cpu_s * 1e6, 1),
        "a request: us of server CPU, four servers": round(four.cpu_s * 1e6, 1),
    }
    figures |= costs
    report("s3_mix", figures, arguments.json)
    return 0


def key_of(number: int) -> str:
    return f"f{number % FOLDERS}/{number:05}"


def store_of(url: str) -> S3Store:
    return Side(url, "b", (), OUR_KEY).store


def wait_for_members(url: str) -> None:
    """Until a server knows all the others."""
    deadline = time.monotonic() + PATIENCE_S
    with CacheClient(url, TOKEN) as client:
        while (fleet := client.status().fleet) is None or len(fleet.members) < SERVERS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not find its fleet")
            time.sleep(0.1)


async def look(store: S3Store, key: str) -> None:
    assert (await obstore.head_async(store, key))["size"] == OBJECT_BYTES


async def read(store: S3Store, key: str) -> None:
    assert len(await (await obstore.get_async(store, key)).bytes_async()) == OBJECT_BYTES


async def names(store: S3Store, key: str) -> None:
    found = await obstore.list(store, key.partition("/")[0], chunk_size=OBJECTS).collect_async()
    assert len(found) == OBJECTS // FOLDERS


MIX: Sequence[Do] = (read, names, *[look] * 8)
"""What each ten requests do."""


async def mix(stores: list[S3Store], requests: int, kinds: Sequence[Do] = MIX) -> int:
    """Requests of these kinds, one after the other, each to the next server."""
    left = iter(range(requests))

    async def some() -> None:
        for number in left:
            await kinds[number % len(kinds)](stores[number % len(stores)], key_of(number * 7 % OBJECTS))

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return requests


def of_kinds(
    sides: dict[str, Side], stores: dict[str, list[S3Store]], rounds: int, requests: int
) -> dict[str, object]:
    """Of each kind alone, on both sides."""
    figures: dict[str, object] = {}
    for label, kind, count in (
        ("HEAD", look, 4 * requests),
        ("list of 100", names, requests // 5),
        ("GET of 10 KiB", read, 2 * requests),
    ):

        def work(side: Side, kind: Do = kind, count: int = count) -> int:
            return asyncio.run(mix(stores[side.url], count, (kind,)))

        for name, taken in in_turns(sides, work, rounds).items():
            figures[f"{label}: us of server CPU, {name}"] = round(taken.cpu_s * 1e6, 1)
    return figures


if __name__ == "__main__":
    sys.exit(main())
