"""How fast is the first read of a large file through the cache, from an origin that is slow on each stream?

The origin sends 40 MB/s on each stream after 10 ms. One reader of one cold file, with one server and with a fleet of
four, also from an origin of 10 MB/s a stream, which leaves the processors time; the first byte against the origin's
own; 200 readers of one cold file against one direct read, from an origin of 4 MB/s a stream, which their links allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, parser, report

from stoker.cache.client.fleet import open_client

STREAM_BYTES_PER_S = 40e6
SLOW_BYTES_PER_S = 10e6
LINKS_BYTES_PER_S = 4e6
WAIT_S = 0.01
TOKEN = "a-token-for-benchmarks"
MIB = 1024 * 1024
STREAMS = {"1 server": 4, "4 servers": 8}
_names = itertools.count()


def main() -> int:
    """Print throughput over that of the streams, and the other ratios."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, file_bytes = (3, 128 * MIB) if arguments.quick else (5, 512 * MIB)
    figures: dict[str, object] = {}
    for rate in (STREAM_BYTES_PER_S, SLOW_BYTES_PER_S):
        with _fleets(rate) as (port, one, four):
            sides = {
                "1 server": lambda one=one: _read_cold(one, file_bytes),
                "4 servers": lambda four=four: _read_cold(four, file_bytes),
            }
            for label, rates in interleaved(sides, rounds).items():
                bound = STREAMS[label] * rate
                name = f"{label}, {rate / 1e6:.0f} MB/s a stream: bytes/s over {STREAMS[label]} streams' (goal 0.9)"
                figures[name] = statistics.median(rates) / bound
            if rate == STREAM_BYTES_PER_S:
                figures |= _first_bytes(one[0], port, file_bytes, 2 * rounds)
    with _fleets(LINKS_BYTES_PER_S) as (port, one, _):
        figures |= _many(one[0], port, 16 * MIB)
    report("cold_read", figures, arguments.json)
    return 0


@contextlib.contextmanager
def _fleets(stream_bytes_per_s: float) -> Iterator[tuple[int, list[str], list[str]]]:
    """An origin's port, the URL of one server in front of it, and those of a fleet of four."""
    with (
        tempfile.TemporaryDirectory() as name,
        _origin(stream_bytes_per_s) as port,
        _servers(Path(name) / "one", port, 1) as one,
        _servers(Path(name) / "four", port, 4) as four,
    ):
        yield port, one, four


def _first_bytes(url: str, origin_port: int, file_bytes: int, rounds: int) -> dict[str, object]:
    first = interleaved(
        {
            "direct": lambda: _first_byte(f"http://127.0.0.1:{origin_port}/bucket", "", file_bytes),
            "cache": lambda: _first_byte(f"{url}/b", TOKEN, file_bytes),
        },
        rounds,
    )
    ratio = statistics.median(first["cache"]) / statistics.median(first["direct"])
    return {"first byte over the origin's (goal 1.5)": ratio}


def _fresh(size_bytes: int) -> str:
    return f"f{next(_names)}-{size_bytes}"


def _read_cold(urls: list[str], size_bytes: int) -> float:
    with open_client(",".join(urls), TOKEN) as client:
        began = time.perf_counter()
        data = client.read("b", _fresh(size_bytes))
        took = time.perf_counter() - began
    assert len(data) == size_bytes
    return size_bytes / took


def _first_byte(base: str, token: str, size_bytes: int) -> float:
    """From the request to the first byte of the body, in seconds; the key is known to nobody."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{base}/{_fresh(size_bytes)}", headers=headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read(1)
        return time.perf_counter() - began


def _many(url: str, port: int, size_bytes: int, readers: int = 200) -> dict[str, object]:
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket/{_fresh(size_bytes)}") as answer:
        while answer.read(MIB):
            pass
    direct_s = time.perf_counter() - began
    _served(port)
    name = _fresh(size_bytes)
    began = time.perf_counter()
    asyncio.run(_readers(url, name, size_bytes, readers))
    took = time.perf_counter() - began
    return {
        f"{readers} readers: origin bytes over file bytes (goal 1.00)": _served(port) / size_bytes,
        f"{readers} readers: time over one direct read's (goal 1.1)": took / direct_s,
        f"{readers} readers: GB/s in all": readers * size_bytes / took / 1e9,
    }


async def _readers(url: str, name: str, size_bytes: int, readers: int) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def read() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /b/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        left = size_bytes
        while left:
            part = await reader.read(MIB)
            assert part
            left -= len(part)
        writer.close()

    await asyncio.gather(*(read() for _ in range(readers)))


def _served(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/bytes") as answer:
        return int(answer.read())


@contextlib.contextmanager
def _origin(stream_bytes_per_s: float) -> Iterator[int]:
    script = Path(__file__).parent / "scripts" / "slow_origin.py"
    command = [sys.executable, str(script), str(stream_bytes_per_s), str(WAIT_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.kill()


@contextlib.contextmanager
def _servers(folder: Path, origin_port: int, count: int) -> Iterator[list[str]]:
    """So many servers of one fleet."""
    folder.mkdir()
    lines = [f'tokens = ["{TOKEN}"]', f'fleet = "{folder}/members"', "[buckets.b]"]
    lines.append(f'origin_url = "s3://bucket?endpoint=http://127.0.0.1:{origin_port}"')
    lines.append(f"read_ahead_streams = {STREAMS[f'{count} server' + 's' * (count > 1)] // count}")
    (folder / "cache.toml").write_text("\n".join(lines))
    children, urls = [], []
    try:
        for number in range(count):
            command = [sys.executable, "-m", "stoker.cli.main", "cache", "serve", "--listen", "127.0.0.1:0"]
            command += ["--config", f"{folder}/cache.toml", "--name", f"s{number}"]
            command += ["--dir", f"{folder}/{number}", "--capacity", "20GB"]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            children.append(child)
            assert child.stdout is not None
            urls.append(child.stdout.readline().split()[2])
        time.sleep(2.5)  # until all have seen all
        yield urls
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
