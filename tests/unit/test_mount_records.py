"""What a mount's daemon writes down for the next one: as records, and in a file that may break off anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.mount import state_log
from stoker.cache.mount.records import (
    Began,
    Closed,
    FileOpened,
    FileStaged,
    FolderRead,
    Forgotten,
    LookedUp,
    NodeNamed,
    Record,
    RequestRead,
    TakenAgain,
    packed,
    records,
    whole_bytes,
)
from stoker.cache.mount.state_log import StateLog
from stoker.errors import WireError
from tests.unit.full_disk import no_file_may_exceed

SOME: list[Record] = [
    Began(1, 1 << 39 | 5, 1_600_000_000_000_000_001),
    NodeNamed(1 << 62, "a/ü", False, 1 << 40, "etag", 1_500_000_000_000_000_000, 3, ".stoker-status"),
    LookedUp([1 << 62, 7]),
    Forgotten([(7, 1), (1 << 62, 4)]),
    FileOpened((3 << 32) + 1, 7, 0, 12),
    FolderRead((3 << 32) + 2, 7, 1000, "last/", 14),
    FolderRead((3 << 32) + 2, 7, 0, None),
    Closed((3 << 32) + 2),
    FileStaged(9, 4, 7, "a/b", 4711, 100, 2, -1),
    TakenAgain(1 << 63 | 12),
    RequestRead(14, b"\0\xff request"),
]
NUMBERS = st.integers(0, (1 << 63) - 1)
ANY_RECORD = st.one_of(
    st.builds(Began, NUMBERS, NUMBERS, NUMBERS),
    st.builds(NodeNamed, NUMBERS, st.text(), st.booleans(), NUMBERS, st.text(), NUMBERS, NUMBERS, st.text()),
    st.builds(LookedUp, st.lists(NUMBERS)),
    st.builds(Forgotten, st.lists(st.tuples(NUMBERS, NUMBERS))),
    st.builds(FileOpened, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(FolderRead, NUMBERS, NUMBERS, NUMBERS, st.none() | st.text(), NUMBERS),
    st.builds(Closed, NUMBERS),
    st.builds(RequestRead, NUMBERS, st.binary()),
)


def written(some: list[Record]) -> bytes:
    return b"".join(map(packed, some))


@given(st.lists(ANY_RECORD, max_size=8))
def test_what_is_written_is_read(some: list[Record]) -> None:
    assert list(records(written(some))) == some


def test_a_record_that_was_not_written_whole_is_none() -> None:
    data = written(SOME)
    ends = [len(written(SOME[:count])) for count in range(len(SOME) + 1)]
    for size_bytes in range(len(data) + 1):
        whole = max(end for end in ends if end <= size_bytes)
        assert whole_bytes(data[:size_bytes]) == whole
        assert list(records(data[:size_bytes])) == SOME[: ends.index(whole)]


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode(["unheard of", 1, 2, 3]),
        msgspec.msgpack.encode(["close", "a number"]),
        msgspec.msgpack.encode({"close": 1}),
        msgspec.msgpack.encode(["close"]),
        b"",
        b"\xc1",
    ],
)
def test_what_no_daemon_wrote_is_refused(body: bytes) -> None:
    before = packed(Closed(1))
    found: list[Record] = []
    with pytest.raises(WireError, match=f"not understood at byte {len(before) + 4}"):
        found.extend(records(before + len(body).to_bytes(4, "little") + body))


def test_what_a_daemon_of_an_older_version_wrote_is_understood() -> None:
    """It goes on in the place of one that knew less of a folder."""
    body = msgspec.msgpack.encode(["folder", 3, 7, 1000, "last/"])
    assert list(records(len(body).to_bytes(4, "little") + body)) == [FolderRead(3, 7, 1000, "last/")]


@given(st.binary(max_size=60))
def test_no_bytes_crash_who_reads_them(data: bytes) -> None:
    try:
        assert len(list(records(data))) <= whole_bytes(data) <= len(data)
    except WireError:
        pass


def test_a_daemon_goes_on_behind_what_the_one_before_wrote_whole(tmp_path: Path) -> None:
    """One that is killed while it writes leaves a part of a record; what others write is not its rest."""
    path, last = tmp_path / "state", packed(SOME[1])
    for cut in range(len(last)):
        path.write_bytes(packed(SOME[0]) + last[:cut])
        log = StateLog(path)
        assert list(log.read()) == SOME[:1]
        log.append(packed(SOME[2]))
        log.append(packed(SOME[3]))
        assert list(StateLog(path).read()) == [SOME[0], SOME[2], SOME[3]], cut


def test_a_log_is_written_anew_when_most_of_it_is_no_more_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_log, "_BYTES_MIN", 200)
    log = StateLog(tmp_path / "state")
    count = 0
    while not log.is_long:
        log.append(packed(Closed(count)))
        count += 1
    assert (tmp_path / "state").stat().st_size >= 200
    log.rewrite(map(packed, SOME))
    log.append(packed(Closed(1)))
    assert not log.is_long
    assert list(StateLog(tmp_path / "state").read()) == [*SOME, Closed(1)]


class Killed(Exception):
    """The daemon."""


@pytest.mark.parametrize("count", range(len(SOME) + 1))
def test_who_is_killed_while_the_log_is_written_anew_leaves_the_old_one(tmp_path: Path, count: int) -> None:
    log = StateLog(tmp_path / "state")
    log.append(packed(Closed(1)))

    def snapshot() -> Iterator[bytes]:
        yield from map(packed, SOME[:count])
        raise Killed

    with pytest.raises(Killed):
        log.rewrite(snapshot())
    following = StateLog(tmp_path / "state")
    assert list(following.read()) == [Closed(1)]
    following.rewrite(map(packed, SOME))
    assert list(StateLog(tmp_path / "state").read()) == SOME


def test_a_disk_that_takes_no_more_costs_what_it_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "state"
    log = StateLog(path)
    log.append(packed(SOME[0]))
    size_bytes = path.stat().st_size
    with no_file_may_exceed(size_bytes + 5):
        log.append(packed(SOME[1]))  # five bytes of it have room
        log.append(packed(SOME[2]))
        assert log.is_long
        before = open_files()
        log.rewrite(map(packed, [SOME[1]]))
        assert open_files() == before
    assert list(StateLog(path).read()) == SOME[:1]
    log.append(packed(SOME[3]))
    assert log.is_long, "what is missing has room by now"
    log.rewrite(map(packed, SOME))
    assert not log.is_long
    log.append(packed(Closed(1)))
    assert list(StateLog(path).read()) == [*SOME, Closed(1)]


class Clock:
    """Goes by when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_disk_that_takes_no_more_is_said_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However much is to be written meanwhile."""
    clock = Clock()
    monkeypatch.setattr(state_log, "time", clock)
    log = StateLog(tmp_path / "state")

    def tick() -> int:
        caplog.clear()
        with no_file_may_exceed(5):
            log.append(packed(SOME[1]))
            assert log.is_long
            log.rewrite(map(packed, SOME))
        return sum("state.new" in record.message for record in caplog.records)

    assert tick() == 1
    for _ in range(3):
        clock.now += 19.0
        assert tick() == 0
    clock.now += 4.0
    assert tick() == 1
    assert tick() == 0


def test_a_log_that_somebody_removed_is_gone_for_all_daemons_but_the_first(tmp_path: Path) -> None:
    path, first = tmp_path / "state", packed(SOME[0])
    assert not StateLog(path).is_gone(is_first=True)
    assert StateLog(path).is_gone(is_first=False)
    path.write_bytes(first[:-1])
    assert StateLog(path).is_gone(is_first=False), "of what it had not written whole nothing is left"
    path.write_bytes(first)
    log = StateLog(path)
    assert not log.is_gone(is_first=False)
    assert list(log.read()) == SOME[:1]
    path.unlink()
    assert not log.is_gone(is_first=False), "who has it goes on"
    assert StateLog(path).is_gone(is_first=False)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
