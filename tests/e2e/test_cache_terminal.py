"""`stoker cache …` at a terminal: what is redrawn, what is asked, and how the terminal is left."""

from __future__ import annotations

import os
import pty
import select
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import fill, served
from tests.e2e.test_cache_commands import started

pytestmark = pytest.mark.real


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: what a person sees and types at, and the command's."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(ours: int, words: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + 60
    while words not in seen:
        left_s = deadline - time.monotonic()
        assert left_s > 0, seen
        if select.select([ours], [], [], left_s)[0]:
            seen += os.read(ours, 65536)
    return seen


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_top_at_a_terminal(tmp_path: Path, terminal: tuple[int, int], key: bytes, code: int) -> None:
    fill(tmp_path / "o", ["k"])
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        command = started(
            server, "top", "--interval", "100ms", stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        read_until(ours, b"FROM ORIGIN/S")
        read_until(ours, b" 0 B")
        os.write(ours, key)
        read_until(ours, b"\x1b[?25h")
        assert command.wait(timeout=60) == code
    assert termios.tcgetattr(theirs)[:4] == before[:4]


def test_a_whole_bucket_is_asked_about_at_a_terminal(tmp_path: Path, terminal: tuple[int, int]) -> None:
    fill(tmp_path / "o", ["k"])
    ours, theirs = terminal
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        for answer, code in ((b"n\n", 1), (b"y\n", 0)):
            command = started(server, "evict", "stoker://b", stdin=theirs, stdout=theirs, stderr=theirs)
            read_until(ours, b"[y/N]")
            os.write(ours, answer)
            assert command.wait(timeout=60) == code


def test_a_load_at_a_terminal_has_a_bar(tmp_path: Path, terminal: tuple[int, int]) -> None:
    fill(tmp_path / "o", [f"k{n:04}" for n in range(400)], 4000)
    ours, theirs = terminal
    with served(tmp_path / "d", {"b": f"{tmp_path / 'o'}?stoker_mbps=16"}) as server:
        command = started(server, "load", "stoker://b", stderr=theirs)
        seen = read_until(ours, b"of 400 objects")
        while command.poll() is None:  # what nobody reads fills the terminal, and holds the command up
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        out, _ = command.communicate()
    assert command.returncode == 0
    assert "400" in out.splitlines()[2]
    assert b"loading stoker://b" in seen
