"""The pure cores: layout, flight, block, evict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.block import IllegalTransition, Residency
from stoker.cache.evict import LRU, UNIFORM, Evictor
from stoker.cache.flight import Abort, Cancelled, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.cache.layout import BlockId, block_bounds, block_count, block_name, block_path, split


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


def test_names_are_flat_and_differ_in_every_part() -> None:
    blocks = [BlockId("b", "../k", "v", 0), BlockId("b", "../k", "v", 1), BlockId("b/", "../k", "v", 0)]
    blocks += [BlockId("b", "../k", "w", 0), BlockId("b/..", "/k", "v", 0)]
    names = {block_name(block) for block in blocks}
    assert len(names) == len(blocks)
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)
    assert block_path("ab" + "0" * 30) == "ab/ab" + "0" * 30


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


def test_a_block_goes_its_way() -> None:
    residency: Residency[str] = Residency(10)
    assert residency.reserve("a", 6)
    assert not residency.reserve("b", 5)
    assert (residency.state("a"), residency.is_held("a"), residency.free_bytes) == ("filling", False, 4)
    residency.fill("a")
    residency.pin("a")
    assert residency.is_pinned("a")
    with pytest.raises(IllegalTransition, match="1 pins; recent history: \\['reserve', 'fill'\\]"):
        residency.evict("a")
    residency.unpin("a")
    residency.evict("a")
    assert (residency.state("a"), residency.free_bytes) == (None, 10)


@pytest.mark.parametrize("move", ["fill", "abandon", "pin", "unpin", "evict"])
def test_an_illegal_move_raises(move: str) -> None:
    residency: Residency[str] = Residency(10)
    with pytest.raises(IllegalTransition, match="absent"):
        getattr(residency, move)("a")
    residency.reserve("b", 1)
    residency.fill("b")
    with pytest.raises(IllegalTransition):
        residency.reserve("b", 1)
    with pytest.raises(IllegalTransition):
        residency.unpin("b")


def never(_: str) -> bool:
    return False


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    evictor: Evictor[str] = Evictor()
    for name in "abc":
        evictor.on_fill(name, 4, LRU)
    evictor.on_hit("a")
    assert evictor.make_room(5, 0, LRU, never).victims == ("b", "c")
    assert evictor.make_room(5, 1, LRU, lambda name: name == "b").victims == ("c",)
    assert evictor.make_room(1, 1, LRU, never) == ((), False, "there is room")
    assert evictor.make_room(13, 0, LRU, never).refused


def test_uniform_never_replaces_and_is_never_replaced() -> None:
    evictor: Evictor[str] = Evictor()
    evictor.on_fill("u", 10, UNIFORM)
    assert evictor.make_room(1, 0, LRU, never).refused
    evictor.on_fill("l", 10, LRU)
    assert evictor.make_room(1, 0, UNIFORM, never).refused
    assert evictor.make_room(1, 0, LRU, never).victims == ("l",)
    evictor.on_gone("u")
    evictor.on_gone("l")
    assert len(evictor) == 0
    with pytest.raises(ValueError, match="best"):
        evictor.on_fill("x", 1, "best")
