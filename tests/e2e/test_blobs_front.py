"""What of blobs the native front answers itself, and what it leaves to the back."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stoker.base.clock import BootClock
from tests.e2e.native_front import NOW, Asked, answering, new_front

pytestmark = pytest.mark.real


def test_the_front_answers_hits_of_blobs_as_long_as_it_may(tmp_path: Path) -> None:
    front, index, files, bucket = new_front(tmp_path)
    Path(files.path(1)).write_bytes(b"data")
    for key in ("a b//?c%20#", "caf\u00e9"):
        index.learn(bucket, key, "v1", 4, False, NOW)
        index.hold(bucket, key, "v1", None, 1, 0, 0, NOW)
    index.learn(bucket, "empty", "v1", 0, False, NOW)
    index.learn(bucket, "heard-of", "v1", 4, False, 0)
    index.learn(bucket, "left", "v1", 4, False, NOW)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    rules = [(7, "secret-token", {"*": [""]}, "", ""), (8, "other-token", {"other": [""]}, "", "")]
    front.set_rules(rules, {}, blobs={"data": (bucket, 1e12, 0)})

    def answer(connection: int, asked: Asked) -> None:
        front.say(connection, b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nback")
        front.finish(connection)

    def ask(target: bytes, *, method: bytes = b"GET", token: bytes = b"secret-token") -> bytes:
        with socket.create_connection(("127.0.0.1", port), 20) as link:
            head = b"%b %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n"
            link.sendall(head % (method, target, token))
            parts = []
            while part := link.recv(65536):
                parts.append(part)
        return b"".join(parts).split(b"\r\n\r\n")[1]

    with answering(front, listener, answer):
        assert ask(b"/blob/data/a b//?c%20#") == b"back"  # nobody has said yet that it may
        front.set_blobs_until(BootClock().now() + 1000, 0)
        assert ask(b"/blob/data/a b//?c%20#") == b"data"
        assert ask(b"/blob/data/empty") == b""
        for target in (b"a b/?c%20#", b"a b//?c #", b"caf\xc3\xa9", b"heard-of", b"left", b"none", b""):
            assert ask(b"/blob/data/" + target) == b"back"
        for target in (b"/data/empty", b"/blob%2Fdata/empty", b"/blob/dat%61/empty", b"/blob/other/empty"):
            assert ask(target) == b"back"
        assert ask(b"/blob/data/empty", token=b"other-token") == b"back"
        assert ask(b"/blob/data/a b//?c%20#", method=b"HEAD") == b"back"
        front.set_blobs_until(BootClock().now() + 1000, NOW + 1)
        assert ask(b"/blob/data/empty") == b"back"  # it was looked at before
        front.set_blobs_until(BootClock().now() + 1000, NOW)
        assert ask(b"/blob/data/empty") == b""
        front.set_blobs_until(BootClock().now() - 0.001, 0)
        assert ask(b"/blob/data/empty") == b"back"
