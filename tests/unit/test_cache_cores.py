"""The pure cores: layout, flight, evict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.evict import Candidate, stalest
from stoker.cache.flight import Abort, Cancelled, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.cache.layout import block_bounds, block_count, split


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_split_covers_a_range_exactly_once(start: int, length: int, block_size: int) -> None:
    covered = []
    for span in split(start, start + length, block_size):
        assert 0 <= span.start < span.stop <= block_size
        covered += range(span.index * block_size + span.start, span.index * block_size + span.stop)
    assert covered == list(range(start, start + length))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_cover_an_object_exactly_once(size: int, block_size: int) -> None:
    bounds = [block_bounds(size, block_size, n) for n in range(block_count(size, block_size))]
    assert [b for start, stop in bounds for b in range(start, stop)] == list(range(size))
    with pytest.raises(ValueError, match="no block"):
        block_bounds(size, block_size, len(bounds))


def test_a_bad_range_is_refused() -> None:
    with pytest.raises(ValueError, match="not a range"):
        split(5, 4, 10)


def test_one_fetch_for_many_readers() -> None:
    table: FlightTable[str] = FlightTable()
    assert table.step(Want("k", 1)).effects == (Start("k", 1, 1),)
    assert table.step(Want("k", 2)).effects == ()
    assert table.step(Want("other", 3)).effects == (Start("other", 2, 3),)
    assert table.step(Fetched("k", 1)).effects == (Deliver("k", 1, (1, 2), False),)
    assert table.step(Want("k", 4)).effects == (Start("k", 3, 4),)


def test_a_leader_that_leaves_hands_the_running_fetch_on() -> None:
    table: FlightTable[str] = FlightTable()
    table.step(Want("k", 1))
    table.step(Want("k", 2))
    decision = table.step(Cancelled("k", 1))
    assert (decision.effects, table.leader("k")) == ((), 2)
    assert "leads" in decision.why
    assert table.step(Fetched("k", 1)).effects == (Deliver("k", 1, (2,), False),)


def test_the_last_reader_to_leave_stops_the_fetch() -> None:
    table: FlightTable[str] = FlightTable()
    table.step(Want("k", 1))
    table.step(Want("k", 2))
    table.step(Cancelled("k", 2))
    assert table.step(Cancelled("k", 1)).effects == (Abort("k", 1),)
    assert table.step(Fetched("k", 1)).effects == ()
    assert len(table) == 0


def test_a_failed_leader_is_told_and_a_follower_promoted() -> None:
    table: FlightTable[str] = FlightTable(attempts_max=2)
    for reader in (1, 2, 3):
        table.step(Want("k", reader))
    assert table.step(Failed("k", 1, False)).effects == (Deliver("k", 1, (1,), True), Start("k", 2, 2))
    assert table.step(Fetched("k", 1)).effects == ()
    assert table.step(Failed("k", 2, False)).effects == (Deliver("k", 2, (2, 3), True),)


def test_a_final_failure_is_everyones() -> None:
    table: FlightTable[str] = FlightTable()
    table.step(Want("k", 1))
    table.step(Want("k", 2))
    assert table.step(Failed("k", 1, True)).effects == (Deliver("k", 1, (1, 2), True),)


def test_what_was_used_longest_ago_leaves() -> None:
    choice = stalest([Candidate(50), Candidate(20), Candidate(90)], 100)
    assert choice is not None
    assert (choice.position, choice.staleness_s) == (1, 80.0)
    assert choice.why == "of 3 drawn it was used longest ago: 80 s"
    assert stalest([], 100) is None
    ahead = stalest([Candidate(500)], 100)
    assert ahead is not None
    assert ahead.staleness_s == 0, "a clock that went back makes nothing stale"


def test_copies_elsewhere_make_a_piece_leave_sooner_and_the_last_copy_leaves_last() -> None:
    choice = stalest([Candidate(0, 1), Candidate(99, 2), Candidate(98, 2), Candidate(99, 4)], 100)
    assert choice is not None
    assert choice.position in (2, 3)
    assert "copies elsewhere" in choice.why
    assert stalest([Candidate(0, 1), Candidate(50, 1)], 100)[0] == 0  # type: ignore[index]
