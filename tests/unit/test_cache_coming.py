"""When each thing is read next, by what was announced, against a naive twin."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.cache.catalog import Catalog
from stoker.cache.coming import NEVER, ComingReads, Stream, items_of

NOW = 100.0


def stream(*rounds: list[int], group: str = "job", read_s: float = 1.0, numbered: bool = True) -> Stream:
    made = Stream(group, 0, read_s=read_s, now=NOW)
    for number, items in enumerate(rounds):
        said(made, made.stop, items, number if numbered else None)
    return made


def said(to: Stream, start: int, items: list[int], round_number: int | None = None) -> None:
    to.announce(start, len(items), ids(*items), np.arange(start, start + len(items)), round_number)


def ids(*items: int) -> np.typing.NDArray[np.uint64]:
    return np.array(items, dtype=np.uint64)


def due(coming: ComingReads, *items: int) -> list[float]:
    return coming.due(ids(*items), np.full(len(items), -1)).seconds.tolist()


def coming_of(**streams: Stream) -> ComingReads:
    coming = ComingReads()
    for name, one in streams.items():
        coming.put(name, one)
    return coming


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.floats(0, 1), st.lists(st.integers(0, 30), max_size=40)),
        st.tuples(st.just("read"), st.floats(0, 1), st.just([])),
    ),
    max_size=20,
)


@settings(max_examples=300)
@given(STEPS, st.integers(0, 60))
def test_what_is_read_next_is_what_a_plain_list_says(
    steps: list[tuple[str, float, list[int]]], start: int
) -> None:
    made, twin, cursor = Stream("job", 0, read_s=1.0, now=NOW), [], 0
    for kind, part, items in steps:
        if kind == "say":
            at = cursor + int(part * (len(twin) - cursor))
            said(made, at, items)
            twin = twin[:at] + items
        else:
            cursor += int(part * (len(twin) - cursor))
            made.advance(cursor, NOW + cursor)
        assert (made.stop, made.cursor) == (len(twin), cursor)
    first = max(start, cursor)
    expected = [next((p for p in range(first, len(twin)) if twin[p] == item), NEVER) for item in range(31)]
    assert made.next_of(ids(*range(31)), start).tolist() == expected


class Plain:
    """One stream's reads as a plain list: of each its round, its object, and its block (-1: all of it)."""

    def __init__(
        self,
        reads: list[tuple[int, int, int]],
        read_s: float,
        cursor: int,
        reach: int | None,
        *,
        numbered: bool,
    ) -> None:
        self.reads = sorted(reads) if numbered else reads
        self.read_s, self.numbered = read_s, numbered
        self.cursor, self.reach = min(cursor, len(reads)), reach
        self.until = len(reads) if reach is None else min(len(reads), self.cursor + reach)

    def stream(self, group: str) -> Stream:
        made = Stream(group, 0, read_s=self.read_s, now=NOW)
        start = 0
        for number, block in groupby(self.reads, lambda read: read[0] if self.numbered else 0):
            part = list(block)
            items = items_of(ids(*(o for _, o, _ in part)), np.array([b for _, _, b in part]))
            round_number = number if self.numbered else None
            made.announce(start, len(part), items, np.arange(start, start + len(part)), round_number)
            start += len(part)
        made.reach = self.reach
        made.advance(self.cursor, NOW)  # no time has passed: the pace stays
        return made

    def next(self, wanted: set[tuple[int, int]], start: int) -> int:
        return next((p for p in range(start, self.until) if self.reads[p][1:] in wanted), NEVER)

    def due_s(self, number: int, block: int, *, in_rounds: bool) -> float:
        wanted = {(number, block), (number, -1)} if block >= 0 else {(number, -1), (number, 0)}
        at = self.next(wanted, self.cursor)
        if at == NEVER:
            return float("inf")
        if in_rounds:
            at = sum(read[0] <= self.reads[at][0] for read in self.reads)
        return (at - self.cursor) * self.read_s

    def kind(self, number: int, *, in_rounds: bool) -> tuple[float, int]:
        wanted = {(number, -1)}
        first = self.next(wanted, self.cursor)
        at = NEVER if first == NEVER else self.next(wanted, first + 1)
        if at == NEVER:
            return float("inf"), 0
        due_s = (at - self.cursor) * self.read_s
        if in_rounds:
            return due_s, 1 + self.reads[at][0] % 16
        width_s = 2.0 ** math.ceil(math.log2(max(1e-6, (len(self.reads) - self.cursor) * self.read_s / 16)))
        return due_s, 1 + int((NOW + due_s) / width_s) % 16


BLOCK = st.sampled_from((-1, -1, -1, 0, 2))
READS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), BLOCK), max_size=60)
FEW_ROUNDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), BLOCK), min_size=10, max_size=60)
PACE_S = st.sampled_from((0.25, 1.0, 3.0))
REACH = st.sampled_from((None, None, 5, 30))
PLAIN = st.builds(Plain, READS, PACE_S, st.integers(0, 20), REACH, numbered=st.booleans())
IN_ROUNDS = st.builds(Plain, FEW_ROUNDS, PACE_S, st.integers(0, 5), REACH, numbered=st.just(True))
QUESTIONS = [(number, block) for number in range(11) for block in (-1, 0, 1, 2)]


@settings(max_examples=300)
@given(st.one_of(st.lists(PLAIN, max_size=5), st.lists(IN_ROUNDS, max_size=3)), st.booleans())
def test_one_by_one_and_all_at_once_it_is_what_plain_lists_say(
    plain: list[Plain], is_one_group: bool
) -> None:
    groups = ["job" if is_one_group else str(number) for number in range(len(plain))]
    coming = coming_of(**{str(n): one.stream(groups[n]) for n, one in enumerate(plain)}).as_of_now()
    in_rounds = len(set(groups)) == 1 and all(one.numbered and one.reads for one in plain)
    assert coming.is_in_rounds == in_rounds

    expected = [
        min((one.due_s(number, block, in_rounds=in_rounds) for one in plain), default=float("inf"))
        for number, block in QUESTIONS
    ]
    found = coming.due(ids(*(n for n, _ in QUESTIONS)), np.array([b for _, b in QUESTIONS]))
    assert found.seconds.tolist() == expected
    assert found.horizon_s == max(((len(o.reads) - o.cursor) * o.read_s for o in plain), default=0.0)
    assert [coming.next_of(number, block, NOW).seconds for number, block in QUESTIONS] == expected

    kinds = [
        min((one.kind(number, in_rounds=in_rounds) for one in plain), default=(0.0, 0))[1]
        for number in range(11)
    ]
    assert coming.kinds_of(ids(*range(11)), NOW) == kinds
    assert [coming.kind_of(number, NOW) for number in range(11)] == kinds


def test_a_gap_between_what_is_announced_is_refused() -> None:
    made = stream([1, 2])
    with pytest.raises(ValueError, match="known up to 2, not up to 3"):
        said(made, 3, [5])
    said(made, 1, [7, 8, 9])
    assert made.next_of(ids(1, 2, 7, 9)).tolist() == [0, NEVER, 1, 3]


def test_where_one_group_reads_everything_is_due_at_the_end_of_its_round() -> None:
    coming = coming_of(a=stream([1, 2, 3, 4], [4, 3, 2, 1], read_s=2.0))
    assert due(coming, 1, 4, 9) == [8.0, 8.0, np.inf]
    assert coming.get("a") is not None
    coming.get("a").advance(2, NOW + 4)  # type: ignore[union-attr]
    assert due(coming, 1, 2, 3, 4) == [12.0, 12.0, 4.0, 4.0]


def test_ranks_of_a_job_are_one_group_and_another_job_is_not() -> None:
    ranks = coming_of(a=stream([1, 2], [3, 4]), b=stream([3, 4], [1, 2]))
    assert ranks.is_in_rounds
    assert due(ranks, 1, 2, 3, 4) == [2.0, 2.0, 2.0, 2.0]
    jobs = coming_of(a=stream([1, 2], [2, 1]), b=stream([5, 2, 1], group="other"))
    assert not jobs.is_in_rounds
    assert due(jobs, 1, 2, 5) == [0.0, 1.0, 0.0]
    assert due(coming_of(a=stream([1, 2], numbered=False)), 1, 2) == [0.0, 1.0]


def test_a_part_of_an_object_is_due_with_the_whole_and_the_whole_with_its_first_block() -> None:
    made = Stream("job", 0, read_s=1.0, now=NOW)
    read = items_of(ids(10, 11, 12), np.array([0, 3, -1]))
    made.announce(0, 3, read, np.arange(3))
    coming = coming_of(a=made)
    seconds = coming.due(ids(10, 10, 11, 11, 12, 12), np.array([-1, 1, 3, -1, -1, 7])).seconds
    assert seconds.tolist() == [0.0, np.inf, 1.0, np.inf, 2.0, 2.0]


def test_the_pace_is_what_is_seen() -> None:
    made = stream([1] * 1000, read_s=1.0)
    for second in range(1, 60):
        made.advance(10 * second, NOW + second)
    assert made.read_s == pytest.approx(0.1, rel=0.01)
    made.advance(5, NOW + 70)
    assert made.cursor == 590, "it never goes back"


def test_what_is_read_again_at_about_the_same_time_is_of_one_kind() -> None:
    rounds = coming_of(a=stream([1, 2, 3], [4, 5, 1], [2, 6, 7]))
    assert rounds.kind_of(4, NOW) == 0, "it is read but once"
    assert rounds.kind_of(1, NOW) != rounds.kind_of(2, NOW)
    assert 0 not in (rounds.kind_of(1, NOW), rounds.kind_of(2, NOW))


def test_names_by_number() -> None:
    catalog = Catalog()
    keys = [f"train/ä{number}" for number in range(100)]
    catalog.extend(keys[:1], ids(1))
    catalog.extend(keys[1:60], ids(*range(2, 61)))
    catalog.extend(keys[60:], ids(*range(61, 101)))
    assert [catalog.key(number) for number in range(100)] == keys
    assert catalog.ids(np.array([0, 99])).tolist() == [1, 100]
    for number in (-1, 100):
        with pytest.raises(IndexError):
            catalog.key(number)
    with pytest.raises(IndexError):
        catalog.ids(np.array([100]))


def test_what_is_read_beyond_a_streams_reach_counts_for_nothing() -> None:
    near = Stream("job", 0, read_s=1.0, now=0.0)
    near.announce(0, 10, np.arange(10, dtype=np.uint64), np.arange(10), 0)
    near.announce(10, 10, np.arange(10, dtype=np.uint64)[::-1], np.arange(10, 20), 1)
    coming = ComingReads()
    coming.put("near", near)
    ids, blocks = np.arange(10, dtype=np.uint64), np.full(10, -1)
    assert np.isfinite(coming.due(ids, blocks).seconds).all()
    assert coming.kind_of(3, 0.0) != 0
    near.reach = 4
    near.advance(2, 2.0, 3)
    assert np.flatnonzero(np.isfinite(coming.due(ids, blocks).seconds)).tolist() == [2, 3, 4, 5, 6]
    assert coming.kind_of(3, 0.0) == 0, "that it is read again is beyond it"
    own = Stream("job", 0, read_s=1.0, now=0.0)
    own.announce(0, 20, np.array([3, 3], dtype=np.uint64), np.array([3, 16]), 0)
    coming.put("own", own)
    assert coming.kind_of(3, 0.0) != 0


def test_a_catalog_is_copied_seldom_as_it_grows() -> None:
    catalog, copies, size = Catalog(), 0, 0
    for number in range(1000):
        before = catalog._ids
        catalog.extend([str(number)], ids(number))
        copies += catalog._ids is not before
        size = max(size, len(catalog._ids))
    assert copies <= 11
    assert size <= 2048
    assert catalog.ids(np.arange(1000)).tolist() == list(range(1000))
