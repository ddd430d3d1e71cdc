"""How a dataset is cut: every record of every epoch in exactly one shard, in an order that never changes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.job.shard_requests import INTERVALS_MAX, NumberSet
from stoker.job.shard_split import Permutation, RangeSplitter, RecordOrder, StreamSplitter, check_dataset
from stoker.wire.shards import (
    DatasetSpec,
    RecordSplit,
    Shard,
    Split,
    StreamPartition,
    StreamSplit,
    TableSplit,
)


@given(st.integers(1, 3000), st.integers(-(2**62), 2**62), st.integers(0, 50))
@settings(max_examples=60)
def test_a_permutation_is_one(size: int, seed: int, stream: int) -> None:
    order = Permutation(size, seed=seed, stream=stream)
    assert sorted(order.at(position) for position in range(size)) == list(range(size))


def test_a_permutation_scatters_and_never_changes() -> None:
    order = Permutation(5000, seed=1, stream=0)
    values = [order.at(position) for position in range(5000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(values)) < 50
    assert values != [Permutation(5000, seed=1, stream=1).at(p) for p in range(5000)]
    assert values[:6] == [895, 3790, 3132, 3260, 2573, 3997]
    assert 0 <= Permutation(10**15, seed=3, stream=9).at(10**15 - 1) < 10**15
    with pytest.raises(ValueError, match="outside an order of 5000"):
        order.at(5000)


@pytest.mark.parametrize("size", [2, 5, 7, 12])
def test_small_permutations_favour_no_place(size: int) -> None:
    seeds = 2000
    firsts = Counter(Permutation(size, seed=seed, stream=0).at(0) for seed in range(seeds))
    even = seeds / size
    assert all(abs(count - even) < 5 * even**0.5 for count in firsts.values()), firsts
    assert len(firsts) == size


@given(
    st.integers(1, 400),
    st.integers(1, 50),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**40),
)
@settings(max_examples=80)
def test_every_record_of_every_epoch_is_in_one_shard(
    records: int, size: int, epochs: int, shuffle: bool, shuffle_records: bool, seed: int
) -> None:
    split = RecordSplit(records, size, epochs, shuffle, shuffle_records, seed)
    splitter = RangeSplitter(split)
    shards = [splitter.cut(number, 0) for number in range(splitter.total)]
    read = Counter((shard.epoch, record) for shard in shards for record in RecordOrder(shard, split))
    assert read == Counter((epoch, record) for epoch in range(epochs) for record in range(records))
    assert [shard.epoch for shard in shards] == sorted(shard.epoch for shard in shards)
    assert sum(shard.stop - shard.start < size for shard in shards) <= epochs
    assert splitter.is_over(splitter.total)
    assert not splitter.is_over(splitter.total - 1)


def test_a_shard_is_the_same_whenever_it_is_cut() -> None:
    split = RecordSplit(1000, 10, epochs=3, shuffle=True, seed=5)
    forward, backward = RangeSplitter(split), RangeSplitter(split)
    numbers = range(forward.total)
    assert {n: forward.cut(n, 0) for n in numbers} == {n: backward.cut(n, 0) for n in reversed(numbers)}


def test_the_order_within_a_shard_is_a_sequence() -> None:
    split = RecordSplit(1000, 100, shuffle_records=True)
    order = RecordOrder(Shard(3, 0, 300, 400), split)
    assert sorted(order) == list(range(300, 400)) != list(order)
    assert order[0] == next(iter(order))
    assert order[-1] == list(order)[-1]
    assert order[2:5] == list(order)[2:5]
    assert len(order) == 100
    with pytest.raises(IndexError):
        order[100]
    assert list(order) != list(RecordOrder(Shard(13, 1, 300, 400), split)), "another epoch, another order"


def test_table_keys_may_be_negative() -> None:
    splitter = RangeSplitter(TableSplit("id", low=-7, high=10, shard_size=5))
    cuts = [splitter.cut(number, 0) for number in range(splitter.total)]
    assert [(cut.start, cut.stop) for cut in cuts] == [(-7, -2), (-2, 3), (3, 8), (8, 10)]


def test_partitions_of_a_stream_take_turns() -> None:
    stream = StreamSplitter(StreamSplit(10))
    assert stream.is_dry(0)
    stream.add("a", 100, 125)
    stream.add("b", -1, 5)
    stream.add("a", 110, 126)
    cuts = [stream.cut(number, 0) for number in range(4)]
    assert [(c.partition, c.start, c.stop) for c in cuts] == [
        ("a", 100, 110),
        ("b", 0, 5),
        ("a", 110, 120),
        ("a", 120, 126),
    ]
    assert stream.is_dry(4)
    assert not stream.is_over(4)
    assert stream.add("a", -1, 120) is None, "what is known already is no news"
    stream.ended = True
    assert stream.is_over(4)
    assert stream.add("a", 0, 126) is None
    with pytest.raises(ConfigError, match="after the end of the stream"):
        stream.add("a", -1, 127)


@pytest.mark.parametrize(
    ("partition", "start", "stop", "why"),
    [
        ("a", 11, 20, "leave a gap"),
        ("b", 5, 3, "cannot be"),
        ("c" * 300, 0, 1, "cannot be"),
        ("a", -1, 2**62, "cannot"),
    ],
)
def test_records_that_cannot_be_are_refused(partition: str, start: int, stop: int, why: str) -> None:
    stream = StreamSplitter(StreamSplit(10))
    stream.add("a", 0, 10)
    with pytest.raises(ConfigError, match=why):
        stream.add(partition, start, stop)
    assert list(stream.partitions) == ["a"]
    assert stream.left(0) == 1


def test_a_stream_that_is_put_back_forgets_no_records() -> None:
    stream = StreamSplitter(StreamSplit(4))
    stream.add("old", 2, 10)
    saved = list(stream.partitions.values())
    stream.cut(0, 0)
    stream.add("old", -1, 12)
    stream.add("new", 7, 9)
    stream.cut(1, 0)
    stream.rewind([*saved, StreamPartition("gone", 0, 8, 8)])
    assert stream.partitions == {
        "old": StreamPartition("old", 2, 12, 2),
        "new": StreamPartition("new", 7, 9, 7),
        "gone": StreamPartition("gone", 0, 8, 8),
    }


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (RecordSplit(0, 1), "records=0 cannot be"),
        (RecordSplit(10, 0), "shard_size=0 cannot be"),
        (RecordSplit(10, 1, epochs=0), "epochs=0 cannot be"),
        (RecordSplit(2**61, 1, epochs=2**10), "too many shards"),
        (TableSplit("id", 5, 5, 1), r"keys \[5, 5\) cannot be"),
        (TableSplit("", 0, 5, 1), "is no name"),
        (StreamSplit(-1), "shard_size=-1 cannot be"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(split: Split, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_dataset("train", DatasetSpec(split, 10.0))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_cannot_be_are_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="lease_timeout_s="):
        check_dataset("train", DatasetSpec(RecordSplit(1, 1), timeout_s))


def test_a_dataset_has_a_name_that_is_safe_in_keys() -> None:
    for name in ("@worker", "a/b", "", "Train"):
        with pytest.raises(ConfigError, match="is not a dataset name"):
            check_dataset(name, DatasetSpec(RecordSplit(1, 1), 1.0))


@given(st.lists(st.integers(0, 60), max_size=80))
def test_a_set_of_numbers_is_one(numbers: list[int]) -> None:
    held = NumberSet()
    for number in numbers:
        held.add(number)
    assert {number for number in range(-2, 64) if number in held} == set(numbers)
    assert len(held) == sum(number - 1 not in numbers for number in set(numbers))
    assert NumberSet(held.intervals()).intervals() == held.intervals()


@given(st.sets(st.integers(0, 300), max_size=150), st.sets(st.integers(0, 300), max_size=5))
def test_a_set_that_shrinks_keeps_its_own_and_leaves_out_what_it_must(own: set[int], out: set[int]) -> None:
    held = NumberSet()
    for number in own - out:
        held.add(number)
    held.shrink(out)
    assert all(number in held for number in own - out)
    assert not any(number in held for number in out)
    assert len(held) <= INTERVALS_MAX + len(out) + 1
