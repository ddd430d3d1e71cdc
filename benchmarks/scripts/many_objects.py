"""`many_objects.py COUNT SIZE_BYTES WAIT_S [BYTES_PER_S]`: an S3 origin with COUNT objects. Prints its port.

Lists come in pages of 1,000 keys, each answer after WAIT_S, as from far away; all bodies of objects together flow at
BYTES_PER_S. `/-/taken` says how many lists, other requests and bytes of objects there were since it was asked last.
Keys are 41 bytes, ETags 32.
"""

from __future__ import annotations

import asyncio
import json
import sys
from bisect import bisect_left, bisect_right
from urllib.parse import parse_qs, unquote

import uvloop

PAGE = 1000
_LAST = "\U0010ffff"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


def key_of(number: int) -> str:
    return f"train/shard-{number // 1000:05}/sample-{number:012}.bin"


class Origin:
    def __init__(self, count: int, size_bytes: int, wait_s: float, bytes_per_s: float) -> None:
        self.count = count
        self.size_bytes = size_bytes
        self.wait_s = wait_s
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0
        self.taken = {"lists": 0, "requests": 0, "bytes": 0}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ")
                ranges = [line[13:].strip() for line in lines if line.lower().startswith("range: bytes=")]
                path, _, query = target.partition("?")
                await self.answer(method, unquote(path), query, ranges[0] if ranges else "", writer)
        except (
            asyncio.IncompleteReadError,
            ConnectionError,
            RuntimeError,
        ):  # uvloop's, where the peer is gone
            pass
        finally:
            writer.close()

    async def answer(
        self, method: str, path: str, query: str, asked: str, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/-/taken":
            body = json.dumps(self.taken).encode()
            self.taken = dict.fromkeys(self.taken, 0)
            writer.write(head("200 OK", len(body)) + body)
            return
        due = asyncio.get_running_loop().time() + self.wait_s
        key = path.partition("/")[2].partition("/")[2]
        if not key:
            self.taken["lists"] += 1
            body = self.page({name: values[0] for name, values in parse_qs(query).items()})
            await until(due)
            writer.write(head("200 OK", len(body)) + body)
            return
        self.taken["requests"] += 1
        number = bisect_left(range(self.count), key, key=key_of)
        if number == self.count or key_of(number) != key:
            await until(due)
            writer.write(head("404 Not Found", 0))
            return
        first, stop, status = 0, self.size_bytes, "200 OK"
        more = f'ETag: "{number:032x}"\r\n'
        if asked:
            low, _, high = asked.partition("-")
            first, stop, status = int(low), min(stop, int(high or stop - 1) + 1), "206 Partial Content"
            more += f"Content-Range: bytes {first}-{stop - 1}/{self.size_bytes}\r\n"
        size = 0 if method == "HEAD" else stop - first
        self.taken["bytes"] += size
        self.free_at = max(self.free_at, due - self.wait_s) + size / self.bytes_per_s
        await until(max(due, self.free_at))
        writer.write(head(status, stop - first, more) + bytes(size))
        await writer.drain()

    def page(self, query: dict[str, str]) -> bytes:
        """ListObjectsV2, without folders; the token that goes on is the key after which it does."""
        prefix = query.get("prefix", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        numbers = range(self.count)
        first = max(
            bisect_left(numbers, prefix, key=key_of), bisect_right(numbers, after, key=key_of) if after else 0
        )
        stop = bisect_left(numbers, prefix + _LAST, key=key_of)
        last = min(stop, first + min(PAGE, int(query.get("max-keys", PAGE))))
        said = [
            f"<Contents><Key>{key_of(number)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{number:032x}&quot;</ETag><Size>{self.size_bytes}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for number in range(first, last)
        ]
        is_cut = last < stop
        token = f"<NextContinuationToken>{key_of(last - 1)}</NextContinuationToken>" if is_cut else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>bucket</Name><Prefix/>'
            f"<KeyCount>{len(said)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
            f"<IsTruncated>{'true' if is_cut else 'false'}</IsTruncated>{token}{''.join(said)}</ListBucketResult>"
        ).encode()


def head(status: str, size_bytes: int, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {size_bytes}\r\nLast-Modified: {_DATE}\r\n{more}\r\n".encode()
    )


async def until(due: float) -> None:
    left_s = due - asyncio.get_running_loop().time()
    if left_s > 0:
        await asyncio.sleep(left_s)


async def main() -> None:
    count, size_bytes, wait_s = sys.argv[1:4]
    bytes_per_s = float(sys.argv[4]) if len(sys.argv) > 4 else 1e12
    origin = Origin(int(count), int(size_bytes), float(wait_s), bytes_per_s)
    server = await asyncio.start_server(origin.connected, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
