"""`limited_origin.py PORT TOTAL STREAM WAIT_S`: an S3 server on PORT, as it looks from far away. Prints its own port.

Answers begin after WAIT_S, and flow at STREAM bytes a second each and TOTAL together. Requests pass as they are, so
that what is signed stays signed. `/-/taken` says how many bytes of bodies and how many requests there were since it was
asked last.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import NamedTuple

import uvloop

PART_BYTES = 64 * 1024
LATE_S = 0.005
"""What a turn of the loop may come too late by without that being lost."""
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Answer(NamedTuple):
    head: bytes
    status: int
    size_bytes: int
    is_chunked: bool


class Origin:
    def __init__(self, port: int, total_bytes_per_s: float, stream_bytes_per_s: float, wait_s: float) -> None:
        self.port = port
        self.total = total_bytes_per_s
        self.stream = stream_bytes_per_s
        self.wait_s = wait_s
        self.free_at = 0.0
        self.body_bytes = 0
        self.requests = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: Link | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /-/taken "):
                    self.tell(writer)
                    continue
                if link is None:
                    server = local_socket()
                    await asyncio.get_running_loop().sock_connect(server, ("127.0.0.1", self.port))
                    link = await asyncio.open_connection(sock=server, limit=4 * PART_BYTES)
                await self.hand_on(head, link, writer)
        except (
            asyncio.IncompleteReadError,
            ConnectionError,
            RuntimeError,
        ):  # uvloop's, where the peer is gone
            pass
        finally:
            writer.close()
            if link is not None:
                link[1].close()

    def tell(self, writer: asyncio.StreamWriter) -> None:
        said = {"body_bytes": self.body_bytes, "requests": self.requests}
        self.body_bytes = self.requests = 0
        body = json.dumps(said).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def hand_on(self, head: bytes, link: Link, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self.wait_s
        self.requests += 1
        link[1].write(head)
        answer = parsed(await link[0].readuntil(b"\r\n\r\n"))
        if (left_s := due - loop.time()) > 0:
            await asyncio.sleep(left_s)
        writer.write(answer.head)
        if head.startswith(b"HEAD ") or answer.status in (204, 304):
            return
        began = loop.time()
        if not answer.is_chunked:
            await self.relay(answer.size_bytes, began, 0, link[0], writer)
            return
        sent = 0
        while True:
            line = await link[0].readuntil(b"\r\n")
            size = int(line, 16)
            writer.write(line)
            await self.relay(size + 2, began, sent, link[0], writer)
            sent += size
            if size == 0:
                return

    async def relay(
        self, size: int, began: float, sent: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """So many bytes of a body of which `sent` are gone, each part when its last byte would be there."""
        loop = asyncio.get_running_loop()
        while size > 0:
            part = await reader.readexactly(min(PART_BYTES, size))
            size -= len(part)
            sent += len(part)
            now = loop.time()
            self.free_at = max(self.free_at, now - LATE_S) + len(part) / self.total
            due = max(self.free_at, began + sent / self.stream)
            if due - now > 0.001:
                await asyncio.sleep(due - now)
            writer.write(part)
            self.body_bytes += len(part)
            await writer.drain()


def parsed(head: bytes) -> Answer:
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    is_chunked = fields.get("transfer-encoding", "") == "chunked"
    return Answer(head, int(status.split()[1]), int(fields.get("content-length", 0)), is_chunked)


def local_socket() -> socket.socket:
    """Never paced by what the kernel believes of a network."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return made


async def main() -> None:
    port, total, stream, wait_s = sys.argv[1:5]
    origin = Origin(int(port), float(total), float(stream), float(wait_s))
    listener = local_socket()
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(origin.connected, sock=listener, backlog=256)
    print(listener.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
