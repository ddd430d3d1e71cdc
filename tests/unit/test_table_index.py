"""Groups of rows, what is kept of them, and the parts of objects that are read for them. Pure but for threads."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.ranges import ByteRange
from stoker.data.formats.table_held import Held
from stoker.data.formats.table_index import Group, Scanned, TableIndex, build_index, coalesced
from stoker.data.formats.table_objects import SpanFile, in_turn
from stoker.wire.cache_api import ObjectInfo


def index_of(*objects: list[int]) -> TableIndex:
    """Of objects whose groups have so many rows; group `i` of an object lies at `[100 i, 100 i + 10)` and 20 later."""
    infos = [ObjectInfo(f"k{n}", 1000 + n, "v") for n in range(len(objects))]
    scanned = [
        Scanned(
            ("a",),
            [
                Group(rows, [ByteRange(100 * i, 100 * i + 10), ByteRange(100 * i + 20, 100 * i + 30)])
                for i, rows in enumerate(groups)
            ],
            [ByteRange(900, 1000 + n)],
            {},
        )
        for n, groups in enumerate(objects)
    ]
    return build_index(infos, scanned)


def test_groups_without_rows_are_left_out() -> None:
    index = index_of([0, 3], [], [2, 0, 4])
    assert index.records == 9
    assert index.firsts.tolist() == [0, 3, 5]
    assert index.place(2).within == 2
    assert index.place(2).spans == [ByteRange(200, 210), ByteRange(220, 230)]


def test_reads_name_the_bytes_of_a_records_group() -> None:
    index = index_of([2, 3], [4])
    reads = index.reads(np.array([8, 0, 4]))
    assert [reads.keys[i] for i in reads.objects] == ["k1", "k0", "k0"]
    assert reads.starts.tolist() == [0, 0, 100]
    assert reads.stops.tolist() == [30, 30, 130]


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5), st.randoms())
def test_a_split_gives_every_record_once(objects: list[list[int]], random: st.randoms) -> None:  # type: ignore[valid-type]
    index = index_of(*objects)
    rows = [
        (n, i, row)
        for n, groups in enumerate(objects)
        for i, size in enumerate(groups)
        for row in range(size)
    ]
    numbers = [random.randrange(len(rows)) for _ in range(20)] if rows else []
    found: dict[int, tuple[int, int, int]] = {}
    groups = index.split(numbers)
    assert [wanted.group for wanted in groups] == sorted({wanted.group for wanted in groups})
    for wanted in groups:
        owner, within = int(index.owners[wanted.group]), index.place(wanted.group).within
        for position, offset in zip(wanted.positions.tolist(), wanted.offsets.tolist(), strict=True):
            found[position] = owner, within, offset
    assert [found[position] for position in range(len(numbers))] == [rows[number] for number in numbers]


@pytest.mark.parametrize("number", [-1, 5])
def test_a_record_that_does_not_exist_is_named(number: int) -> None:
    with pytest.raises(IndexError, match=f"no record {number}: they are numbered from 0 to 4"):
        index_of([5]).split([0, number])


def test_the_fingerprint_tells_sets_of_records_apart() -> None:
    assert index_of([5, 2]).fingerprint() == index_of([5, 2]).fingerprint()
    assert len({index_of(*o).fingerprint() for o in ([[5, 2]], [[2, 5]], [[5], [2]], [[5, 2], [1]])}) == 4


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 30))), st.integers(0, 20))
def test_coalesced_spans_hold_all_bytes_and_lie_apart(pairs: list[tuple[int, int]], gap: int) -> None:
    spans = [ByteRange(start, start + size) for start, size in pairs]
    found = coalesced(spans, gap)
    for span in spans:
        assert any(whole.start <= span.start and span.stop <= whole.stop for whole in found)
    for before, after in itertools.pairwise(found):
        assert before.stop + gap < after.start


def test_what_was_used_longest_ago_leaves_first() -> None:
    held: Held[str] = Held(100)
    held.put("a", "A", 40)
    held.put("b", "B", 40)
    assert held.get("a") == "A"
    held.put("c", "C", 40)
    assert ("a" in held, "b" in held, "c" in held) == (True, False, True)
    held.put("a", "A again", 10)
    assert held.held_bytes == 50
    held.put("huge", "H", 1000)
    assert len(held) == 1
    assert held.get("huge") == "H", "the newest stays, however large"


def _look(held: Held[str], answers: multiprocessing.Queue[object]) -> None:
    held._lock.locked()
    answers.put((held.get("a"), len(held)))


def test_a_fork_begins_with_nothing_even_while_the_lock_is_held() -> None:
    held: Held[str] = Held(100)
    held.put("a", "A", 1)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with held._lock:
        child = context.Process(target=_look, args=(held, answers))
        child.start()
        assert answers.get(timeout=30) == (None, 0)
        child.join(30)
    assert held.get("a") == "A"
    assert len(pickle.loads(pickle.dumps(held))) == 0
    assert pickle.loads(pickle.dumps(held)).limit_bytes == 100


def test_a_span_file_fetches_only_what_is_not_at_hand() -> None:
    data = os.urandom(100)
    fetched = []

    def fetch(start: int, stop: int) -> bytes:
        fetched.append((start, stop))
        return data[start:stop]

    file = SpanFile(100, [(10, data[10:30]), (50, data[50:60])], fetch)
    file.seek(12)
    assert file.read(8) == data[12:20]
    file.seek(-50, os.SEEK_END)
    assert bytes(file.read_buffer(10)) == data[50:60]
    assert fetched == []
    file.seek(25)
    assert file.read(10) == data[25:35]
    assert (fetched, file.tell()) == ([(25, 35)], 35)
    file.seek(95)
    assert file.read(10) == data[95:]
    assert file.read(10) == b""


def test_work_in_turn_keeps_order_and_runs_a_few_at_once() -> None:
    meeting = threading.Barrier(3)

    def work(item: int) -> int:
        meeting.wait(30)
        return -item

    assert list(in_turn(work, range(9), threads=3)) == [-i for i in range(9)]
    assert list(in_turn(lambda item: item, [1], threads=3)) == [1]


def test_work_in_turn_raises_what_the_work_raises() -> None:
    with pytest.raises(KeyError):
        list(in_turn(lambda item: {}[item], range(9)))


def test_groups_are_cut_into_requests() -> None:
    info = ObjectInfo("a", 10_000, "1")
    groups = [
        Group(1, [ByteRange(100 * n, 100 * n + size)]) for n, size in enumerate((10, 10, 10, 95, 0, 10))
    ]
    index = build_index([info], [Scanned(("x",), groups, (), {})])
    assert index.cut([], 4, 100) == []
    assert index.cut(range(6), 1, 100) == [[0, 1, 2], [3, 4], [5]]
    assert index.cut([5, 0, 1, 2], 2, 100) == [[5, 0], [1, 2]], "for several threads"
    assert index.cut(range(6), 1, 1000) == [[0, 1, 2, 3, 4, 5]]
    assert index.cut([3, 0], 4, 20) == [[3], [0]], "one that is larger"
    assert index.records == 6
