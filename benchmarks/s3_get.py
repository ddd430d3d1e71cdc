"""What do signed S3 requests cost at a cache server, against a real S3 server (seaweedfs) on this machine?

Hits of small and large objects by obstore, small ones by boto3, HEADs and lists, and PUTs through the cache against
PUTs to its origin. Server CPU is that of the server's process; both sides in turns, medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import boto3  # type: ignore[import-untyped]
import obstore
from _common import parser, report
from _s3 import KEYS, s3_server
from _serving import serve
from _web import TOKEN, cpu_s, missing_tools, nginx, wrk
from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]
from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.credentials import Credentials  # type: ignore[import-untyped]
from obstore.store import HTTPStore, S3Store

SMALL_BYTES, LARGE_BYTES, PUT_BYTES = 10 * 1024, 64 << 20, 8 << 20
AT_ONCE = 32
THEIR_KEY = Credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
OUR_KEY = Credentials("BENCHMARK", "the-secret-of-the-benchmark")


class Side(NamedTuple):
    """One of the servers. `pids`: its processes."""

    url: str
    bucket: str
    pids: tuple[int, ...]
    key: Credentials

    @property
    def store(self) -> S3Store:
        return S3Store(
            self.bucket,
            endpoint=self.url,
            access_key_id=self.key.access_key,
            secret_access_key=self.key.secret_key,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    @property
    def boto3(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.key.access_key,
            aws_secret_access_key=self.key.secret_key,
            config=Config(retries={"total_max_attempts": 1}),
        )

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))


class Taken(NamedTuple):
    """By one run: requests per second, and server CPU seconds for each."""

    per_s: float
    cpu_s: float


Work = Callable[[Side], int]
"""Does something for a while; how many requests that were."""


def main() -> int:
    """Print the ratios."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, small = (3, 400) if arguments.quick else (7, 2000)
    large = 2 if arguments.quick else 6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "origin").mkdir()
        with s3_server(folder) as weed:
            theirs = Side(weed.url, "bench", (weed.pid,), THEIR_KEY)
            theirs.boto3.create_bucket(Bucket="bench")
            theirs.boto3.create_bucket(Bucket="out")
            asyncio.run(fill(theirs, folder / "origin", small, large))
            through = f"s3://out?endpoint={weed.url}"
            os.environ.update(KEYS)
            key = ("--key", f"{OUR_KEY.access_key}:{OUR_KEY.secret_key}")
            with serve(
                folder / "cache", folder / "origin", *key, "--bucket", f"out={through}", "--writable", "out"
            ) as server:
                ours = Side(server.url, "b", (server.pid,), OUR_KEY)
                figures = measured(theirs, ours, rounds, small, large)
                figures |= limit(ours, folder, rounds, large)
                figures |= signatures(ours, rounds, quick=arguments.quick)
                figures |= writes(theirs._replace(bucket="out"), ours._replace(bucket="out"), rounds)
    report("s3_get", figures, arguments.json)
    return 0


async def fill(theirs: Side, folder: Path, small: int, large: int) -> None:
    """The same objects on both sides."""
    store = theirs.store
    data = {f"small/{number:05}": os.urandom(SMALL_BYTES) for number in range(small)}
    data |= {f"large/{number}": os.urandom(LARGE_BYTES) for number in range(large)}
    for key, content in data.items():
        path = folder / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        await obstore.put_async(store, key, content)


def measured(theirs: Side, ours: Side, rounds: int, small: int, large: int) -> dict[str, object]:
    """Reads, ours over theirs."""
    smalls, larges = [f"small/{n:05}" for n in range(small)], [f"large/{n}" for n in range(large)]
    figures: dict[str, object] = {}
    for label, work, rate_goal, cpu_goal in (
        ("obstore, 10 KiB", lambda side: each(side, smalls, read), 2.0, 0.5),
        ("obstore, 64 MiB", lambda side: each(side, larges, read, at_once=2), 1.5, None),
        ("boto3, 10 KiB", lambda side: by_boto3(side, smalls[: small // 4]), None, None),
        ("obstore, 9 HEADs to a list of 100", lambda side: each(side, smalls, look), None, None),
    ):
        sides = in_turns({"theirs": theirs, "ours": ours}, work, rounds)
        rate = sides["ours"].per_s / sides["theirs"].per_s
        cpu = sides["ours"].cpu_s / sides["theirs"].cpu_s
        figures[f"{label}: requests/s" + (f" (goal {rate_goal})" if rate_goal else "")] = rate
        figures[f"{label}: server CPU a request" + (f" (goal {cpu_goal})" if cpu_goal else "")] = cpu
        figures[f"{label}: stoker's requests/s"] = round(sides["ours"].per_s)
    return figures


def limit(ours: Side, folder: Path, rounds: int, large: int) -> dict[str, object]:
    """Large objects, ours over what the same client reads from nginx: more than that it cannot take here."""
    if missing := missing_tools():
        return {f"obstore, 64 MiB, over nginx: skipped, {' and '.join(missing)} not found": 0}
    keys = [f"large/{number}" for number in range(large)]
    folder.chmod(0o755)  # nginx's worker is another user
    (folder / "www").symlink_to(folder / "origin")
    rates: list[float] = []
    with nginx(folder) as (url, _):
        proof = {"authorization": f"Bearer {TOKEN}"}
        theirs = HTTPStore.from_url(url, client_options={"allow_http": True, "default_headers": proof})
        for number in range(rounds + 1):
            spent_s = []
            for store in (ours.store, theirs):
                began = time.perf_counter()
                asyncio.run(each_of(store, keys, read, 2))
                spent_s.append(time.perf_counter() - began)
            if number:
                rates.append(spent_s[1] / spent_s[0])
    return {"obstore, 64 MiB: requests/s over nginx": statistics.median(rates)}


def signatures(ours: Side, rounds: int, *, quick: bool) -> dict[str, object]:
    """What verifying costs: signed hits over the same with a bearer token."""
    if missing := missing_tools():
        return {f"signed over bearer: skipped, {' and '.join(missing)} not found": 0}
    url, seconds = f"{ours.url}/b/small/00000", 1 if quick else 2
    bearer: list[float] = []
    signed: list[float] = []
    for number in range(rounds + 1):
        request = AWSRequest("GET", url)
        S3SigV4Auth(OUR_KEY, "s3", "us-east-1").add_auth(request)
        proof = str(request.headers["Authorization"])
        del request.headers["Authorization"]
        lines = [f"{name}: {value}" for name, value in request.headers.items()]
        for costs, authorization in ((bearer, f"Bearer {TOKEN}"), (signed, proof)):
            before = ours.cpu_s()
            asked = wrk(url, seconds, AT_ONCE, *lines, authorization=authorization)
            if number:
                costs.append((ours.cpu_s() - before) / asked.requests)
    bearer_s, signed_s = statistics.median(bearer), statistics.median(signed)
    return {
        "signed over bearer, 10 KiB hits: server CPU a request": signed_s / bearer_s,
        "a signature: us of CPU": round((signed_s - bearer_s) * 1e6, 2),
    }


def writes(theirs: Side, ours: Side, rounds: int) -> dict[str, object]:
    """PUTs through the cache over PUTs to its origin."""
    data = os.urandom(PUT_BYTES)

    def put(side: Side) -> int:
        client = side.boto3
        for number in range(8):
            client.put_object(Bucket=side.bucket, Key=f"put-{number}", Body=data)
        return 8

    sides = in_turns({"theirs": theirs, "ours": ours}, put, rounds)
    return {"boto3, PUT of 8 MiB through: requests/s (goal 0.8)": sides["ours"].per_s / sides["theirs"].per_s}


def in_turns(sides: dict[str, Side], work: Work, rounds: int) -> dict[str, Taken]:
    """Medians of each side; the first round warms up."""
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            before, began = sides[name].cpu_s(), time.perf_counter()
            requests = work(sides[name])
            spent_s = time.perf_counter() - began
            if number:
                taken[name].append(Taken(requests / spent_s, (sides[name].cpu_s() - before) / requests))
    return {
        name: Taken(
            statistics.median(one.per_s for one in all_), statistics.median(one.cpu_s for one in all_)
        )
        for name, all_ in taken.items()
    }


async def read(store: S3Store | HTTPStore, number: int, key: str) -> None:
    """A whole object."""
    await (await obstore.get_async(store, key)).bytes_async()


async def look(store: S3Store | HTTPStore, number: int, key: str) -> None:
    """As those do who look more than they read."""
    if number % 10:
        await obstore.head_async(store, key)
        return
    async for _ in obstore.list(store, key[:-2], chunk_size=100):
        pass


def each(
    side: Side,
    keys: list[str],
    do: Callable[[S3Store | HTTPStore, int, str], Awaitable[None]],
    at_once: int = AT_ONCE,
) -> int:
    """Do it for each key, so many at once."""
    asyncio.run(each_of(side.store, keys, do, at_once))
    return len(keys)


async def each_of(
    store: S3Store | HTTPStore,
    keys: list[str],
    do: Callable[[S3Store | HTTPStore, int, str], Awaitable[None]],
    at_once: int,
) -> None:
    """The same of any store."""
    left = iter(enumerate(keys))

    async def some() -> None:
        for number, key in left:
            await do(store, number, key)

    await asyncio.gather(*(some() for _ in range(at_once)))


def by_boto3(side: Side, keys: list[str]) -> int:
    """One after the other."""
    client = side.boto3
    for key in keys:
        client.get_object(Bucket=side.bucket, Key=key)["Body"].read()
    return len(keys)


if __name__ == "__main__":
    sys.exit(main())
