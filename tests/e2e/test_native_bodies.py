"""Bodies that come as the back asks for them, over real sockets."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker._native import Front
from tests.e2e.native_front import Asked, answering, new_front

pytestmark = pytest.mark.real
AUTHORIZATION = b"Host: h\r\nAuthorization: Bearer secret-token\r\n"
BODY = bytes(range(256)) * 4096
"""1 MiB."""


class Back:
    """Has what the front says, and answers when a test says so."""

    def __init__(self, front: Front, port: int) -> None:
        self.front = front
        self.port = port
        self.asked: queue.Queue[tuple[int, Asked]] = queue.Queue()
        self.heard: queue.Queue[tuple[str, int, tuple[bytes, bool] | None]] = queue.Queue()

    def connect(self, head: bytes) -> tuple[socket.socket, int, Asked]:
        """A connection by which that request came."""
        link = socket.create_connection(("127.0.0.1", self.port), 60)
        link.sendall(b"%b%b\r\n" % (head, AUTHORIZATION))
        connection, asked = self.asked.get(timeout=60)
        return link, connection, asked

    def body(self) -> tuple[bytes, bool]:
        """The next part."""
        kind, _, part = self.heard.get(timeout=60)
        assert kind == "body"
        assert part is not None
        return part

    def answer(self, connection: int, text: bytes = b"done") -> None:
        self.front.say(connection, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        self.front.finish(connection)


@contextlib.contextmanager
def served(folder: Path, **limits: float) -> Iterator[Back]:
    front, _, _, bucket = new_front(folder, **limits)
    listener = socket.create_server(("127.0.0.1", 0))
    front.set_rules([(7, "secret-token", {"*": [""]}, "", "")], {"data": (bucket, 100.0, 0)})
    back = Back(front, listener.getsockname()[1])
    put: Callable[[int, Asked], None] = lambda connection, asked: back.asked.put((connection, asked))  # noqa: E731
    with answering(front, listener, put, lambda *said: back.heard.put(said)):
        yield back


def test_a_body_comes_only_as_far_as_it_was_asked_for(tmp_path: Path) -> None:
    with served(tmp_path) as back:
        link, connection, asked = back.connect(b"PUT /data/x HTTP/1.1\r\nContent-Length: %d\r\n" % len(BODY))
        with link:
            assert asked[0] == "PUT"
            assert asked[3] == b""
            assert asked[6] == len(BODY)
            link.settimeout(60)
            link.sendall(BODY[:300_000])
            back.front.more(connection, 1000)
            got = b""
            while len(got) < 1000:
                part, is_last = back.body()
                assert not is_last
                got += part
            assert got == BODY[:1000]
            assert back.heard.empty()
            back.front.more(connection, 1 << 30)
            link.sendall(BODY[300_000:])
            is_last = False
            while not is_last:
                part, is_last = back.body()
                got += part
            assert got == BODY
            back.answer(connection)
            assert link.recv(1000).endswith(b"done")
            link.sendall(b"GET /data/next HTTP/1.1\r\n%b\r\n" % AUTHORIZATION)
            assert back.asked.get(timeout=60)[1][1] == b"/data/next", "the connection goes on"


def test_a_chunked_body_comes_without_its_framing(tmp_path: Path) -> None:
    with served(tmp_path) as back:
        link, connection, asked = back.connect(b"PUT /data/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n")
        with link:
            assert asked[6] == -1
            back.front.more(connection, 1 << 20)
            link.sendall(b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: t\r\n\r\nGET /data/y HTTP/1.1\r\n")
            got, is_last = b"", False
            while not is_last:
                part, is_last = back.body()
                got += part
            assert got == b"hello world"
            back.answer(connection)
            link.sendall(AUTHORIZATION + b"\r\n")
            assert back.asked.get(timeout=60)[1][1] == b"/data/y", "what follows the body is the next request"


def test_who_waits_to_be_told_is_told_when_the_body_is_wanted(tmp_path: Path) -> None:
    head = b"PUT /data/x HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n"
    with served(tmp_path) as back:
        link, connection, _ = back.connect(head)
        with link:
            back.front.more(connection, 100)
            assert link.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            link.sendall(b"body")
            assert back.body() == (b"body", True)
            back.answer(connection)
            assert b"200 OK" in link.recv(1000)
        link, connection, _ = back.connect(head)
        with link:
            back.answer(connection, b"refused")
            answer = b""
            while part := link.recv(1000):
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"100 Continue" not in answer, "nobody wants the body"


def test_a_body_that_nobody_took_ends_the_connection(tmp_path: Path) -> None:
    with served(tmp_path) as back:
        link, connection, _ = back.connect(b"PUT /data/x HTTP/1.1\r\nContent-Length: 40\r\n")
        with link:
            link.sendall(b"GET /data/smuggled HTTP/1.1\r\n\r\n")
            back.answer(connection)
            answer = b""
            while part := link.recv(1000):
                answer += part
            assert answer.endswith(b"done")
            assert back.asked.empty(), "a body is never a request"


@pytest.mark.parametrize("how", ["ends", "breaks", "bad chunk"])
def test_the_back_hears_of_a_body_that_will_not_be_whole(how: str, tmp_path: Path) -> None:
    framing = b"Transfer-Encoding: chunked" if how == "bad chunk" else b"Content-Length: 100"
    with served(tmp_path) as back:
        link, connection, _ = back.connect(b"PUT /data/x HTTP/1.1\r\n%b\r\n" % framing)
        with link:
            back.front.more(connection, 1 << 20)
            if how == "bad chunk":
                link.sendall(b"5\r\nhello\r\nnonsense\r\n")
            else:
                link.sendall(b"some")
                assert back.body() == (b"some", False)
                if how == "breaks":
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                link.close()
            kinds = []
            while "gone" not in kinds:
                kind, which, part = back.heard.get(timeout=60)
                assert which == connection
                assert part is None or not part[1]
                kinds.append(kind)


def test_a_peer_that_sends_nothing_more_is_given_up(tmp_path: Path) -> None:
    with served(tmp_path, body_s=0.5) as back:
        link, connection, _ = back.connect(b"PUT /data/x HTTP/1.1\r\nContent-Length: 100\r\n")
        with link:
            back.front.more(connection, 100)
            assert back.heard.get(timeout=60)[:2] == ("gone", connection)


def test_a_back_that_takes_its_time_is_waited_for(tmp_path: Path) -> None:
    with served(tmp_path, body_s=0.5) as back:
        link, connection, _ = back.connect(b"PUT /data/x HTTP/1.1\r\nContent-Length: 4\r\n")
        with link:
            link.sendall(b"body")
            with pytest.raises(queue.Empty):
                back.heard.get(timeout=2.5)
            back.front.more(connection, 100)
            assert back.body() == (b"body", True)
            back.answer(connection)
            assert link.recv(1000).endswith(b"done")


def test_a_peer_that_sends_a_byte_now_and_then_is_given_up(tmp_path: Path) -> None:
    """Whatever it sends is in time, and all of it is not."""
    with served(tmp_path, body_s=0.5, body_bytes_per_s_min=1e9) as back:
        link, connection, _ = back.connect(b"PUT /data/x HTTP/1.1\r\nContent-Length: 1000000\r\n")
        with link:
            link.sendall(b"x")  # so that there is something of it, however long this stands still
            back.front.more(connection, 1000000)
            kinds = set()
            deadline = time.monotonic() + 60
            while "gone" not in kinds:
                assert time.monotonic() < deadline
                with contextlib.suppress(ConnectionError):
                    link.sendall(b"x")
                with contextlib.suppress(queue.Empty):
                    kinds.add(back.heard.get(timeout=0.1)[0])
            assert kinds == {"body", "gone"}
