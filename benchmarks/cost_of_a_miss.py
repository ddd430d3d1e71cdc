"""What does it cost the cache server to fetch a record, store it, and answer with it?

Cold records of 100 KiB, read in batches of 64 by two connections at the server's Unix socket, each once: from a real S3
server and from a local folder. The cost is CPU time of the server's process (user and system), which other work on the
machine hardly changes, in microseconds a record. Beside it: what the S3 server and the reader compute for a record, and
what an `obstore` of its own costs for the same GETs.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import boto3  # type: ignore[import-untyped]
import obstore
from _common import interleaved, parser, report
from _s3 import BUCKET, KEYS, S3, s3_server
from obstore.store import S3Store

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache

RECORD_BYTES = 100 * 1024
BATCH = 64
CONNECTIONS = 2
TOKEN = "benchmark-token"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Costs = dict[str, list[float]]


def main() -> int:
    """Print microseconds a record."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, records = (3, 2048) if arguments.quick else (5, 8192)
    os.environ |= KEYS
    costs: Costs = {}
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name)) as server:
        origin = Path(name, "origin")
        fill(server, origin, records)
        urls = {"S3": f"s3://{BUCKET}?endpoint={server.url}", "folder": origin.as_uri()}
        sides: dict[str, Callable[[], float]] = {
            side: partial(epoch, side, url, Path(name), records, server.pid, costs)
            for side, url in urls.items()
        }
        sides["obstore"] = lambda: by_obstore(server, records)
        found = interleaved(sides, rounds)
    figures: dict[str, object] = {"records": f"{records} x {RECORD_BYTES} B, {rounds} rounds"}
    for side, values in (found | costs).items():
        figures[f"{side}: us a record (least, median)"] = (
            f"{min(values):.0f}, {statistics.median(values):.0f}"
        )
    report("cost_of_a_miss", figures, arguments.json)
    return 0


def fill(server: S3, folder: Path, records: int) -> None:
    """The same objects in a bucket and in a folder."""
    s3 = boto3.client("s3", endpoint_url=server.url)
    s3.create_bucket(Bucket=BUCKET)
    (folder / "k").mkdir(parents=True)
    rest = os.urandom(RECORD_BYTES - 8)

    def put(number: int) -> None:
        data = number.to_bytes(8, "big") + rest
        (folder / key(number)).write_bytes(data)
        s3.put_object(Bucket=BUCKET, Key=key(number), Body=data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(records)))


def key(number: int) -> str:
    """The name of a record."""
    return f"k/{number:07}"


def epoch(side: str, url: str, folder: Path, records: int, s3_pid: int, costs: Costs) -> float:
    """Read all with an empty cache; returns what that cost the server for each."""
    numbers = list(range(records))
    random.Random(1).shuffle(numbers)
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        EmbeddedCache(name, 20 * 10**9, {"b": url}, TOKEN) as cache,
    ):
        assert cache.endpoint is not None
        pid, unix_url = cache.endpoint.pid, cache.endpoint.unix_url
        before = computed_s(pid), computed_s(s3_pid), own_s()
        threads = [
            threading.Thread(target=read, args=(unix_url, numbers[first::CONNECTIONS]))
            for first in range(CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = computed_s(pid), computed_s(s3_pid), own_s()
        with CacheClient(unix_url, TOKEN) as client:
            if client.status().origin_bytes != records * RECORD_BYTES:
                raise RuntimeError(f"{client.status().origin_bytes} bytes came from the origin")
    server_us, s3_us, reader_us = (1e6 * (a - b) / records for a, b in zip(after, before, strict=True))
    costs.setdefault(f"{side}, reader", []).append(reader_us)
    if side == "S3":
        costs.setdefault("S3, S3 server", []).append(s3_us)
    return server_us


def read(url: str, numbers: list[int]) -> None:
    """Batch after batch."""
    with CacheClient(url, TOKEN) as client:
        for batch in batches(numbers):
            for number, record in zip(batch, client.read_many("b", [key(n) for n in batch]), strict=True):
                assert len(record) == RECORD_BYTES
                assert int.from_bytes(record[:8], "big") == number


def batches(numbers: list[int]) -> Iterator[list[int]]:
    """Of BATCH each."""
    for first in range(0, len(numbers), BATCH):
        yield numbers[first : first + BATCH]


def by_obstore(server: S3, records: int) -> float:
    """The same GETs by obstore in this process, as the cache's origin made them: as streams, BATCH at a time."""
    config = {"endpoint": server.url, "access_key_id": "AK", "secret_access_key": "SK", "region": "us-east-1"}
    store = S3Store(BUCKET, config=config, client_options={"allow_http": True})  # type: ignore[arg-type]

    async def whole() -> None:
        turns = asyncio.Semaphore(BATCH)

        async def get(number: int) -> None:
            async with turns:
                found = await obstore.get_async(store, key(number), options={"range": (0, 4 << 20)})
                sizes = [len(part) async for part in found.stream(min_chunk_size=256 * 1024)]
                assert sum(sizes) == RECORD_BYTES

        await asyncio.gather(*(get(number) for number in range(records)))

    before = own_s()
    asyncio.run(whole())
    return 1e6 * (own_s() - before) / records


def computed_s(pid: int) -> float:
    """CPU time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
        return _TICK_S * sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def own_s() -> float:
    """That of this one, as exactly as it is known."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
