"""Requests that a daemon has read and not answered, on a kernel that does not send them again, and on one that does."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker._native import PlainFiles
from stoker.cache.mount import answers, device
from stoker.cache.mount.daemon import Daemon
from stoker.cache.mount.questions import Effect
from stoker.cache.mount.records import Record, RequestRead, TakenAgain, packed, records
from stoker.cache.mount.requests import RESENT, ROOT, Opcode, Request
from stoker.cache.mount.state import refused
from stoker.cache.mount.state_log import StateLog
from stoker.cache.mount.unanswered import Unanswered
from tests.mount.kernel import Asked
from tests.mount.kernel import packed as asked
from tests.unit.full_disk import no_file_may_exceed

LOOKUP = Asked(Opcode.LOOKUP, ROOT, b"name\0")


def known(*some: Record) -> Unanswered:
    """What the next daemon knows."""
    found = Unanswered()
    for record in some:
        assert isinstance(record, RequestRead | TakenAgain)
        found.restore(record)
    return found


def after(unanswered: Unanswered) -> Unanswered:
    """What is known after a log that was written anew."""
    return known(*records(b"".join(unanswered.records())))


def test_what_has_no_answer_is_there_for_the_next_daemon() -> None:
    first = Unanswered()
    logged = b"".join(first.read(asked(unique, LOOKUP)) for unique in (2, 4, 6))
    assert not first.read(asked(8, Asked(Opcode.FORGET, ROOT, bytes(8)))), "nobody waits for it"
    unique, parts = first.addressed((answers.refusal(4, errno.EIO),))
    assert (unique, parts) == (4, (answers.refusal(4, errno.EIO),))
    first.answered(unique)
    assert [number for number, _ in known(*records(logged)).left()] == [2, 4, 6]
    for found in (after(first), after(after(first))):
        assert list(found.left()) == [(n, asked(n | RESENT, LOOKUP)) for n in (2, 6)]


def test_the_kernel_has_the_number_that_it_knows() -> None:
    found = known(RequestRead(6, asked(6, LOOKUP)))
    assert not found.read(asked(6 | RESENT, LOOKUP)), "it is written down"
    assert found.number(6) == 6
    assert found.takes_again(6 | RESENT, is_excused=False) == (False, packed(TakenAgain(6 | RESENT)))
    assert found.number(6) == 6 | RESENT
    unique, parts = found.addressed((answers.head(6 | RESENT, 3), b"abc"))
    assert (unique, parts) == (6 | RESENT, (answers.head(6, 3), b"abc"))
    found.answered(unique)
    assert not found
    assert found.number(6) == 6


def test_of_a_kernel_that_sends_again_the_number_stays() -> None:
    found = Unanswered()
    found.takes_again(6 | RESENT, is_excused=False)
    said = (answers.refusal(6 | RESENT, errno.EIO),)
    assert found.addressed(said) == (6 | RESENT, said)


def test_three_daemons_in_a_row_may_end_with_a_request() -> None:
    before: list[Record] = []
    for _ in range(2):
        (has_ended, logged) = known(*before).takes_again(6 | RESENT, is_excused=False)
        assert not has_ended
        before += records(logged)
    assert known(*before).takes_again(8 | RESENT, is_excused=False)[0] is False
    one = known(*before)
    assert one.takes_again(6 | RESENT, is_excused=False)[0] is True
    assert after(known(*before)).takes_again(6 | RESENT, is_excused=False)[0] is False, "it was answered"


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_a_daemon_that_was_told_to_end_does_not_count(is_rewritten: bool) -> None:
    before: list[Record] = []
    ends = [True, False, True, True, False, True, False]  # on purpose or not
    for is_excused in ends:
        daemon = known(*before)
        has_ended, logged = daemon.takes_again(6 | RESENT, is_excused=is_excused)
        assert not has_ended, "with fewer than three"
        before += records(logged)
        if is_rewritten:
            before = list(records(b"".join(daemon.records())))
        if before.count(TakenAgain(6 | RESENT)) == 2:
            break
    assert known(*before).takes_again(6 | RESENT, is_excused=False)[0] is True


class RefusingCore:
    """Nothing is there, and the kernel does not send again."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(flags=0, waiting=())

    def step(self, request: Request, _: float) -> list[Effect]:
        return [refused(request.header.unique, errno.ENOENT)]


Takes = Callable[..., list[tuple[int, int]]]


@pytest.fixture
def take_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Takes:
    """Has a daemon take what is left of a log, while these requests wait, and what was read last; which it refuses, and
    why."""

    def take(log: list[Record], waiting: set[int], last: bytes = bytes(1000)) -> list[tuple[int, int]]:
        monkeypatch.setattr(device, "is_waited_for", lambda _, unique: unique in waiting)
        state_log, core, finding = StateLog(tmp_path / "state"), cast(Any, RefusingCore()), cast(Any, None)
        for record in log:
            state_log.append(packed(record))
        with open(tmp_path / "said", "w+b") as said:
            daemon = Daemon(said.fileno(), "0:1", core, finding, state_log, plain=PlainFiles())
            assert not list(daemon._left())
            daemon._take_again(memoryview(last))
            said.seek(0)
            return [(unique, -code) for _, code, unique in struct.iter_unpack("=IiQ", said.read())]

    return take


def test_only_what_still_waits_is_taken_again(take_again: Takes) -> None:
    log: list[Record] = [RequestRead(unique, asked(unique, LOOKUP)) for unique in (2, 4, 6)]
    assert take_again(log, {4, 6}) == [(4, errno.ENOENT), (6, errno.ENOENT)]


@pytest.mark.parametrize("behind", [b"", b"of the one before"])
def test_what_was_read_last_is_taken_whether_it_was_written_down_or_not(
    take_again: Takes, tmp_path: Path, behind: bytes
) -> None:
    log: list[Record] = [RequestRead(unique, asked(unique, LOOKUP)) for unique in (2, 4)]
    assert take_again(log, {4, 6}, asked(6, LOOKUP) + behind) == [(4, errno.ENOENT), (6, errno.ENOENT)]
    assert [record.unique for record in StateLog(tmp_path / "state").read()] == [
        2,
        4,
        6,
        4 | RESENT,
        6 | RESENT,
    ]


def test_what_was_read_last_is_taken_once(take_again: Takes) -> None:
    log: list[Record] = [RequestRead(2, asked(2, LOOKUP))]
    assert take_again(log, {2}, asked(2, LOOKUP)) == [(2, errno.ENOENT)]
    assert take_again([], set(), asked(2, LOOKUP)) == []
    assert take_again([], {4}, b"\xff" * 100) == []


def test_what_was_read_last_outlives_the_daemon(tmp_path: Path) -> None:
    first, second = (StateLog(tmp_path / "state").buffer(100_000) for _ in range(2))
    first[:5] = b"hello"
    assert bytes(second[:6]) == b"hello\0"
    assert (tmp_path / "state.request").stat().st_mode & 0o777 == 0o600


def test_where_there_is_no_room_for_it_the_mount_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with no_file_may_exceed(50_000):
        assert isinstance(StateLog(tmp_path / "state").buffer(100_000), bytearray)
    assert "state.request: File too large; make room there" in caplog.text


def test_what_ended_three_daemons_fails(take_again: Takes) -> None:
    log: list[Record] = [RequestRead(2, asked(2, LOOKUP)), *[TakenAgain(2 | RESENT)] * 2]
    assert take_again(log, {2}) == [(2, errno.EIO)]
