"""Descriptors that the native front passes, where little goes out at once or nobody takes them."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker._native import Front
from stoker.wire.cache_batch import DESCRIPTOR, FRAME, FRAME_DESCRIPTORS, FRAME_LAST, INSTANCE_BYTES
from tests.e2e.native_front import NOW, Asked, answering, new_front
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
REQUEST = b"POST /-/read HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
CONTENT = {"a": b"content of a", "b": b"content of b"}
LIST_BYTES = INSTANCE_BYTES + 2 * DESCRIPTOR.size


@contextlib.contextmanager
def near(folder: Path, **limits: float) -> Iterator[tuple[Front, socket.socket]]:
    """A front, a connection to it, and a back that passes two descriptors with each answer, where that can be."""
    front, index, files, bucket = new_front(folder, **limits)
    for number, (key, content) in enumerate((CONTENT | {"short": b"abc"}).items(), 1):
        Path(files.path(number)).write_bytes(content)
        index.learn(bucket, key, "v1", len(content), False, NOW)
        index.hold(bucket, key, "v1", None, number, 0, 0, NOW)
    front.set_rules([], {}, is_open=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()

    def answer(connection: int, asked: Asked) -> None:
        assert asked[5], "it came by a Unix socket"
        wanted = 5, 10, b""
        assert front.answer_batch(connection, [*CONTENT, "short"], (bucket, 100.0, 0), wanted)

    with answering(front, listener, answer), socket.socket(socket.AF_UNIX) as link:
        link.settimeout(20)
        link.connect(str(folder / "socket"))
        yield front, link


def test_they_go_once_however_small_the_parts_are_that_go_out(tmp_path: Path) -> None:
    """A rate cuts what is said into parts; only the first byte of an answer takes descriptors along."""
    answers = 40
    with near(tmp_path, connection_bytes_per_s=20_000) as (front, link):
        link.sendall(REQUEST * answers)
        text, passed, parts = b"", [], 0
        while text.count(FRAME.pack(FRAME_LAST, 3) + b"abc") < answers:
            data, control, _, _ = link.recvmsg(65536, socket.CMSG_SPACE(1024))
            assert data
            parts += 1
            numbers = array.array("i", b"".join(part for _, _, part in control))
            passed += [(len(text), number) for number in numbers]
            text += data
        frame = FRAME.pack(FRAME_DESCRIPTORS, LIST_BYTES) + front.instance
        assert text.count(frame) == answers < parts
        assert len(passed) == 2 * answers
        end = 0
        for position, (before, number) in enumerate(passed):
            if position % 2 == 0:
                end = text.index(frame, end) + FRAME.size + LIST_BYTES
            assert before < end, "it comes before the end of the frame that announces it"
            with open(number, "rb") as file:
                assert file.read() == list(CONTENT.values())[position % 2]


def test_those_that_nobody_takes_are_no_more_than_may_be(tmp_path: Path) -> None:
    with near(tmp_path, passing_max=5, connection_bytes_per_s=4) as (front, link):
        link.sendall(REQUEST)
        link.recv(1, socket.MSG_PEEK)
        open_files = len(os.listdir("/proc/self/fd"))  # those of the first may have gone
        link.sendall(REQUEST * 5)
        wait_for(lambda: front.figures().handed_over == 6)
        wait_for(lambda: len(os.listdir("/proc/self/fd")) >= open_files + 3)
        assert len(os.listdir("/proc/self/fd")) <= open_files + 5
        link.close()
        wait_for(lambda: len(os.listdir("/proc/self/fd")) < open_files)
