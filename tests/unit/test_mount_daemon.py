"""The daemon of a mount: what goes wrong in it costs one request, and nobody waits for ever."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from stoker.cache.mount import daemon, device
from stoker.cache.mount.core import READAHEAD_BYTES
from stoker.cache.mount.questions import Effect, Find, Question, Read
from stoker.cache.mount.requests import Opcode
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.mount.daemon import NUMBER, WAIT_S, DaemonAtWork, reading
from tests.mount.kernel import Asked
from tests.unit.no_threads import no_thread_can_start

SETTINGS = MountSettings(wants_passthrough=False)
FILE = Found(False, 100, "v1")


def found(question: Question) -> object:
    """Files that are there, and of another version when they are read."""
    assert isinstance(question, Find | Read)
    return FILE if isinstance(question, Find) else Failed(errno.ESTALE)


def test_where_no_thread_can_be_started_who_asks_is_told(tmp_path: Path) -> None:
    mount = DaemonAtWork(tmp_path, SETTINGS, found)
    with no_thread_can_start():
        assert mount.look_up("a") == (errno.EIO, 0)
        assert mount.look_up("b") == (errno.EIO, 0)
    code, node = mount.look_up("c")
    assert (code, bool(node)) == (0, True)


def test_a_notice_that_nobody_can_give_keeps_no_answer_back(tmp_path: Path) -> None:
    mount = DaemonAtWork(tmp_path, SETTINGS, found)
    _, node = mount.look_up("a")
    with no_thread_can_start():
        code, _ = mount.said(mount.asks(Asked(Opcode.READ, node, reading(0, 10))))
        assert code == errno.ESTALE
    assert mount.look_up("b")[0] == 0


def test_a_defect_at_a_tick_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, ticks = threading.Event(), 0

    def hangs(_: Question) -> object:
        never.wait(WAIT_S)
        return None

    mount = DaemonAtWork(tmp_path, MountSettings(timeout_s=0.2), hangs)
    tick = mount.core.tick

    def fails_once(now: float) -> list[Effect]:
        nonlocal ticks
        ticks += 1
        assert ticks > 1
        return tick(now)

    monkeypatch.setattr(mount.core, "tick", fails_once)
    assert mount.look_up("a") == (errno.ETIMEDOUT, 0)
    assert ticks > 1
    never.set()


def test_what_nobody_waits_for_any_more_takes_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_WORKERS_MAX", 1)
    go_on = threading.Event()
    asked: list[Question] = []

    def hangs_at_first(question: Question) -> object:
        asked.append(question)
        if len(asked) == 1:
            assert go_on.wait(WAIT_S)
        return FILE

    mount = DaemonAtWork(tmp_path, MountSettings(timeout_s=4.0), hangs_at_first)
    assert mount.look_up("a") == (errno.ETIMEDOUT, 0)
    assert mount.look_up("b") == (errno.ETIMEDOUT, 0)
    go_on.set()
    assert mount.look_up("c")[0] == 0
    assert asked == [Find("a"), Find("c")]


def test_the_kernel_reads_ahead_of_this_mount_whatever_lies_on_top_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is known by its number."""
    monkeypatch.setattr(device, "_BACKING_DEVICES", str(tmp_path / "bdi"))
    said = tmp_path / "bdi" / NUMBER / "read_ahead_kb"
    said.parent.mkdir(parents=True)
    mount = DaemonAtWork(tmp_path, SETTINGS, found)
    assert mount.look_up("a")[0] == 0  # what was to be done before is done
    assert said.read_text() == str(READAHEAD_BYTES // 1024)
