"""The native front over real sockets: limits, timeouts, readers that are slow, silent or gone."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker._native import Files, Front, Index, crc32c
from tests.e2e.native_front import NOW, Asked, answering, new_front
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
TOKEN = b"Host: h\r\nAuthorization: Bearer secret-token\r\n"
BIG = bytes(range(256)) * (4096 * 8)


@dataclass
class Served:
    """A front with one packed object `small`, one large one `big`, and a back that says what it was asked."""

    front: Front
    index: Index
    files: Files
    port: int
    bucket: int

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 60)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def get(self, key: str, *headers: bytes) -> bytes:
        with self.connect() as link:
            link.sendall(request(key, *headers, b"Connection: close\r\n"))
            return until_end(link)


def request(key: str, *headers: bytes) -> bytes:
    return b"GET /data/%b HTTP/1.1\r\n%b%b\r\n" % (key.encode(), TOKEN, b"".join(headers))


def until_end(link: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := link.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def served(folder: Path, **limits: float) -> Iterator[Served]:
    front, index, files, bucket = new_front(folder, **limits)
    Path(files.path(1)).write_bytes(b"....small data....")
    index.learn(bucket, "small", "v1", 10, False, NOW)
    index.hold(bucket, "small", "v1", None, 1, 4, 0, NOW)
    Path(files.path(2)).write_bytes(BIG)
    index.learn(bucket, "big", "v1", len(BIG), False, NOW)
    for block in range(len(BIG) // (4 << 20)):
        index.hold(bucket, "big", "v1", block, 2, 0, 0, NOW)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    front.set_rules(
        [(7, "secret-token", {"*": [""]}, "", ""), (8, "other-token", {"other": [""]}, "", "")],
        {"data": (bucket, 100.0, 0)},
    )

    def answer(connection: int, asked: Asked) -> None:
        body = b"back %b %d" % (asked[1], len(asked[3]))
        front.say(connection, b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        front.finish(connection)

    with answering(front, listener, answer):
        yield Served(front, index, files, port, bucket)


@pytest.mark.parametrize("size_bytes", [1, 10, 65_536, 65_537, 900_000])
@pytest.mark.parametrize("harm", ["none", "flipped", "cut"])
def test_a_packed_object_that_was_not_looked_at_yet_is_compared_first(
    tmp_path: Path, size_bytes: int, harm: str
) -> None:
    """As after a start. What is not as it was written the back has to find, and to give up."""
    with served(tmp_path) as here:
        data = BIG[:size_bytes]
        stored = bytearray(b"...." + data)
        if harm == "flipped":
            stored[-1] ^= 1
        Path(here.files.path(3)).write_bytes(stored[:-1] if harm == "cut" else stored)
        here.index.learn(here.bucket, "packed", "v1", size_bytes, False, NOW)
        here.index.hold(here.bucket, "packed", "v1", None, 3, 4, crc32c(data), NOW)
        here.index.doubt(3)
        said = here.get("packed", b"Range: bytes=0-0\r\n").partition(b"\r\n\r\n")[2]
        found = here.index.find(here.bucket, "packed")
        assert found is not None
        if harm == "none":
            assert (said, found.is_verified) == (data[:1], True)
            assert here.get("packed").partition(b"\r\n\r\n")[2] == data
            assert here.front.figures().handed_over == 0
        else:
            assert (said, found.is_verified) == (b"back /data/packed 0", False)


def test_hits_of_what_is_fresh_held_and_verified_are_the_fronts(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        assert here.get("small").endswith(b"\r\n\r\nsmall data")
        assert here.get("big").partition(b"\r\n\r\n")[2] == BIG
        assert here.get("big", b"Range: bytes=5000000-5000009\r\n").endswith(BIG[5000000:5000010])
        assert here.front.figures().handed_over == 0
        assert here.front.take_hits() == {here.bucket: (3, 10 + len(BIG) + 10, 0, 0)}
        assert here.front.take_hits() == {}
        for key, *headers in (
            ("none",),
            ("small", b"If-None-Match: x\r\n"),
            ("small", b"Cache-Control: no-cache\r\n"),
            ("small", b"Range: bytes=99-\r\n"),
            ("small?versionId=1",),
        ):
            assert b"back /data/" in here.get(str(key), *headers)
        here.index.learn(here.bucket, "absent", "", 0, True, NOW)
        assert b"back /data/absent 0" in here.get("absent")
        here.front.set_now(NOW + 99)
        assert b"small data" in here.get("small")
        here.front.set_now(NOW + 100)
        assert b"back /data/small 0" in here.get("small"), "the ttl has passed"
        here.front.set_now(NOW - 5)
        assert b"back /data/small 0" in here.get("small"), (
            "it was confirmed in the future: the clock has jumped"
        )
        here.front.set_now(NOW)
        here.index.refresh(here.bucket, "sm")
        assert b"back /data/small 0" in here.get("small")


def test_another_version_is_never_served_with_the_bytes_of_the_one_before(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as link:
        link.sendall(request("small"))
        assert b'ETag: "v1"' in link.recv(1000)
        here.index.learn(here.bucket, "small", "v2", 10, False, NOW)
        link.sendall(request("small"))
        assert b"back /data/small" in link.recv(1000)
        here.index.hold(here.bucket, "small", "v2", None, 1, 0, 0, NOW)
        link.sendall(request("small"))
        said = link.recv(1000)
        assert b'ETag: "v2"' in said
        assert said.endswith(b"\r\n\r\n....small ")


def test_a_file_that_is_unlinked_is_sent_to_its_end(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as link:
        link.sendall(request("big", b"Connection: close\r\n"))
        begin = link.recv(1000)
        Path(here.files.path(2)).unlink()
        here.files.forget(2, len(BIG))
        assert here.files.leaving_bytes() == len(BIG)
        assert (begin + until_end(link)).partition(b"\r\n\r\n")[2] == BIG
        wait_for(lambda: not here.files.leaving_bytes(), 60)
        assert here.files.leaving_bytes() == 0
        assert b"back /data/big" in here.get("big"), "the back finds that it is gone"


def test_a_file_that_is_shorter_than_it_should_be_breaks_the_connection(tmp_path: Path) -> None:
    with served(tmp_path) as here:
        Path(here.files.path(2)).write_bytes(BIG[:1000])
        head, _, body = here.get("big").partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(BIG) in head
        assert body == BIG[:1000], "a reader sees that it is short"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /data/small HTTP/1.1\r\nX: ", b"408"),
        (b"POST /-/read HTTP/1.1\r\n" + TOKEN + b"Content-Length: 5\r\n\r\nab", b"408"),
        (b"GET /data/small HTTP/1.1\r\nX: " + b"x" * 40000, b"431"),
        (b"GET /data/small HTTP/1.1\r\nHost: h\r\n\r\n", b"401"),
        (b"GET /data/small HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer guessed\r\n\r\n", b"401"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
        (b"PUT /-/x HTTP/1.1\r\n" + TOKEN + b"Content-Length: 99999999\r\n\r\n", b"413"),
        (b"PUT /-/x HTTP/1.1\r\n" + TOKEN + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    ],
)
def test_who_cannot_be_served_is_told_and_let_go(tmp_path: Path, sent: bytes, status: bytes) -> None:
    with served(tmp_path, head_s=1.0, body_s=1.0) as here, here.connect() as link:
        with contextlib.suppress(ConnectionError):
            link.sendall(sent)
        said = until_end(link)
        assert said.startswith(b"HTTP/1.1 " + status), said
        assert b"Connection: close" in said
        assert b'{"code":"' in said
        wait_for(lambda: not here.front.figures().connections, 60)
        assert here.front.figures().connections == 0


def test_a_head_that_comes_byte_by_byte_has_no_more_time_than_any(tmp_path: Path) -> None:
    with served(tmp_path, head_s=1.0) as here, here.connect() as link:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began + 30:
                link.sendall(b"G")
                if select.select([link], [], [], 0.1)[0]:
                    break
        assert until_end(link).startswith(b"HTTP/1.1 408")


def test_idle_connections_and_readers_that_take_nothing_end(tmp_path: Path) -> None:
    with served(tmp_path, idle_s=5.0, send_s=5.0) as here, here.connect() as idle, here.connect() as stalled:
        idle.sendall(request("small"))
        assert b"small data" in idle.recv(1000)
        stalled.sendall(request("big") * 20)
        assert until_end(idle) == b""
        wait_for(lambda: not here.front.figures().connections, 60)
        assert here.front.figures().connections == 0
        assert here.front.figures().timed_out == 2


def test_one_connection_too_many_is_told_to_come_again(tmp_path: Path) -> None:
    with served(tmp_path, connections_max=3) as here:
        held = [here.connect() for _ in range(3)]
        for link in held:
            link.sendall(request("small"))
            assert b"small data" in link.recv(1000)
        with here.connect() as late:
            assert until_end(late).startswith(b"HTTP/1.1 503")
        held.pop().close()
        deadline = time.monotonic() + 60
        while b"small data" not in here.get("small"):
            assert time.monotonic() < deadline
        for link in held:
            link.close()


def test_bytes_go_out_no_faster_than_they_may(tmp_path: Path) -> None:
    rate = 50e6
    with served(tmp_path, egress_bytes_per_s=rate) as here:
        got: list[bytes] = []
        began = time.monotonic()
        threads = [threading.Thread(target=lambda: got.append(here.get("big"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(got) < 1:
            assert b"small data" in here.get("small"), "what is small comes through"
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began
        assert all(one.partition(b"\r\n\r\n")[2] == BIG for one in got)
        assert took_s >= 3 * len(BIG) / rate * 0.9


def test_many_idle_connections_cost_the_others_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as here, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(here.connect())
        assert b"small data" in here.get("small")
        here.front.drain()
        wait_for(lambda: not here.front.figures().connections, 60)
        assert here.front.figures().connections == 0


def test_a_file_is_in_use_while_it_is_sent(tmp_path: Path) -> None:
    with served(tmp_path) as here, here.connect() as link:
        assert not here.files.is_used(2)
        link.sendall(request("big"))
        begin = link.recv(1000)
        assert here.files.is_used(2)
        assert not here.files.is_used(1)
        length = len(BIG) + begin.index(b"\r\n\r\n") + 4 - len(begin)
        while length:
            length -= len(link.recv(min(length, 1 << 20)))
        wait_for(lambda: not here.files.is_used(2), 60)
        assert not here.files.is_used(2)


def test_all_readers_have_their_share_of_what_may_go_out(tmp_path: Path) -> None:
    with served(tmp_path, egress_bytes_per_s=20e6, send_s=5.0) as here:
        got = [0] * 6

        def read(who: int) -> None:
            with here.connect() as link:
                link.sendall(request("big") * 20)
                while time.monotonic() < until:
                    got[who] += len(link.recv(1 << 16))

        until = time.monotonic() + 7
        threads = [threading.Thread(target=read, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert here.front.figures().timed_out == 0
        assert min(got) > 0.5 * max(got), got
        assert sum(got) <= 20e6 * 9


def test_tenants_have_equal_shares_however_many_connections_they_have(tmp_path: Path) -> None:
    tokens = [(7, "secret-token", {"*": [""]}, "", "few"), (8, "other-token", {"*": [""]}, "", "many")]
    with served(tmp_path, egress_bytes_per_s=20e6) as here:
        here.front.set_rules(tokens, {"data": (here.bucket, 100.0, 0)}, {"few": 0.0, "many": 0.0})
        for _ in range(10):
            got, longest_s = read_by_two(here)
            if longest_s < 0.5:  # who takes nothing for a while leaves its share to the others
                break
        assert 0.7 < got["many"] / got["few"] < 1.4, got


def read_by_two(here: Served) -> tuple[dict[str, int], float]:
    """What each of two tenants read beside the other, and for how long, at most, one of them took nothing."""
    got, last_s, longest_s = {"few": 0, "many": 0}, dict.fromkeys(("few", "many"), time.monotonic()), 0.0
    lock = threading.Lock()

    def read(who: str) -> None:
        nonlocal longest_s
        with here.connect() as link:
            asked = request("big")
            link.sendall((asked if who == "few" else asked.replace(b"secret-token", b"other-token")) * 20)
            while got["few"] < 30e6:
                part = len(link.recv(1 << 16))
                with lock:
                    got[who] += part
                    now_s = time.monotonic()
                    longest_s, last_s[who] = max(longest_s, now_s - last_s[who]), now_s

    threads = [threading.Thread(target=read, args=(who,)) for who in ["few"] + 12 * ["many"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got, longest_s


def test_a_tenant_has_its_own_limit(tmp_path: Path) -> None:
    tokens = [(7, "secret-token", {"*": [""]}, "", "slow"), (8, "other-token", {"*": [""]}, "", "fast")]
    asked = request("big", b"Connection: close\r\n")
    with served(tmp_path) as here:

        def limit(bytes_per_s: float) -> None:
            rates = {"slow": bytes_per_s, "fast": 0.0}
            here.front.set_rules(tokens, {"data": (here.bucket, 100.0, 0)}, rates)

        limit(1e5)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                link = stack.enter_context(here.connect())
                link.sendall(asked)
                assert link.recv(1)
            with here.connect() as link:
                link.sendall(asked.replace(b"secret-token", b"other-token"))
                assert until_end(link).partition(b"\r\n\r\n")[2] == BIG
            _, sent_bytes, _ = here.front.tenant_figures()["slow"]
            assert sent_bytes < len(BIG) / 2, "who is fast does not wait for that"

        rate, got = 10e6, list[bytes]()
        limit(rate)
        began = time.monotonic()
        threads = [threading.Thread(target=lambda: got.append(here.get("big"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.partition(b"\r\n\r\n")[2] == BIG for one in got] == [True] * 3
        # What may go out at once, and then no faster than its rate, on all its connections together.
        assert time.monotonic() - began >= (3 * len(BIG) - rate * 0.1) / rate
        assert here.front.charge(12345, "unknown") is False


def test_what_another_asks_on_the_same_connection_lifts_no_limit(tmp_path: Path) -> None:
    tokens = [(7, "secret-token", {"*": [""]}, "", "slow"), (8, "other-token", {"*": [""]}, "", "fast")]
    rate = 10e6
    with served(tmp_path) as here, here.connect() as link:
        here.front.set_rules(tokens, {"data": (here.bucket, 100.0, 0)}, {"slow": rate, "fast": 0.0})
        small = request("small").replace(b"secret-token", b"other-token")
        began = time.monotonic()
        link.sendall(
            (request("big") + small) * 2 + small.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        assert until_end(link).count(b"small data") == 3
        assert time.monotonic() - began >= (2 * len(BIG) - rate * 0.1) / rate


def test_input_that_waits_behind_an_answer_is_looked_at(tmp_path: Path) -> None:
    """A body of many pieces queues up while the back is at work on the request before it."""
    size = 470_000
    with served(tmp_path, body_s=60.0) as here, here.connect() as link:
        for pause_s in (0.0, 0.2):
            link.sendall(
                request("none") + b"POST /-/b HTTP/1.1\r\n" + TOKEN + b"Content-Length: %d\r\n\r\n" % size
            )
            time.sleep(pause_s)
            link.sendall(bytes(size))
            said = b""
            while b"back /-/b %d" % size not in said:
                part = link.recv(1000)
                assert part, said
                said += part
            assert said.startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("more", [b"", b"nonsense\r\n\r\n", b"GET /data/small HTTP/1.1\r\n\r\n", b"\r\n"])
@pytest.mark.parametrize("shuts", [False, True])
def test_an_answer_is_whole_whatever_comes_behind_its_request(
    tmp_path: Path, more: bytes, shuts: bool
) -> None:
    with served(tmp_path, connection_bytes_per_s=40e6) as here, here.connect() as link:
        link.sendall(request("big", b"Connection: close\r\n" if not more.startswith(b"n") else b""))
        begin = link.recv(1000)
        link.sendall(more)
        if shuts:
            link.shutdown(socket.SHUT_WR)
        head, _, body = (begin + until_end_or(link, len(BIG) + 1000)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body[: len(BIG)] == BIG
        if more.startswith(b"n"):
            assert body[len(BIG) :].startswith(b"HTTP/1.1 400")


def until_end_or(link: socket.socket, size_bytes: int) -> bytes:
    """What comes until there is no more, or so much."""
    parts, length = [], 0
    while length < size_bytes and (part := link.recv(1 << 20)):
        parts.append(part)
        length += len(part)
    return b"".join(parts)


def test_an_empty_line_behind_a_request_is_no_request(tmp_path: Path) -> None:
    with served(tmp_path, head_s=1.0) as here, here.connect() as link:
        link.sendall(request("small") + b"\r\n")
        assert b"small data" in link.recv(1000)
        assert not select.select([link], [], [], 3.0)[0], "it waits for a request, as long as any"
        link.sendall(request("small"))
        assert b"small data" in link.recv(1000)
