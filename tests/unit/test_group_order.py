"""The order of groups: each record once, few groups at a time, and few of them on each rank."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data import group_order, loader_plan
from stoker.data.coming_reads import ComingRecords
from stoker.data.group_order import GroupOrder, groups_of
from stoker.data.loader_plan import Pass, Plan, Shares
from stoker.data.order import I64, scattered, seeds_of
from stoker.errors import ConfigError

SIZES = st.lists(st.integers(0, 40), max_size=30)
WINDOWS = st.one_of(st.integers(1, 8), st.integers(1, 60))


def firsts_of(sizes: list[int]) -> I64:
    return np.cumsum([0, *sizes], dtype=np.int64)[:-1] if sizes else np.empty(0, np.int64)


def order_of(sizes: list[int], window: int, seed: int = 5, epoch: int = 0) -> GroupOrder:
    return GroupOrder(firsts_of(sizes), sum(sizes), seed=seed, epoch=epoch, window=window)


def groups_at(order: GroupOrder, sizes: list[int]) -> I64:
    """Whose record is at each position."""
    return np.searchsorted(firsts_of(sizes), order.at(0, order.records), side="right") - 1


@given(SIZES, WINDOWS, st.integers(0, 2**63), st.integers(0, 50))
def test_an_epoch_is_a_permutation(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = order_of(sizes, window, seed, epoch)
    assert sorted(order.at(0, sum(sizes)).tolist()) == list(range(sum(sizes)))


@given(SIZES, WINDOWS, st.randoms(use_true_random=False))
def test_positions_can_be_asked_for_in_any_order(sizes: list[int], window: int, random: st.randoms) -> None:  # type: ignore[valid-type]
    order = order_of(sizes, window)
    whole = order.at(0, sum(sizes))
    positions = np.array(random.choices(range(len(whole)), k=50) if len(whole) else [], np.uint64)
    assert np.array_equal(order.of(positions), whole[positions.astype(int)])


def test_many_positions_are_worked_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1 + number % 7 for number in range(300)]
    whole = order_of(sizes, 16).at(0, sum(sizes))
    monkeypatch.setattr(group_order, "_PLACES_AT_ONCE", 40)
    assert np.array_equal(order_of(sizes, 16).at(0, sum(sizes)), whole)


def test_the_order_never_changes() -> None:
    assert order_of([10] * 12, 3, seed=3, epoch=1).at(0, 8).tolist() == [102, 16, 56, 103, 100, 107, 19, 50]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 9))
def test_no_more_groups_are_in_use_than_are_mixed(sizes: list[int], window: int) -> None:
    groups = groups_at(order_of(sizes, window), sizes)
    used = [np.flatnonzero(groups == group) for group in range(len(sizes))]
    begins = np.array([positions[0] for positions in used])
    ends = np.array([positions[-1] for positions in used])
    # In the first and the last ticks, and within one tick, one may come before another has ended.
    for position in range(sum(sizes)):
        assert ((begins <= position) & (ends >= position)).sum() <= window + 1


def test_a_window_of_one_reads_group_after_group_and_one_of_all_mixes_all() -> None:
    sizes = [7, 1, 20, 3, 0, 11]
    groups = groups_at(order_of(sizes, 1), sizes)
    assert (np.diff(groups) != 0).sum() == 4
    assert order_of(sizes, 1).at(0, 42).tolist() != order_of(sizes, 1, epoch=1).at(0, 42).tolist()
    assert np.array_equal(order_of(sizes, 5).at(0, 42), order_of(sizes, 10**12).at(0, 42))
    many = [50] * 40
    mixed = groups_at(order_of(many, 40), many)
    assert len(set(mixed[:100].tolist())) > 30


@pytest.mark.parametrize("window", [2, 8, 32])
def test_records_are_scattered_over_their_window(window: int) -> None:
    """Also within their group: its first rows do not come first."""
    sizes = [200] * 100
    order = order_of(sizes, window)
    records = order.at(0, 20_000)
    groups, rows = records // 200, records % 200
    places = np.array([np.flatnonzero(groups == group).mean() for group in range(100)])
    middles = np.sort(places)[window:-window]
    assert np.abs(np.diff(middles) - 200).mean() < 60, "one group begins with each that ends"
    spread = np.median([np.ptp(np.flatnonzero(groups == group)) for group in range(100)])
    assert 0.9 * 200 * window < spread < 1.1 * 200 * (window + 1)
    assert abs(np.corrcoef(rows, np.arange(20_000) - places[groups])[0, 1]) < 0.03
    batch = [len(set(groups[first : first + 64].tolist())) for first in range(0, 20_000 - 64, 64)]
    assert min(batch) > min(window, 32) * 0.55, "from the first to the last"


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), min_size=1, max_size=60))
def test_each_value_is_scattered_in_a_permutation_of_its_own(domains: list[tuple[int, int]]) -> None:
    sizes = np.array([size for size, _ in domains for _ in range(size)])
    values = np.array([value for size, _ in domains for value in range(size)], np.uint64)
    numbers = np.array([number for size, number in domains for _ in range(size)], np.uint64)
    found = scattered(values, sizes, seeds_of(1, 2, numbers)).tolist()
    at = 0
    for size, _ in domains:
        assert sorted(found[at : at + size]) == list(range(size))
        at += size


# -- who reads what ----------------------------------------------------------------------------------------------------


def passes(sizes: list[int], window: int, cursor: int, batch: int, world: int) -> list[Plan]:
    of = Pass(1, sum(sizes), 3, 2, True, cursor, batch, 0, world, window)
    return [Plan(of._replace(rank=rank), firsts_of(sizes)) for rank in range(world)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    window=WINDOWS,
    batch=st.integers(1, 50),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6),
)
def test_changing_worlds_read_each_record_once_and_the_same_batches(
    sizes: list[int], window: int, batch: int, worlds: list[tuple[int, int]]
) -> None:
    """Each world does so many steps of the epoch; the last one does the rest."""
    whole = GroupOrder(firsts_of(sizes), sum(sizes), seed=3, epoch=2, window=window).at(0, sum(sizes))
    read: Counter[int] = Counter()
    cursor = 0
    for turn, (world, steps) in enumerate(worlds):
        plans = passes(sizes, window, cursor, batch, world)
        todo = plans[0].steps if turn == len(worlds) - 1 else min(steps, plans[0].steps)
        for step in range(todo):
            shares = [plan.records(step)[: plan.share(step).records] for plan in plans]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            expected = whole[cursor : cursor + batch].tolist()
            assert sorted(chain(*shares)) == sorted(expected)
            assert all(set(plan.records(step)) <= set(expected) for plan in plans)
            assert all(plan.records(step) for plan in plans)
            read.update(list(chain(*shares)))
            cursor += plans[0].share(step).batch_records
    assert read == Counter(range(sum(sizes)))


def test_a_group_is_read_by_few_ranks() -> None:
    """Those that a boundary between two ranks may fall into are read by both."""
    sizes, world, window = [500] * 200, 4, 16
    plans = passes(sizes, window, 0, 128, world)
    readers = [
        {record // 500 for step in range(plan.steps) for record in plan.records(step)} for plan in plans
    ]
    per_group = sum(map(len, readers)) / len(sizes)
    assert per_group < 2, "4 where batches are divided as they come"
    for plan in plans:
        assert len({record // 500 for record in plan.records(plan.steps // 2)}) <= window / world + 3


def test_a_share_keeps_the_order_in_which_its_records_come() -> None:
    """So that each part of it has records of all its groups."""
    sizes = [100] * 20
    order = order_of(sizes, 8)
    places = {record: place for place, record in enumerate(order.at(0, 2000).tolist())}
    of = Pass(1, 2000, 5, 0, True, 0, 64, 1, 3, 8)
    plan = Plan(of, firsts_of(sizes))
    for step in range(plan.steps):
        at = [places[record] for record in plan.records(step)]
        assert at == sorted(at)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("looked_at", [1, 100, 1 << 18])
def test_what_is_announced_is_what_is_read(
    world: int, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_plan, "LOOKED_AT", looked_at)
    monkeypatch.setattr("stoker.data.coming_reads.LOOKED_AT", looked_at)
    sizes = [30] * 21
    for rank in range(world):
        of = Pass(1, 630, 5, 0, True, 100, 16, rank, world, 4)
        coming = ComingRecords(of, firsts_of(sizes))
        coming.add()
        expected: list[int] = []
        for each in (of, of._replace(epoch=1, cursor=0)):
            plan = Plan(each, firsts_of(sizes))
            expected += [r for s in range(plan.steps) for r in plan.records(s)[: plan.share(s).records]]
        found: list[int] = []
        while len(found) < coming.stop:
            found += coming.chunk(len(found), 37).records.tolist()
        assert found == expected


def test_a_pass_of_groups_needs_them() -> None:
    with pytest.raises(ValueError, match="needs them"):
        Shares(Pass(1, 10, 0, 0, True, 0, 2, 0, 1, 4)).records(np.arange(3))


# -- what a dataset says of its groups ---------------------------------------------------------------------------------


class Grouped:
    def __init__(self, records: int, firsts: list[int]) -> None:
        self.records, self.firsts = records, firsts

    def __len__(self) -> int:
        return self.records

    def groups(self) -> list[int]:
        return self.firsts


def test_a_dataset_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"list has no groups\(\): shuffle=True shuffles all records"):
        groups_of([1, 2])
    assert groups_of(Grouped(5, [0, 3, 3, 5])).tolist() == [0, 3, 3, 5]
    for wrong in ([], [1], [0, 3, 2], [0, 6]):
        with pytest.raises(ConfigError, match=r"ascending from 0 to at most 5"):
            groups_of(Grouped(5, wrong))
