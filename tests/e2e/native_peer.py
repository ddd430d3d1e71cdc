"""An owner beside a native front: it answers rightly, or as wrongly as a test has it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

DATA = bytes(range(256)) * 40
Say = Callable[[socket.socket, bytes], bool]
"""Answers a request; whether the connection is kept."""


class Peer:
    """The owner of all: a listening socket, and what is said to each request."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.heads: list[bytes] = []
        self.accepted = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._links: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self.listener.accept()
                self.accepted += 1
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while head := head_of(link):
                self.heads.append(head)
                if not self.say(link, head):
                    break
        link.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def head_of(link: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = link.recv(1)
        if not part:
            return b""
        head += part
    return head


def whole(link: socket.socket, head: bytes) -> bool:
    """As an owner answers."""
    link.sendall(answer_to(head))
    return True


def answer_to(head: bytes) -> bytes:
    start, stop = asked_range(head)
    return (
        b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nETag: "v1"\r\nAccept-Ranges: bytes\r\n'
        b"Content-Range: bytes %d-%d/%d\r\n\r\n" % (stop - start, start, stop - 1, len(DATA))
    ) + DATA[start:stop]


def asked_range(head: bytes) -> tuple[int, int]:
    line = next(line for line in head.split(b"\r\n") if line.startswith(b"Range: bytes="))
    start, _, last = line.removeprefix(b"Range: bytes=").partition(b"-")
    return int(start), int(last) + 1


@contextlib.contextmanager
def owner(say: Say = whole) -> Iterator[Peer]:
    peer = Peer(say)
    try:
        yield peer
    finally:
        peer.close()
