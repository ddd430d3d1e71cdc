"""The front asks owners itself for what is not here; whatever goes wrong with that, the back answers."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stoker._native import Fleet, Front, Index
from tests.e2e.native_front import NOW, Asked, answering, new_front
from tests.e2e.native_peer import DATA, Peer, Say, answer_to, owner, whole

pytestmark = pytest.mark.real
TOKEN = b"Host: x\r\nAuthorization: Bearer secret-token\r\n"
RESET = struct.pack("ii", 1, 0)
MARK = "5eed5eed5eed5eed"


class Here(NamedTuple):
    """A front that knows `far`, which lies at the peer, `there`, which is its own and not held, and `held`."""

    front: Front
    index: Index
    bucket: int
    port: int
    backs: list[bytes]

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        link = socket.socket()
        if receive_bytes:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        link.settimeout(60)
        link.connect(("127.0.0.1", self.port))
        return link

    def get(self, key: str, *headers: bytes, method: bytes = b"GET") -> tuple[bytes, bytes]:
        """Head and body."""
        with self.connect() as link:
            link.sendall(asking(key, *headers, b"Connection: close\r\n", method=method))
            parts = []
            while part := link.recv(1 << 20):
                parts.append(part)
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        return head, body

    def is_handed_on(self, key: str, *headers: bytes) -> bool:
        before = len(self.backs)
        head, body = self.get(key, *headers)
        if len(self.backs) > before:
            assert body == b"back"
            return False
        assert (head.startswith(b"HTTP/1.1 200 OK\r\n"), body) == (True, DATA)
        return True


def asking(key: str, *headers: bytes, method: bytes = b"GET", token: bytes = TOKEN) -> bytes:
    return b"%b /data/%b HTTP/1.1\r\n%b%b\r\n" % (method, key.encode(), token, b"".join(headers))


@contextlib.contextmanager
def beside(folder: Path, port: int, **limits: float) -> Iterator[Here]:
    """A front beside a server that owns all."""
    front, index, files, bucket = new_front(folder, **limits)
    Path(files.path(1)).write_bytes(DATA)
    for key in ("far", "far%20away".replace("%20", " "), "held", "other/far"):
        index.learn(bucket, key, "v1", len(DATA), False, NOW)
    index.hold(bucket, "held", "v1", None, 1, 0, 0, NOW)
    index.learn(bucket, "long", "v1", 9 << 20, False, NOW)
    listener = socket.create_server(("127.0.0.1", 0))
    rules = {"data": (bucket, 100.0, 0)}
    tokens = [(7, "secret-token", {"*": [""]}, "", "me"), (8, "few", {"data": ["other/"]}, "", "")]
    front.set_rules(tokens, rules, {"me": 0.0})
    tell(front, port)
    here = Here(front, index, bucket, listener.getsockname()[1], [])

    def answer(connection: int, asked: Asked) -> None:
        here.backs.append(asked[1])
        front.say(connection, b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nback")
        front.finish(connection)

    with answering(front, listener, answer):
        yield here


def tell(
    front: Front, port: int, *, me: int = 1, hands_on: bool = True, tells_of_reads: bool = False
) -> None:
    peers = [("127.0.0.1", port), ("", 0)]
    buckets = {"data": (MARK, hands_on)}
    front.set_fleet(Fleet(peers, b"\0\0", me, "Bearer of-the-fleet", buckets, tells_of_reads))


def test_what_lies_at_its_owner_comes_from_there_without_the_back(tmp_path: Path) -> None:
    with owner() as peer, beside(tmp_path, peer.port) as here:
        head, body = here.get("far")
        assert body == DATA
        assert head.split(b"\r\n") == [
            b"HTTP/1.1 200 OK",
            b"Content-Length: %d" % len(DATA),
            b'ETag: "v1"',
            b"Accept-Ranges: bytes",
            b"Content-Type: application/octet-stream",
        ]
        head, body = here.get("far", b"Range: bytes=100-299\r\n")
        assert body == DATA[100:300]
        assert head.startswith(b"HTTP/1.1 206 ")
        assert b"Content-Range: bytes 100-299/%d" % len(DATA) in head
        assert here.get("far%20away")[1] == DATA
        assert here.backs == []
        assert peer.heads[1].split(b"\r\n") == [
            b"GET /data/far HTTP/1.1",
            b"Host: peer",
            b"Stoker-Hops: 1",
            b"Authorization: Bearer of-the-fleet",
            b"Stoker-Origin: " + MARK.encode(),
            b"Range: bytes=100-299",
            b'If-Match: "v1"',
            b"",
            b"",
        ]
        assert peer.heads[2].startswith(b"GET /data/far%20away HTTP/1.1\r\n")
        assert peer.accepted == 1, "the connection is kept"
        count = 2 * len(DATA) + 200
        assert here.front.take_hits() == {here.bucket: (0, 0, 3, count)}
        tally = here.front.tally()
        assert sum(tally.handed_on_within) == 3
        assert sum(tally.within) == 0, "they are no hits"
        assert (False, "GET", 200, 2) in tally.hits
        assert (False, "GET", 206, 1) in tally.hits
        hits, sent_bytes, _ = here.front.tenant_figures()["me"]
        assert hits == 3
        assert sent_bytes > count


def test_many_on_one_connection_are_answered_in_their_order(tmp_path: Path) -> None:
    with owner() as peer, beside(tmp_path, peer.port) as here, here.connect() as link:
        ranges = [(start, start + 50 + start % 7) for start in range(0, 2000, 10)]
        lines = [b"Range: bytes=%d-%d\r\n" % (start, stop - 1) for start, stop in ranges]
        keys = ["held" if number % 3 == 0 else "far" for number in range(len(ranges))]
        link.sendall(b"".join(asking(key, line) for key, line in zip(keys, lines, strict=True)))
        reader = link.makefile("rb")
        for start, stop in ranges:
            while reader.readline() != b"\r\n":
                pass
            assert reader.read(stop - start) == DATA[start:stop]
        assert here.backs == []


@pytest.mark.parametrize(
    "header",
    [
        b"Stoker-Hops: 1\r\n",
        b"X-Request-Id: a\r\n",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
        b'If-None-Match: "v1"\r\n',
        b'If-Match: "v2"\r\n',
        b'If-Match: W/"v1"\r\n',
        b'If-Match: "v1"\r\nIf-Match: "v2"\r\n',
        b"Cache-Control: no-cache\r\n",
        b"Range: bytes=99999-\r\n",
        b"Stoker-Origin: of-another\r\n",
    ],
)
def test_what_the_back_knows_more_of_is_not_handed_on_here(tmp_path: Path, header: bytes) -> None:
    with owner() as peer, beside(tmp_path, peer.port) as here:
        assert not here.is_handed_on("far", header)
        assert peer.heads == []
        assert here.is_handed_on("far"), "but for that"


def test_only_what_is_small_and_told_of_is_handed_on(tmp_path: Path) -> None:
    with owner() as peer, beside(tmp_path, peer.port, handed_bytes_max=len(DATA)) as here:
        assert not here.is_handed_on("long")
        assert not here.is_handed_on("long", b"Range: bytes=0-9\r\n"), "its blocks have owners of their own"
        assert not here.is_handed_on("unknown")
        tell(here.front, peer.port, hands_on=False)
        assert not here.is_handed_on("far")
        tell(here.front, peer.port, me=0)
        assert not here.is_handed_on("far"), "it is this server's own"
        here.front.set_fleet(Fleet([], b"", -1, "", {"data": (MARK, True)}))
        assert not here.is_handed_on("far"), "nobody else is there"
        here.front.set_fleet(Fleet([("", 0)], b"\0\0", -1, "", {"data": (MARK, True)}))
        assert not here.is_handed_on("far"), "it cannot be asked from here"
        tell(here.front, peer.port)
        here.index.learn(here.bucket, "far", "v1", len(DATA) + 1, False, NOW)
        assert not here.is_handed_on("far"), "it is larger than what is handed on"
        assert peer.heads == []


def test_who_may_not_read_it_gets_nothing_of_it(tmp_path: Path) -> None:
    with owner() as peer, beside(tmp_path, peer.port) as here:
        few = b"Host: x\r\nAuthorization: Bearer few\r\n"
        for key, token, said in (
            ("far", few, b"back"),
            ("other/far", few, DATA),
            ("far", b"Host: x\r\nAuthorization: Bearer wrong\r\n", b"a bearer token is needed"),
            ("far", b"Host: x\r\n", b"a bearer token is needed"),
        ):
            with here.connect() as link:
                link.sendall(asking(key, b"Connection: close\r\n", token=token))
                came = b"".join(iter(lambda link=link: link.recv(1 << 16), b""))
            assert said in came
        assert [head.split()[1] for head in peer.heads] == [b"/data/other/far"]


def said(answer: bytes, *, keeps: bool = True) -> Say:
    def say(link: socket.socket, head: bytes) -> bool:
        link.sendall(answer)
        return keeps

    return say


def spoilt(old: bytes, new: bytes) -> Say:
    """A good answer but for that."""

    def say(link: socket.socket, head: bytes) -> bool:
        answer = answer_to(head)
        assert old in answer
        link.sendall(answer.replace(old, new, 1))
        return True

    return say


def cut(size_bytes: int) -> Say:
    """It dies when so much of its answer is out."""

    def say(link: socket.socket, head: bytes) -> bool:
        link.sendall(answer_to(head)[:size_bytes])
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return False

    return say


@pytest.mark.parametrize(
    "say",
    [
        said(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 2\r\n\r\n{}"),
        said(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", keeps=False
        ),
        said(b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "v1"\r\n\r\n' % len(DATA) + DATA),
        said(b"what is this\r\n\r\n"),
        said(b"x" * 20_000),
        spoilt(b'ETag: "v1"', b'ETag: "v2"'),
        spoilt(b'ETag: "v1"', b'X-Tag: "v1"'),
        spoilt(b"Content-Length: %d" % len(DATA), b"Content-Length: %d" % (len(DATA) - 1)),
        spoilt(b"Content-Range: bytes 0-", b"Content-Range: bytes 1-"),
        spoilt(b"Accept-Ranges: bytes", b"Transfer-Encoding: chunked"),
        spoilt(DATA, DATA + b"more"),
        cut(0),
        cut(20),
        cut(5000),
        cut(len(DATA)),
    ],
)
def test_whatever_is_wrong_with_an_answer_the_back_gives_its_own(tmp_path: Path, say: Say) -> None:
    with owner(say) as peer, beside(tmp_path, peer.port) as here:
        for _ in range(3):
            assert not here.is_handed_on("far")
        assert peer.heads
        assert here.front.take_hits() == {}
        # What comes next on the same connection is answered as ever.
        with here.connect() as link:
            link.sendall(asking("far") + asking("held", b"Connection: close\r\n"))
            came = b"".join(iter(lambda: link.recv(1 << 16), b""))
        assert b"\r\n\r\nbackHTTP/1.1 200 OK\r\n" in came
        assert came.endswith(DATA)


def test_one_that_is_silent_is_given_up_and_left_alone_for_a_while(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        if not goes_on.is_set():
            link.sendall(answer_to(head)[:5000])
            goes_on.wait(60)
        else:
            whole(link, head)
        return True

    with owner(say) as peer, beside(tmp_path, peer.port, peer_silence_s=0.1) as here:
        assert not here.is_handed_on("far")
        assert len(peer.heads) == 1
        for _ in range(10):  # it is for a second, which may be over here
            before = len(peer.heads)
            assert not here.is_handed_on("far")
            if len(peer.heads) == before:
                break
        assert len(peer.heads) == before, "the back asks now"
        goes_on.set()
        deadline = time.monotonic() + 60
        while not here.is_handed_on("far"):
            assert time.monotonic() < deadline


@pytest.mark.parametrize("body", [b"", b"x" * 60_000])
def test_after_a_refusal_the_connection_is_kept(tmp_path: Path, body: bytes) -> None:
    refusal = b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    is_there = threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        if not is_there.is_set():
            link.sendall(refusal)
            return True
        return whole(link, head)

    with owner(say) as peer, beside(tmp_path, peer.port) as here:
        assert not here.is_handed_on("far")
        assert not here.is_handed_on("far")
        is_there.set()
        assert here.is_handed_on("far")
        assert (len(peer.heads), peer.accepted) == (3, 1)


@pytest.mark.parametrize("status", [b"404 Not Found", b"409 Conflict"])
def test_an_owner_without_the_bucket_is_not_asked_for_it_again_at_once(tmp_path: Path, status: bytes) -> None:
    with (
        owner(said(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n{}" % status)) as peer,
        beside(tmp_path, peer.port) as here,
        here.connect() as link,
    ):
        reader = link.makefile("rb")
        for _ in range(10):  # not for a second, which may be over here
            before = len(peer.heads)
            link.sendall(asking("far") + asking("far") + asking("other/far"))
            assert [body_of(reader) for _ in range(3)] == [b"back"] * 3
            if len(peer.heads) <= before + 1:
                break
        assert 1 <= len(peer.heads) <= before + 1
        peer.say = whole
        deadline = time.monotonic() + 60
        while not here.is_handed_on("far"):
            assert time.monotonic() < deadline
        assert peer.accepted == 1


def test_one_that_goes_on_and_on_is_given_up(tmp_path: Path) -> None:
    """It is never silent for long."""
    is_over = threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        for byte in answer_to(head):
            link.sendall(bytes([byte]))
            if is_over.wait(0.02):
                break
        return False

    with owner(say) as peer, beside(tmp_path, peer.port, peer_silence_s=0.3) as here:
        assert not here.is_handed_on("far")
        is_over.set()


def test_one_that_answers_others_is_not_doubted_for_a_long_question(tmp_path: Path) -> None:
    is_over = threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        if b"bytes=0-%d" % (len(DATA) - 1) in head:
            is_over.wait(60)
            return False
        return whole(link, head)

    with owner(say) as peer, beside(tmp_path, peer.port, peer_silence_s=5) as here, here.connect() as link:
        link.sendall(asking("far"))
        while not here.backs:
            assert here.get("far", b"Range: bytes=0-9\r\n")[1] == DATA[:10]
        for _ in range(20):
            assert here.get("far", b"Range: bytes=0-9\r\n")[1] == DATA[:10]
        assert body_of(link.makefile("rb")) == b"back"
        assert len(here.backs) == 1
        is_over.set()


def test_of_one_that_is_doubted_no_connection_is_used_again(tmp_path: Path) -> None:
    hangs, is_over, both = threading.Event(), threading.Event(), threading.Barrier(2)

    def say(link: socket.socket, head: bytes) -> bool:
        if hangs.is_set():
            is_over.wait(60)
            return False
        if b"bytes=0-" not in head:
            both.wait(60)
        return whole(link, head)

    with (
        owner(say) as peer,
        beside(tmp_path, peer.port, peer_silence_s=5) as here,
        here.connect() as one,
        here.connect() as other,
    ):
        for link, start in ((one, 1), (other, 2)):
            link.sendall(asking("far", b"Range: bytes=%d-\r\n" % start))
        assert body_of(one.makefile("rb")) == DATA[1:]
        assert body_of(other.makefile("rb")) == DATA[2:]
        assert peer.accepted == 2
        hangs.set()
        assert not here.is_handed_on("far")
        hangs.clear()
        is_over.set()
        deadline = time.monotonic() + 60
        while not here.is_handed_on("far"):
            assert time.monotonic() < deadline
        assert peer.accepted == 3


def test_what_is_asked_already_the_back_asks_for_others(tmp_path: Path) -> None:
    """It joins all who want the same."""
    asked, goes_on = threading.Event(), threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        asked.set()
        goes_on.wait(60)
        return whole(link, head)

    with owner(say) as peer, beside(tmp_path, peer.port, peer_silence_s=30) as here, here.connect() as link:
        link.sendall(asking("far"))
        assert asked.wait(60)
        assert not here.is_handed_on("far")
        assert len(peer.heads) == 1
        goes_on.set()
        assert here.get("far", b"Range: bytes=0-9\r\n")[1] == DATA[:10], "it is another part"
        assert body_of(link.makefile("rb")) == DATA
        assert here.is_handed_on("far"), "that is over"


def test_nobody_listens_where_the_owner_was(tmp_path: Path) -> None:
    with owner() as peer:
        port = peer.port
    with beside(tmp_path, port) as here:
        for _ in range(3):
            assert not here.is_handed_on("far")


def test_a_kept_connection_that_the_owner_has_closed_is_not_used(tmp_path: Path) -> None:
    closed = threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        whole(link, head)
        if not closed.is_set():
            closed.set()
            return False
        return True

    with owner(say) as peer, beside(tmp_path, peer.port) as here:
        assert here.is_handed_on("far")
        assert closed.wait(60)
        deadline = time.monotonic() + 60
        while not here.is_handed_on("far"):
            assert time.monotonic() < deadline
        assert peer.accepted == 2


def test_what_slow_readers_keep_waiting_is_bounded(tmp_path: Path) -> None:
    """Once so much is in memory, more of it is for the back, which has bounds of its own."""
    size = len(DATA)
    with (
        owner() as peer,
        beside(tmp_path, peer.port, handing_bytes_max=3 * size) as here,
        here.connect(4096) as slow,
    ):
        # More than both of its buffers hold, so that some of it stays in the front.
        count = 4000
        asked = asking("far") * count
        sender = threading.Thread(target=lambda: slow.sendall(asked))
        sender.start()
        deadline = time.monotonic() + 60
        while not here.backs:
            assert time.monotonic() < deadline
            assert select.select([], [], [], 0.01) == ([], [], [])
        assert not here.is_handed_on("far")
        reader = slow.makefile("rb")
        answers = [body_of(reader) for _ in range(count)]
        sender.join()
        assert set(answers) == {DATA, b"back"}
        assert answers.count(b"back") == len(here.backs) - 1
        assert here.is_handed_on("far"), "it is free again"


@contextlib.contextmanager
def slow_reader(here: Here, peer: Peer, count: int = 2000) -> Iterator[None]:
    """It has asked for more than both of its buffers hold, and takes nothing; all that it asked has been looked at."""
    with here.connect(4096) as slow:
        asked = asking("far") * count
        sender = threading.Thread(target=lambda: slow.sendall(asked))
        sender.start()
        deadline = time.monotonic() + 60
        while len(here.backs) + len(peer.heads) < count:
            assert time.monotonic() < deadline
            assert select.select([], [], [], 0.01) == ([], [], [])
        yield
        reader = slow.makefile("rb")
        assert {body_of(reader) for _ in range(count)} == {DATA, b"back"}
        sender.join()


def test_one_slow_reader_leaves_memory_for_others(tmp_path: Path) -> None:
    size = len(DATA)
    with (
        owner() as peer,
        beside(tmp_path, peer.port, handing_bytes_max=100 * size, handed_bytes_max=2 * size) as here,
        slow_reader(here, peer),
    ):
        assert here.is_handed_on("far")


def test_slow_readers_of_one_tenant_leave_memory_for_those_of_others(tmp_path: Path) -> None:
    with (
        owner() as peer,
        beside(tmp_path, peer.port, handing_bytes_max=4 * len(DATA)) as here,
        slow_reader(here, peer),
        here.connect() as link,
    ):
        assert not here.is_handed_on("far"), "there is no more of it for the same tenant"
        before = len(here.backs)
        link.sendall(asking("other/far", token=b"Host: x\r\nAuthorization: Bearer few\r\n"))
        assert body_of(link.makefile("rb")) == DATA
        assert len(here.backs) == before


def test_one_whose_rate_is_limited_has_one_answer_waiting_at_most(tmp_path: Path) -> None:
    with (
        owner() as peer,
        beside(tmp_path, peer.port, connection_bytes_per_s=100_000) as here,
        here.connect() as link,
    ):
        link.sendall(asking("far") * 2)
        reader = link.makefile("rb")
        assert [body_of(reader), body_of(reader)] == [DATA, b"back"]
        link.sendall(asking("far"))
        assert body_of(reader) == DATA


def body_of(reader: object) -> bytes:
    size = 0
    while (line := reader.readline()) != b"\r\n":  # type: ignore[attr-defined]
        if line.startswith(b"Content-Length: "):
            size = int(line.split()[1])
    body: bytes = reader.read(size)  # type: ignore[attr-defined]
    return body


def test_readers_that_go_away_harm_nobody(tmp_path: Path) -> None:
    asked, goes_on = threading.Semaphore(0), threading.Event()

    def say(link: socket.socket, head: bytes) -> bool:
        asked.release()
        goes_on.wait(60)
        return whole(link, head)

    with owner(say) as peer, beside(tmp_path, peer.port) as here:
        for number in range(5):
            with here.connect() as link:
                link.sendall(asking("far", b"Range: bytes=%d-\r\n" % (number + 1)))
                assert asked.acquire(timeout=60)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        deadline = time.monotonic() + 60
        while here.front.figures().connections:
            assert time.monotonic() < deadline
        goes_on.set()
        assert here.is_handed_on("far")


def test_an_owner_answers_other_servers_without_its_back(tmp_path: Path) -> None:
    """If it is that version, of that origin, else its back finds out."""
    with owner() as peer, beside(tmp_path, peer.port) as here:
        for headers, is_hit in (
            (
                (b'If-Match: "v1"\r\n', b"Stoker-Hops: 1\r\n", b"Stoker-Origin: " + MARK.encode() + b"\r\n"),
                True,
            ),
            ((b'If-Match: "v1"\r\n',), True),
            ((b'If-Match: "v1"\r\n', b"Stoker-Hops: 1\r\n", b"X-Request-Id: a\r\n"), True),
            ((b'If-Match: "v2"\r\n', b"Stoker-Hops: 1\r\n"), False),
            ((b'If-Match: "v1"\r\n', b"Stoker-Hops: 1\r\n", b"Stoker-Origin: of-another\r\n"), False),
            ((b'If-Match: "v1"\r\n', b'If-None-Match: "v1"\r\n'), False),
        ):
            assert (here.get("held", *headers)[1] == DATA) == is_hit, headers
        of_a_back = b"Stoker-Hops: 1\r\n", b"X-Request-Id: a\r\n"
        tell(here.front, peer.port, hands_on=False)
        assert here.get("held", *of_a_back)[1] == DATA, "only the back hands it on, but the front has it"
        tell(here.front, peer.port, tells_of_reads=True)
        assert here.get("held", *of_a_back)[1] == b"back", "it is logged here"
        here.front.set_fleet(Fleet([], b"", -1, "", {}))
        assert here.get("held", *of_a_back)[1] == DATA, "nothing is told of its bucket"
        assert here.get("held", b"Stoker-Origin: " + MARK.encode() + b"\r\n")[1] == b"back"
        assert peer.heads == []
