"""What a mount's daemon makes of a cache that fails: tried again for so long, and then a reason that programs know."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from stoker.cache.mount import finding
from stoker.cache.mount.finding import Finding
from stoker.cache.mount.questions import Find, Put, Question, Rename, StageKeep, Status
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.staging import Staging
from stoker.cache.mount.waiting import Failed
from stoker.errors import (
    CacheUnavailable,
    OriginBusy,
    OriginError,
    OriginFull,
    StokerError,
    WriteDenied,
    WriteRefused,
)

TIMEOUT_S = 30.0
PUT = Put(1, "a", 1)
DONE = Found(False, 3, "v1")


class Clock:
    """Goes by only when somebody does something."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cache:
    """Puts take so long each, and all fail until it is there again."""

    def __init__(
        self, clock: Clock, put_s: list[float], back_at: float, error: type[StokerError] = CacheUnavailable
    ) -> None:
        self.clock = clock
        self.error = error
        self.put_s = put_s
        self.back_at = back_at
        self.puts = 0

    def put(self, *_: object) -> Found:
        self.puts += 1
        self.clock.now += self.put_s.pop(0) if self.put_s else 0.0
        if self.clock.now < self.back_at:
            raise self.error("it is gone")
        return DONE

    def find(self, path: str) -> Found:
        return self.put(path)

    def copy(self, path: str, to: str) -> Found:
        return self.put(path, to)

    def remove(self, path: str) -> None:
        return None

    def room(self) -> tuple[int, int]:
        if self.clock.now < self.back_at:
            raise CacheUnavailable("it is\ngone")
        return 2000, 1000


def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_s: list[float], back_at: float) -> object:
    clock = Clock()
    monkeypatch.setattr(finding, "time", clock)
    staging = Staging(tmp_path)
    staging.resize(PUT.stage, 3)
    source: Any = Cache(clock, put_s, clock.now + back_at)
    return Finding(source, staging, -1, TIMEOUT_S).find(PUT)


@pytest.mark.parametrize("put_s", [0.0, 1.0, TIMEOUT_S + 1, 10 * TIMEOUT_S])
def test_a_cache_that_is_back_in_time_has_lost_nothing(
    put_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it had taken until it was gone."""
    assert put(tmp_path, monkeypatch, [put_s], put_s + TIMEOUT_S - 2.0) == DONE


@pytest.mark.parametrize("put_s", [0.0, TIMEOUT_S + 1])
def test_one_that_does_not_come_back_is_given_up(
    put_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = put(tmp_path, monkeypatch, [put_s], put_s + TIMEOUT_S + 2.0)
    assert isinstance(answer, Failed)
    assert answer.code == errno.EIO


@pytest.mark.parametrize(
    ("error", "question", "code"),
    [
        (OriginBusy, PUT, 0),
        (OriginBusy, Rename("a", "b", True), 0),
        (OriginBusy, Rename("a", "b", False), errno.EIO),
        (OriginBusy, Find("a"), errno.EIO),
        (OriginError, PUT, errno.EIO),
        (WriteDenied, PUT, errno.EACCES),
        (OriginFull, PUT, errno.ENOSPC),
        (WriteRefused, PUT, errno.EIO),
    ],
)
def test_an_origin_that_is_busy_is_asked_again_for_what_may_be_done_twice(
    error: type[StokerError],
    question: Question,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(finding, "time", clock)
    staging = Staging(tmp_path)
    staging.resize(PUT.stage, 3)
    source: Any = Cache(clock, [], clock.now + TIMEOUT_S - 2.0, error)
    answer = Finding(source, staging, -1, TIMEOUT_S).find(question)
    assert (answer.code if isinstance(answer, Failed) else 0) == code
    assert (clock.now > 1000.0) == (code == 0), "what does not change is told at once"
    clock.now, source.back_at = 2000.0, 2000.0 + TIMEOUT_S + 2.0
    assert isinstance(Finding(source, staging, -1, TIMEOUT_S).find(question), Failed)


def test_the_status_is_told_at_once_also_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(finding, "time", clock)
    source: Any = Cache(clock, [], clock.now + 1.0)
    asked = Finding(source, Staging(tmp_path), -1, TIMEOUT_S)
    asked.facts = lambda: {"open": 3}
    began = clock.now
    assert asked.find(Status("a")) == b"folder: /a\ncache: cannot be asked: it is gone\nopen: 3\n"
    assert clock.now == began
    clock.now += 1.0
    held = b"cache_capacity_bytes: 2000\ncache_held_bytes: 1000\ncache_held: 1 KB of 2 KB\n"
    assert asked.find(Status("a")) == b"folder: /a\n" + held + b"open: 3\n"


@pytest.mark.parametrize(("counted", "told"), [(1, 0), (3, 2), (0, 0)])
def test_who_reads_the_status_is_not_told_of_himself(tmp_path: Path, counted: int, told: int) -> None:
    clock = Clock()
    source: Any = Cache(clock, [], clock.now)
    asked = Finding(source, Staging(tmp_path), -1, TIMEOUT_S)
    asked.facts = lambda: {"open": 1, "waiting": counted}
    said = asked.find(Status(""))
    assert isinstance(said, bytes)
    assert said.endswith(b"open: 1\nwaiting: %d\n" % told)


def test_what_could_not_be_written_is_told_by_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source: Any = None
    with caplog.at_level(logging.WARNING, "stoker.mount"):
        asked = Finding(source, Staging(tmp_path), -1, TIMEOUT_S)
        asked.tell_left()
        assert not caplog.messages, "nothing was kept"
        asked.find(StageKeep(1, "none"))
        assert caplog.messages == ["none could not be written: nothing of it is there"]
        for stage in range(1, 8):
            Staging(tmp_path).resize(stage, 3)
            asked.find(StageKeep(stage, f"in/{stage}"))
            assert caplog.messages[-1] == (
                f"in/{stage} could not be written: what was is kept in {tmp_path}/{stage}-in%2F{stage}"
            )
        asked.tell_left()
    some = ", ".join(f"{stage}-in%2F{stage}" for stage in range(1, 6))
    assert caplog.messages[-1] == (
        f"7 files that could not be written by mounts before are kept in {tmp_path} ({some}, …): look after them, and "
        "remove them"
    )
