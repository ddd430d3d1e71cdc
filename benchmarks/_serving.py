"""Cache servers of their own for benchmarks, and raw requests to them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from _web import TOKEN

_STOP_S = 30.0


class Server(NamedTuple):
    """Where a server is, which process it is, and how long it took until it said so."""

    url: str
    pid: int
    start_s: float

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def serve(
    folder: Path,
    origin: Path,
    *flags: str,
    listen: str = "127.0.0.1:0",
    capacity_bytes: int = 20 * 10**9,
    entry: Sequence[str] = (),
) -> Iterator[Server]:
    """`stoker cache serve` of a bucket `b`. `entry`: what stands before its command."""
    command = [
        *entry,
        sys.executable,
        "-m",
        "stoker.cli.main",
        "cache",
        "serve",
        "--listen",
        listen,
        "--token",
        TOKEN,
    ]
    command += ["--dir", str(folder), "--capacity", str(capacity_bytes), "--bucket", f"b={origin}", *flags]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            said = child.stdout.readline().split()
            if said[:2] != ["serving", "at"]:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            yield Server(said[2], child.pid, time.perf_counter() - began)
        finally:
            child.terminate()
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


class Asker:
    """One connection, one request after the other; bodies are counted and thrown away."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.body_bytes = 0
        self._socket = socket.create_connection(address, 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, target: str, method: str = "GET", *headers: str) -> int:
        """How many bytes of body came. Raises RuntimeError for anything but 200 and 206."""
        lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", *headers]
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = b""
        while b"\r\n\r\n" not in head:
            part = self._socket.recv(16384)
            if not part:
                raise RuntimeError(f"{target}: the server closed the connection")
            head += part
        head, _, body = head.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        if status.split()[1] not in ("200", "206"):
            raise RuntimeError(f"{target}: {status} {body[:200]!r}")
        if method == "HEAD":
            return 0
        named = dict(field.lower().split(": ", 1) for field in fields)
        size_bytes = int(named["content-length"])
        self.body_bytes += len(body)
        self._discard(size_bytes - len(body))
        return size_bytes

    def _discard(self, left: int) -> None:
        """The kernel throws them away without a copy: a reader on the server's own machine should cost little."""
        buffer = bytearray(min(max(left, 1), 1 << 20))
        while left > 0:
            got = self._socket.recv_into(buffer, min(left, len(buffer)), socket.MSG_TRUNC)
            if got == 0:
                raise RuntimeError("the server closed the connection in the midst of an answer")
            left -= got
            self.body_bytes += got

    def close(self) -> None:
        self._socket.close()


def rss_bytes(pid: int) -> int:
    """What a process has in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Readers:
    """Processes that read until their standard input ends, and answer each line of it with the bytes they have read."""

    def __init__(self, commands: Iterable[Sequence[str]]) -> None:
        pipe = subprocess.PIPE
        self._children = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands
        ]

    def __enter__(self) -> Readers:
        while not all(self._say()):
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.communicate()

    def read_bytes(self) -> int:
        """How much all have read so far."""
        return sum(self._say())

    def _say(self) -> list[int]:
        said = []
        for child in self._children:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            said.append(int(child.stdout.readline()))
        return said
