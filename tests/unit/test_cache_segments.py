"""Segments against a naive twin, and against exact recency."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.cache.segments import (
    ALIGNED_FROM_BYTES,
    KEPT_MAX,
    PAGE_BYTES,
    Piece,
    Segments,
    pages_bytes,
    segment_bytes_for,
)


def numbers(first: int = 1) -> Callable[[], int]:
    count = itertools.count(first)
    return lambda: next(count)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.integers(1, 3), st.integers(1, 130)),
            st.tuples(st.just("remove"), st.integers(1, 3), st.just(0)),
            st.tuples(st.just("seal"), st.integers(1, 3), st.just(0)),
        ),
        max_size=60,
    )
)
def test_no_two_objects_share_a_byte_and_no_lot_a_segment(steps: list[tuple[str, int, int]]) -> None:
    segments = Segments(100, numbers())
    files: dict[int, tuple[int, int]] = {}
    sealed: list[int] = []
    for now_s, (kind, bucket, size_bytes) in enumerate(steps):
        if kind == "place":
            growth_bytes, before_bytes = segments.growth_bytes(bucket, size_bytes), segments.size_bytes
            number, offset, is_new, closed = segments.place(bucket, size_bytes, now_s)
            assert segments.size_bytes - before_bytes == growth_bytes
            segments.settle(number)
            assert is_new == (number not in files)
            owner, length = files.get(number, (bucket, 0))
            assert (owner, length) == (bucket, offset)
            assert number not in sealed
            files[number] = bucket, offset + size_bytes
            assert files[number][1] <= 100 or offset == 0, "only one that is larger has a larger segment"
            assert segments.is_open(number)
        elif kind == "seal":
            closed = next((n for n in files if segments.is_open(n) and segments.lot_of(n) == bucket), None)
            if closed is not None:
                segments.seal_segment(closed)
        else:
            closed = None
            number = segments.oldest([bucket]) or 0
            assert (number != 0) == any(files[each][0] == bucket for each in sealed)
            if number:
                assert number == next(each for each in sealed if files[each][0] == bucket)
                assert segments.remove(number) == pages_bytes(files.pop(number)[1])
                sealed.remove(number)
        if closed is not None:
            sealed.append(closed)
        assert segments.oldest() == (sealed[0] if sealed else None)
        assert len(segments) == len(files)
        assert segments.size_bytes == sum(pages_bytes(length) for _, length in files.values())
        assert [segments.bytes_of(n) for n in files] == [pages_bytes(length) for _, length in files.values()]


def test_a_second_chance_for_what_was_used_since_up_to_half_a_segment() -> None:
    segments = Segments(100, numbers())
    segments.adopt(7, 1, 100, written_s=50)
    pieces = [Piece(20, 50), Piece(20, 51), Piece(20, 60), Piece(15, 55), Piece(15, 40)]
    kept, why = segments.sift(7, pieces)
    assert kept == (2, 3), "the third of them does not fit into half of it"
    assert why == "3 of 5 were used since it was written"
    assert segments.sift(7, pieces, has_time=False).kept == ()
    assert not segments.is_open(7)
    assert 7 in segments


def test_the_segment_with_the_least_in_it_is_written_anew() -> None:
    page = PAGE_BYTES
    segments = Segments(4 * page, numbers(10))
    for number in (1, 2, 3):
        segments.adopt(number, 1, 4 * page, written_s=0)
    segments.settle(segments.place(1, 90, 1).segment)
    live = {1: 2 * page - 1, 2: page, 3: 4 * page}
    assert segments.sparsest(lambda number: live.get(number, 0)) == 2, "the open one is not"
    segments.remove(2)
    assert segments.sparsest(lambda number: live.get(number, 0)) == 1
    live[1] = 2 * page
    assert segments.sparsest(lambda number: live.get(number, 0)) is None


def test_a_segment_that_is_being_written_to_stays() -> None:
    segments = Segments(100, numbers())
    first = segments.place(1, 60, 5).segment
    assert segments.largest_open([1]) is None
    assert segments.place(1, 60, 6).sealed == first
    assert segments.oldest() is None
    segments.settle(first)
    assert segments.oldest() == first
    assert segments.oldest([2]) is None
    assert segments.written_before([1], 6) == [first]
    assert segments.of_lots([1]) == [first, first + 1]
    segments.settle(first + 1)
    assert segments.largest_open([1, 2]) == first + 1
    segments.set_lot(first + 1, 2)
    assert not segments.is_open(first + 1)
    assert segments.lot_of(first + 1) == 2


def test_a_long_object_begins_at_a_page() -> None:
    segments = Segments(10 * ALIGNED_FROM_BYTES, numbers())
    assert segments.place(1, 10, 0).offset == 0
    assert segments.place(1, 10, 0).offset == 10
    assert segments.place(1, ALIGNED_FROM_BYTES, 0).offset == PAGE_BYTES
    assert segments.place(1, 10, 0).offset == PAGE_BYTES + ALIGNED_FROM_BYTES


def test_segments_are_small_beside_the_room() -> None:
    assert segment_bytes_for(1 << 40) == 64 << 20
    assert segment_bytes_for(1 << 30) == 4 << 20
    assert segment_bytes_for(10) == PAGE_BYTES
    with pytest.raises(ValueError, match="at least one byte"):
        Segments(0, numbers())


def zipf(objects: int, exponent: float, rng: Rng) -> Callable[[], int]:
    """Draws objects by chance, the n-th most wanted with a weight of n ** -exponent."""
    sums = list(itertools.accumulate((n + 1) ** -exponent for n in range(objects)))
    return lambda: bisect.bisect_left(sums, rng.uniform(0.0, sums[-1]))


def hits_of_lru(requests: Iterable[int], room: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in requests:
        hits += key in held
        held[key] = None
        held.move_to_end(key)
        if len(held) > room:
            held.popitem(last=False)
    return hits


def hits_of_segments(requests: Iterable[int], room: int) -> tuple[int, int]:
    """Hits, and objects written; all are of one page."""
    segments = Segments(room // 100 * PAGE_BYTES, numbers())
    held: dict[int, tuple[int, int]] = {}  # the segment and when it was used
    inside: dict[int, list[int]] = {}
    hits = writes = 0

    def write(key: int, now_s: int, used_s: int) -> None:
        nonlocal writes
        number = segments.place(1, PAGE_BYTES, now_s).segment
        segments.settle(number)
        inside.setdefault(number, []).append(key)
        held[key] = number, used_s
        writes += 1

    for now_s, key in enumerate(requests):
        if key in held:
            hits += 1
            held[key] = held[key][0], now_s
            continue
        while segments.size_bytes >= (room - room // 200) * PAGE_BYTES:
            victim = segments.oldest()
            assert victim is not None
            live = [each for each in inside.pop(victim) if held.get(each, (0,))[0] == victim]
            pieces = [Piece(PAGE_BYTES, held[each][1]) for each in live]
            kept = segments.sift(victim, pieces).kept
            segments.remove(victim)
            again = [(live[i], pieces[i].used_s) for i in kept]
            for each in live:
                del held[each]
            for each, used_s in again:
                write(each, now_s, used_s)
        write(key, now_s, now_s)
        assert segments.size_bytes <= room * PAGE_BYTES
    return hits, writes


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_hits_are_nearly_those_of_exact_recency(exponent: float, share: float) -> None:
    rng = Rng(5)
    draw = zipf(10_000, exponent, rng)
    requests = [draw() for _ in range(80_000)]
    room = int(10_000 * share)
    hits, writes = hits_of_segments(requests, room)
    assert hits >= 0.95 * hits_of_lru(requests, room)
    assert writes <= 2 * (len(requests) - hits), "at most one more write for each object that is fetched"
    assert KEPT_MAX == 0.5


def test_what_is_placed_apart_shares_a_lot_and_no_segment() -> None:
    segments = Segments(100, numbers())
    first = segments.place(1, 40, 0).segment
    apart = segments.place(1, 30, 0, apart=1)
    assert apart.is_new
    assert segments.growth_bytes(1, 40) == segments.growth_bytes(1, 40, apart=1) == 0
    assert [segments.place(1, 40, 1).segment, segments.place(1, 30, 1, apart=1).segment] == [
        first,
        apart.segment,
    ]
    assert segments.lot_of(apart.segment) == 1
    assert segments.place(1, 60, 2, apart=1).sealed == apart.segment
    for number in (first, first, apart.segment, apart.segment, apart.segment + 1):
        assert not segments.is_at_rest(number)
        segments.settle(number)
    assert segments.is_at_rest(apart.segment)
    assert not segments.is_at_rest(first), "it is open"
    assert segments.largest_open([1]) == first
    segments.seal_segment(first)
    segments.seal_segment(first)
    assert segments.largest_open([1]) == apart.segment + 1
    assert not segments.is_open(first)
    segments.set_lot(apart.segment + 1, 2)
    assert segments.largest_open([1, 2]) is None
    assert [segments.oldest([1]), segments.oldest([2])] == [apart.segment, apart.segment + 1]
