"""An epoch's records over a world that changes: none is lost, none is read twice but for what makes shares even."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.compat.horovod.sampler import ElasticSampler


def samplers(
    records: int, size: int, state: dict[str, Any] | None = None, **options: Any
) -> list[ElasticSampler]:
    """Those of all ranks of a world."""
    made = []
    for rank in range(size):
        sampler = ElasticSampler(range(records), **options)
        sampler.rank, sampler.num_replicas = rank, size
        if state is None:
            sampler.reset()
        else:
            sampler.load_state_dict(state)
        made.append(sampler)
    return made


def test_shares_are_even_and_make_up_the_epoch() -> None:
    ranks = samplers(10, 4)
    shares = [list(sampler) for sampler in ranks]
    assert [len(share) for share in shares] == [len(sampler) for sampler in ranks] == [3] * 4
    assert {record for share in shares for record in share} == set(range(10))
    assert shares[0] != [0, 4, 8], "shuffled"
    assert list(samplers(10, 4, shuffle=False)[1]) == [1, 5, 9]


@given(
    records=st.integers(0, 60),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6),
    batch_size=st.integers(1, 4),
)
def test_each_record_once_over_any_worlds(
    records: int, sizes: list[tuple[int, int, bool]], batch_size: int
) -> None:
    """Worlds of some sizes do some steps each; of some of them the last step is undone."""
    state: dict[str, Any] = {"epoch": 3, "processed_num": 0, "processed_indices": []}
    read: list[int] = []
    for size, steps, is_undone in sizes:
        ranks = samplers(records, size, state)
        for step in range(steps):
            batches = [sampler.get_indices(step, batch_size) for sampler in ranks]
            for sampler in ranks:
                sampler.record_batch(step, batch_size)
                sampler.record_batch(step, batch_size)  # to say so twice does no harm
            assert len({str(sampler.state_dict()) for sampler in ranks}) == 1, "all know the same"
            if not (is_undone and step == steps - 1):
                state = ranks[0].state_dict()
                read += [record for batch in batches for record in batch]
    rest = {record for sampler in samplers(records, 1, state) for record in sampler}
    assert set(read) | rest == set(range(records))
    assert not set(read) & rest


def test_the_epoch_under_way_goes_on_where_it_is() -> None:
    """Horovod's begins anew where `set_epoch` is called at the beginning of a loop."""
    (sampler,) = samplers(10, 1)
    sampler.record_batch(0, 4)
    sampler.set_epoch(0)
    assert len(sampler) == 6
    sampler.set_epoch(1)
    assert len(sampler) == 10
    first = list(sampler)
    sampler.set_epoch(2)
    assert list(sampler) != first


def test_a_script_that_counts_on_over_worlds() -> None:
    """It would lose records if its numbers were taken for places in what was divided anew."""
    first = samplers(100, 2)
    for batch in range(4):
        for sampler in first:
            sampler.record_batch(batch, 5)
    second = samplers(100, 3, first[0].state_dict())
    for sampler in second:
        sampler.record_batch(4, 5)
    assert second[0].state_dict()["processed_num"] == 4 * 5 * 2 + 5 * 3


def test_records_by_their_numbers() -> None:
    ranks = samplers(10, 2)
    done = [sampler.get_indices(0, 3) for sampler in ranks]
    for sampler, records in zip(ranks, done, strict=True):
        sampler.record_indices(records)
    every = {record for records in done for record in records}
    state = {**ranks[0].state_dict(), "processed_indices": sorted(every)}
    left = samplers(10, 3, state)
    assert {record for sampler in left for record in sampler} == set(range(10)) - every
    for sampler in left:
        sampler.record_batch(0, 1)
    assert len(left[0].state_dict()["processed_indices"]) == 9


@pytest.mark.parametrize("records", [0, 1])
def test_hardly_any_records(records: int) -> None:
    assert [len(list(sampler)) for sampler in samplers(records, 3)] == [records] * 3
