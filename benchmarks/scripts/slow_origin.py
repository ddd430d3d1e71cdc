"""An S3 origin with one bucket of made-up objects, each answer paced to so many bytes a second after a first wait.

`/bucket/NAME-SIZE` has SIZE bytes. `/-/bytes` says how many bytes were served since it was asked last.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

PART_BYTES = 64 * 1024
PATTERN = bytes(range(256)) * (PART_BYTES // 256 + 1)


class Origin:
    def __init__(self, stream_bytes_per_s: float, wait_s: float) -> None:
        self.rate = stream_bytes_per_s
        self.wait_s = wait_s
        self.served = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:])}
                await self.answer(method, target.partition("?")[0], headers, writer)
        except (
            asyncio.IncompleteReadError,
            ConnectionError,
            RuntimeError,
        ):  # uvloop's, where the peer is gone
            pass
        finally:
            writer.close()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        if path == "/-/bytes":
            body, self.served = str(self.served).encode(), 0
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            return
        total = int(path.rpartition("-")[2])
        first, stop, status = 0, total, "200 OK"
        extra = ""
        if asked := headers.get("range", "").removeprefix("bytes="):
            low, _, high = asked.partition("-")
            first, stop, status = int(low), min(total, int(high or total - 1) + 1), "206 Partial Content"
            extra = f"Content-Range: bytes {first}-{stop - 1}/{total}\r\n"
        await asyncio.sleep(self.wait_s)
        writer.write(
            f'HTTP/1.1 {status}\r\nContent-Length: {stop - first}\r\nETag: "1"\r\n{extra}'
            "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n".encode()
        )
        if method == "HEAD":
            return
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        while first + sent < stop:
            size = min(PART_BYTES, stop - first - sent)
            inside = (first + sent) % 256
            writer.write(PATTERN[inside : inside + size])
            sent += size
            self.served += size
            await writer.drain()
            ahead_s = began + sent / self.rate - loop.time()
            if ahead_s > 0.002:
                await asyncio.sleep(ahead_s)


async def main() -> None:
    origin = Origin(float(sys.argv[1]), float(sys.argv[2]))
    server = await asyncio.start_server(origin.connected, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
