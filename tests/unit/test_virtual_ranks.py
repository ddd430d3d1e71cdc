"""Global batches that are divided over virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.data.coming_reads import ComingRecords
from stoker.data.loader_batch import aligned
from stoker.data.loader_plan import Pass, Plan
from stoker.data.session import session
from stoker.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    yield
    session().virtual_ranks, session().micro_batch = 0, None


def pass_of(rank: int, world_size: int, virtual_ranks: int, window: int = 0) -> Pass:
    return Pass(1, 97, 3, 0, True, 10, 13, rank, world_size, window, virtual_ranks)


@given(st.integers(1, 9), st.data(), st.sampled_from([0, 2]))
def test_each_virtual_rank_reads_the_same_in_every_world(
    count: int, data: st.DataObject, window: int
) -> None:
    world_size = data.draw(st.integers(1, count))
    groups = np.arange(0, 97, 10, dtype=np.int64) if window else None
    read: dict[tuple[int, int], tuple[list[int], int]] = {}
    for rank in range(world_size):
        plan = Plan(pass_of(rank, world_size, count, window), groups)
        for step in range(plan.steps):
            number, of = plan.part(step)
            assert of == count
            read[plan.start(step), number] = plan.records(step), plan.random_seed(step)
            assert plan.ends_batch(step) == (step % plan.parts == plan.parts - 1)
    alone = {}
    for number in range(count):
        plan = Plan(pass_of(number, count, 0, window), groups)
        for step in range(plan.steps):
            alone[plan.start(step), number] = plan.records(step), plan.random_seed(step)
    assert read == alone


@given(st.integers(1, 9), st.data(), st.sampled_from([0, 2]))
def test_what_is_announced_is_what_is_read(count: int, data: st.DataObject, window: int) -> None:
    world_size = data.draw(st.integers(1, count))
    rank = data.draw(st.integers(0, world_size - 1))
    groups = np.arange(0, 97, 10, dtype=np.int64) if window else None
    of = pass_of(rank, world_size, count, window)
    plan, coming = Plan(of, groups), ComingRecords(of, groups)
    read = [record for step in range(plan.steps) if plan.share(step).records for record in plan.records(step)]
    announced: list[int] = []
    while len(announced) < coming.stop:
        announced += coming.chunk(len(announced), 7).records.tolist()
    assert announced == read
    assert coming.read_by(plan.batches(plan.steps)) == len(read)
    assert coming.read_by(0) == 0


class Numbers:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, record: int) -> torch.Tensor:
        return torch.tensor([record, int(torch.randint(0, 1 << 30, ()))])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_yields_micro_batches_and_counts_whole_batches(num_workers: int) -> None:
    with stoker.Loader(Numbers(), global_batch_size=4, virtual_ranks=3, num_workers=num_workers) as loader:
        assert len(loader) == 9
        assert loader.batch_size == 2
        seen, cursors, draws, numbers = [], [], [], []
        for batch in loader:
            micro_batch = session().micro_batch
            assert micro_batch is not None
            numbers.append((micro_batch.number, micro_batch.is_first, micro_batch.is_last))
            seen.append(batch[:, 0].tolist())
            draws += batch[:, 1].tolist()
            draws.append(int(torch.randint(0, 1 << 30, ())))
            cursors.append(loader.cursor)
        assert seen[:6] == [[0], [1], [2, 3], [4], [5], [6, 7]]
        assert seen[6:] == [[8], [8], [9]], "one of two records keeps a third virtual rank in step"
        assert numbers[:3] == [(0, True, False), (1, False, False), (2, False, True)]
        assert cursors == [4, 4, 4, 8, 8, 8, 10, 10, 10], (
            "all ranks go on from the same, wherever a loop is left"
        )
        assert loader.epoch == 1
    assert draws == expected_draws(), "what is drawn depends on the records, not on who reads them"


def expected_draws() -> list[int]:
    with stoker.Loader(Numbers(), global_batch_size=4, virtual_ranks=3) as loader:
        torch.manual_seed(99)
        found = []
        for batch in loader:
            found += batch[:, 1].tolist()
            found.append(int(torch.randint(0, 1 << 30, ())))
        return found


def test_loaders_agree_on_the_number() -> None:
    stoker.Loader(Numbers(), global_batch_size=4, virtual_ranks=3)
    stoker.Loader(Numbers(), global_batch_size=4)
    with pytest.raises(ConfigError, match="virtual_ranks=2, but another loader of this script has 3"):
        stoker.Loader(Numbers(), global_batch_size=4, virtual_ranks=2)
    with pytest.raises(ConfigError, match="virtual_ranks must be a whole number of at least 1, got 0"):
        stoker.Loader(Numbers(), global_batch_size=4, virtual_ranks=0)


def test_batches_begin_at_cache_lines() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    at = 64 - memory.data_ptr() % 64
    good, bad = memory[at : at + 8], memory[at + 4 : at + 12]
    found = aligned({"a": [good, bad], "b": (bad, "text")})
    assert found["a"][0] is good
    assert found["a"][1] is not bad
    assert found["b"][0].data_ptr() % 64 == 0
    assert found["b"][1] == "text"
