"""A real server holds ten thousand connections, and more than it may have."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stoker.cache.server.listening import connections_max
from tests.chaos.http_fuzz import rss_bytes
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served

pytestmark = pytest.mark.real
CONNECTIONS = 10_000
BEYOND = 100
FILES_OF_SERVER = 2 * (CONNECTIONS + BEYOND + 64)
"""A server takes half of what it may open for connections, but for 64."""
BYTES_EACH_MAX = 2048
"""Of the server's memory, for a connection at rest; the kernel's own is not counted."""


class Limits(NamedTuple):
    """How many files the server may open, and how many connections it may have then."""

    files: int
    connections: int


@pytest.fixture
def limits() -> Iterator[Limits]:
    """This process may have as many connections as the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_OF_SERVER if hard == resource.RLIM_INFINITY else min(hard, FILES_OF_SERVER)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    yield Limits(files, connections_max())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 20)


def request(key: str, *headers: bytes) -> bytes:
    return b"GET /b/%b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (key.encode(), b"".join(headers))


def body_of(link: socket.socket, size_bytes: int) -> bytes:
    """The body of the next answer, which has that length; what came instead if it has not."""
    data = b""
    while len(data.partition(b"\r\n\r\n")[2]) < size_bytes:
        part = link.recv(65536)
        if not part:
            return data
        data += part
    return data.partition(b"\r\n\r\n")[2]


def connections_of(server: ServerProcess) -> int:
    """Sockets that the server has open."""
    count = 0
    for fd in (Path("/proc") / str(server.child.pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(fd.readlink()).startswith("socket:")
    return count


def wait_for_connections(server: ServerProcess, most: int) -> None:
    deadline = time.monotonic() + 60
    while (count := connections_of(server)) > most:
        assert time.monotonic() < deadline, f"{count} connections are left, {most} should be"
        time.sleep(0.05)


def open_many(server: ServerProcess, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    links = []
    for number in range(count):
        links.append(stack.enter_context(connect(server)))
        if number % 3 == 0:  # some have been used, some say nothing, some have begun to say something
            links[-1].sendall(request("small"))
        elif number % 3 == 1 and number > count - 300:
            links[-1].sendall(b"GET /b/sm")
    return links


def test_ten_thousand_connections_and_those_beyond_what_may_be(tmp_path: Path, limits: Limits) -> None:
    # Where `ulimit -Hn` is lower, a server cannot hold so many: then as many as it can, but for some.
    count = min(CONNECTIONS, limits.connections - BEYOND)
    assert count == CONNECTIONS or limits.files < FILES_OF_SERVER
    objects = fill(tmp_path / "o", ["small"], 1000) | fill(tmp_path / "o", ["big"], 3_000_000)
    with (
        served(tmp_path / "d", {"b": str(tmp_path / "o")}, files_max=limits.files) as server,
        client_of(server) as client,
        contextlib.ExitStack() as stack,
    ):
        assert client.read_many("b", ["small", "big"]) == list(objects.values())
        idle, before = connections_of(server), rss_bytes(server.child.pid)
        links = open_many(server, count, stack)
        for link in links[::3]:
            assert body_of(link, 1000) == objects["small"]
        assert connections_of(server) == idle + count
        each = (rss_bytes(server.child.pid) - before) / count
        print(f"{count} connections: {each:.0f} bytes of memory each")
        assert each < BYTES_EACH_MAX, f"{each:.0f} bytes of memory for each connection"

        # Others are served meanwhile: by front and back, new and old connections, hits and misses.
        later = fill(tmp_path / "o", ["later"], 5000)
        assert client.read("b", "big") == objects["big"]
        assert client.read("b", "later") == later["later"]
        with client_of(server) as other:
            assert other.read("b", "big", 5, 99) == objects["big"][5:99]
        for link in links[:30:3]:
            link.sendall(request("small"))
            assert body_of(link, 1000) == objects["small"]

        refused = fill_up(server, stack)
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nRetry-After: " in refused
        assert client.read("b", "later") == later["later"], "who is connected is served"
        slow = links[count - 1 - (count + 1) % 3]
        slow.sendall(b"all HTTP/1.1\r\nHost: h\r\n\r\n")
        assert body_of(slow, 1000) == objects["small"], "also who was slow to ask"
        stack.close()
        wait_for_connections(server, idle)
        with client_of(server) as other:
            assert other.read("b", "small") == objects["small"]
            assert other.status().state == "ok"
        assert server.stop() == (0, "")


def fill_up(server: ServerProcess, stack: contextlib.ExitStack) -> bytes:
    """Connect until one is refused, and then some more; what the first of these was told."""
    said = []
    for _ in range(400):
        link = stack.enter_context(connect(server))
        link.sendall(request("small"))
        answer = link.recv(65536)
        if not answer.startswith(b"HTTP/1.1 200"):
            said.append(answer)
        if len(said) == 50:
            break
    assert len(said) == 50
    assert len(set(said)) == 1
    return said[0]


def test_slow_requests_keep_nobody_waiting(tmp_path: Path) -> None:
    """Heads and bodies that come byte by byte, from more connections than the server has threads of any kind."""
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(20)], 3000)
    with (
        served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server,
        client_of(server) as client,
        contextlib.ExitStack() as stack,
    ):
        head = request("k0", b"X: " + b"x" * 3000 + b"\r\n")
        body = b"POST /-/read HTTP/1.1\r\nHost: h\r\nContent-Length: 3000\r\n\r\n" + bytes(3000)
        links = [stack.enter_context(connect(server)) for _ in range(200)]
        done = threading.Event()

        def trickle() -> None:
            for at in range(3000):
                for number, link in enumerate(links):
                    link.sendall((head if number % 2 else body)[at : at + 1])
                if done.wait(0.001):
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            for _ in range(3):
                assert client.read_many("b", list(objects)) == list(objects.values())
                assert [client.read("b", key) for key in objects] == list(objects.values())
        finally:
            done.set()
            thread.join()
        assert select.select(links, [], [], 0)[0] == [], "no answer to what is not whole"
        for link in links[1::2]:
            link.sendall(b"\0\r\n\r\n")  # whole now, and wrong wherever the trickle stopped
            assert link.recv(65536).startswith(b"HTTP/1.1 400 ")
