"""Who reads what: every record of an epoch exactly once, whatever the worlds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.order import GlobalOrder, share_of


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 50))
@settings(max_examples=60)
def test_an_epoch_is_a_permutation(records: int, seed: int, epoch: int) -> None:
    order = GlobalOrder(records, seed=seed, epoch=epoch).at(0, records)
    assert sorted(order.tolist()) == list(range(records))


def test_the_order_never_changes() -> None:
    assert GlobalOrder(100, seed=3, epoch=1).at(0, 6).tolist() == [16, 38, 15, 55, 20, 49]


def test_any_window_is_the_same_as_the_whole() -> None:
    order = GlobalOrder(1000, seed=1, epoch=0)
    whole = order.at(0, 1000)
    assert np.array_equal(np.concatenate([order.at(0, 300), order.at(300, 999), order.at(999, 1000)]), whole)


def test_epochs_and_seeds_differ_and_shuffling_scatters() -> None:
    first = GlobalOrder(5000, seed=1, epoch=0).at(0, 5000)
    assert not np.array_equal(first, GlobalOrder(5000, seed=1, epoch=1).at(0, 5000))
    assert not np.array_equal(first, GlobalOrder(5000, seed=2, epoch=0).at(0, 5000))
    neighbours = np.abs(np.diff(first)) == 1
    assert neighbours.mean() < 0.01
    assert abs(np.corrcoef(first, np.arange(5000))[0, 1]) < 0.05
    assert GlobalOrder(5, seed=1, epoch=0, shuffle=False).at(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_positions_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="outside an epoch of 10 records"):
        GlobalOrder(10, seed=0, epoch=0).at(5, 11)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        share_of(2, 2, 0, 4, 10)


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=40),
)
def test_changing_worlds_read_each_record_once(
    records: int, batch: int, worlds: list[tuple[int, int]]
) -> None:
    """Worlds of varying size take varying numbers of steps; the last one finishes the epoch."""
    order = GlobalOrder(records, seed=9, epoch=2)
    read: list[int] = []
    cursor = 0
    plan = [size for size, steps in worlds for _ in range(steps)]
    while cursor < records:
        size = plan.pop(0) if plan else 3
        shares = [share_of(rank, size, cursor, batch, records) for rank in range(size)]
        for share in shares:
            read += order.at(share.start, share.stop).tolist()
        counts = [share.records for share in shares]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == shares[0].batch_records
        cursor += shares[0].batch_records
    assert sorted(read) == list(range(records))
