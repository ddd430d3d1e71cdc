"""`stoker.Loader`: what is read, by how many processes and how they are started, and how it is taken up again."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loader import Loader
from stoker.data.loader_plan import Pass, Plan
from stoker.data.session import session
from stoker.errors import BadRecord, ConfigError, LoaderWorkerLost
from tests.unit.loader_data import Failing, Random, Rows, Slow, as_list

pytestmark = [
    pytest.mark.usefixtures("fresh_process"),
    pytest.mark.timeout(120),
    # From Python 3.12 on, to fork beside threads is warned of.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
WAYS = [(0, None), (1, "fork"), (3, "fork"), (16, "fork"), (2, "spawn"), (2, "forkserver")]


def numbers(batch: Any) -> list[int]:
    """The records of a batch, whose rows are what they should be."""
    rows, labels = batch
    assert bool((rows == labels[:, None]).all())
    return labels.tolist()


@pytest.fixture
def loaders() -> Iterator[list[Loader]]:
    """Those that are put here are closed in the end."""
    made: list[Loader] = []
    yield made
    for loader in made:
        loader.close()


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_batches_are_the_same_however_they_are_read(workers: int, method: str | None) -> None:
    expected = [numbers(batch) for batch in Loader(Rows(50), global_batch_size=7, shuffle=True, seed=4)]
    with Loader(
        Rows(50),
        global_batch_size=7,
        shuffle=True,
        seed=4,
        num_workers=workers,
        multiprocessing_context=method,
    ) as loader:
        first = [numbers(batch) for batch in loader]
        second = [numbers(batch) for batch in loader]
    assert first == expected
    assert second != first
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(50))


@given(
    records=st.integers(1, 200),
    batch=st.integers(1, 30),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_plans_of_changing_worlds_read_every_record_once(
    records: int, batch: int, worlds: list[tuple[int, int]], seed: int
) -> None:
    """Each world does so many steps of the epoch; the last one does the rest."""
    read: Counter[int] = Counter()
    cursor = 0
    for turn, (world, steps) in enumerate(worlds):
        plans = [
            Plan(Pass(turn, records, seed, 0, True, cursor, batch, rank, world)) for rank in range(world)
        ]
        todo = plans[0].steps if turn == len(worlds) - 1 else min(steps, plans[0].steps)
        for step in range(todo):
            for plan in plans:
                if plan.share(step).records:
                    read.update(plan.records(step))
            cursor += plans[0].share(step).batch_records
    assert read == Counter(range(records))


@pytest.mark.parametrize(("before", "after"), [((0, 1), (2, 3)), ((3, 2), (0, 1)), ((2, 3), (16, 2))])
def test_an_epoch_goes_on_at_another_world_size_and_worker_count(
    before: tuple[int, int], after: tuple[int, int], loaders: list[Loader]
) -> None:
    read: Counter[int] = Counter()
    live = session()
    positions = []
    for (workers, world_size), stop in ((before, 3), (after, None)):
        live.world_size = world_size
        for rank in range(world_size):
            live.rank = rank
            loader = Loader(Rows(60), global_batch_size=7, shuffle=True, num_workers=workers)
            loaders.append(loader)
            if stop is None:
                loader.load_state_dict(positions[0])
            for step, batch in enumerate(loader):
                assert live.share is not None
                read.update(numbers(batch)[: live.share.records])
                if step + 1 == stop:
                    positions.append(loader.state_dict())
                    break
    assert read == Counter(range(60))
    assert len({str(position) for position in positions}) == 1


def test_processes_draw_the_same_random_numbers_however_many_they_are(loaders: list[Loader]) -> None:
    drawn = []
    for workers, stop in ((1, 0), (3, 0), (2, 4)):
        loader = Loader(Random(40), global_batch_size=4, num_workers=workers, seed=3)
        loaders.append(loader)
        found = []
        for step, batch in enumerate(loader):
            found.append([part.tolist() for part in batch])
            if step + 1 == stop:
                break
        found += [[part.tolist() for part in batch] for batch in loader] if stop else []
        drawn.append(found)
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({str(batch) for batch in drawn[0]}) == 10
    mine = random.random(), torch.rand(1).item()
    assert mine != (random.random(), torch.rand(1).item())


def test_a_loop_that_is_left_goes_on_where_it_was(loaders: list[Loader]) -> None:
    loader = Loader(Rows(30), global_batch_size=4, num_workers=2)
    loaders.append(loader)
    read: list[int] = []
    for _ in range(8):
        for batch in loader:
            read += numbers(batch)
            break
    assert read == list(range(30))
    assert (loader.epoch, loader.cursor) == (0, 30)
    assert len(list(loader)) == 8
    assert (loader.epoch, loader.cursor) == (2, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_begins_anew_where_no_position_is_kept(workers: int, loaders: list[Loader]) -> None:
    """As validation does, of which frameworks have run a few steps before the first training step."""
    loader = Loader(Rows(30), global_batch_size=4, shuffle=True, num_workers=workers, keep_position=False)
    loaders.append(loader)
    first = [numbers(next(iter(loader))) for _ in range(3)]
    assert first == [first[0]] * 3
    loader.set_epoch(0)
    assert sorted(chain(*map(numbers, loader))) == list(range(30))
    loader.load_state_dict(loader.state_dict() | {"epoch": 5, "cursor": 30})
    assert len(list(loader)) == 8
    assert (loader.epoch, loader.cursor) == (6, 0)


def test_two_loaders_and_a_change_of_workers_in_the_middle(loaders: list[Loader]) -> None:
    one = Loader(Rows(40), global_batch_size=3, shuffle=True, num_workers=2)
    other = Loader(Rows(40), global_batch_size=3, num_workers=1)
    loaders += [one, other]
    read: list[int] = []
    for step, (first, second) in enumerate(zip(one, other, strict=True)):
        read += numbers(first)
        assert numbers(second)[0] == 3 * step
        if step == 4:
            one.retune(num_workers=0)
        if step == 7:
            one.retune(num_workers=3)
    assert sorted(read) == list(range(40))
    assert one.num_workers == one.stats.num_workers == 3


def test_two_loops_at_once_are_refused(loaders: list[Loader]) -> None:
    loader = Loader(Rows(40), global_batch_size=3, num_workers=1)
    loaders.append(loader)
    batches = iter(loader)
    next(batches)
    next(iter(loader))
    with pytest.raises(ConfigError, match="iterated twice"):
        next(batches)


def test_a_loop_that_counts_its_batches_goes_on_to_the_next_epoch() -> None:
    """As frameworks loop: they do not ask for a batch after the last."""
    loader = Loader(Rows(12), global_batch_size=4, shuffle=True)
    for epoch in range(3):
        batches = iter(loader)
        read = [number for _ in range(len(loader)) for number in numbers(next(batches))]
        assert sorted(read) == list(range(12))
        assert (loader.epoch, loader.cursor) == (epoch, 12)
    at_end = loader.state_dict()
    loader.load_state_dict(at_end)
    assert list(loader) == []
    loader.load_state_dict(at_end)
    loader.sampler.set_epoch(3)
    assert len(list(loader)) == 3


def test_an_epoch_that_is_set_keeps_the_position_in_it() -> None:
    loader = Loader(Rows(12), global_batch_size=4)
    numbers(next(iter(loader)))
    loader.set_epoch(0)
    assert [numbers(batch)[0] for batch in loader] == [4, 8]
    loader.set_epoch(7)
    assert [numbers(batch)[0] for batch in loader] == [0, 4, 8]
    assert (loader.epoch, loader.cursor) == (8, 0)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", KeyError, "no such thing"),
        ("strange", RuntimeError, "TwoArguments: 1 and 2"),
        ("unpicklable", RuntimeError, "cannot be sent from a loader process"),
        ("exit", LoaderWorkerLost, r"DataLoader worker \(pid \d+\) exited unexpectedly with code 7"),
        ("kill", LoaderWorkerLost, r"DataLoader worker \(pid \d+\) is killed by signal: Killed"),
    ],
)
def test_what_fails_in_a_process_is_told(
    how: str, kind: type[Exception], words: str, loaders: list[Loader]
) -> None:
    method = "spawn" if how == "kill" else None
    loader = Loader(
        Failing(8, how),
        global_batch_size=1,
        num_workers=2,
        collate_fn=as_list,
        multiprocessing_context=method,
    )
    loaders.append(loader)
    read: list[int] = []
    with pytest.raises(kind, match=words) as told:
        read.extend(int(value) for (value,) in loader)
    if how == "raise":
        assert any("in __getitem__" in note for note in told.value.__notes__)
    assert read == list(range(len(read)))
    assert loader.cursor == len(read) <= 5


def test_a_loader_starts_new_processes_after_one_was_killed(tmp_path: Path, loaders: list[Loader]) -> None:
    loader = Loader(KilledOnce(tmp_path / "was"), global_batch_size=1, num_workers=2)
    loaders.append(loader)
    read: list[int] = []
    with pytest.raises(LoaderWorkerLost):
        read += [int(value) for value in loader]
    read = list(range(loader.cursor))
    read += [int(value) for value in loader]
    assert read == list(range(12))


class KilledOnce(Rows):
    def __init__(self, mark: Path) -> None:
        super().__init__(12)
        self.mark = mark

    def __getitem__(self, record: int) -> Any:
        if record == 6 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), 9)
        return record


def test_a_process_that_is_idle_and_killed(loaders: list[Loader]) -> None:
    loader = Loader(Rows(4), global_batch_size=4, num_workers=1)
    loaders.append(loader)
    list(loader)
    (worker,) = loader._source._crew._workers  # type: ignore[attr-defined]
    os.kill(worker.process.pid, 9)
    worker.process.join()
    with pytest.raises(LoaderWorkerLost, match="is killed by signal"):
        list(loader)
    assert numbers(next(iter(loader))) == [0, 1, 2, 3]


def test_a_step_without_a_record_that_can_be_used() -> None:
    class Bad(Rows):
        def __getitems__(self, records: list[int]) -> list[Any]:
            return [self[record] for record in records if record > 3]

    loader = Loader(Bad(8), global_batch_size=4)
    with pytest.raises(BadRecord, match="none of the 4 records"):
        next(iter(loader))


# -- processes come and go -------------------------------------------------------------------------------------------


def children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


def test_processes_end_with_their_loader() -> None:
    gc.collect()
    before = children()
    loader = Loader(Slow(100, 0.01), global_batch_size=2, num_workers=3)
    batches = iter(loader)
    next(batches)
    assert len(children() - before) == 3
    del loader, batches
    gc.collect()
    assert children() <= before


def test_descriptors_are_given_back() -> None:
    def run() -> int:
        with Loader(Rows(20), global_batch_size=4, num_workers=2) as loader:
            kept = list(loader)
        assert [numbers(batch)[0] for batch in kept] == [0, 4, 8, 12, 16]
        return len(os.listdir("/proc/self/fd"))

    assert run() == run() == run()


def test_a_forked_child_reads_by_processes_of_its_own(loaders: list[Loader]) -> None:
    loader = Loader(Rows(20), global_batch_size=4, num_workers=2)
    loaders.append(loader)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            read = [number for batch in loader for number in numbers(batch)]
            loader.close()
            code = 0 if read == list(range(4, 20)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [numbers(batch)[0] for batch in batches] == [4, 8, 12, 16]


# -- without the runtime -------------------------------------------------------------------------------------------


def test_the_world_is_torch_distributeds_where_there_is_no_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    loader = Loader(Rows(9), global_batch_size=4)
    assert loader.batch_size == 4
    sampler = loader.batch_sampler
    assert sampler.batch_size == 4
    for attempt in (list, len):
        with pytest.raises(ConfigError, match="ignore_data_skip=True"):
            attempt(sampler)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    assert (len(loader), loader.batch_size) == (3, 2)
    assert [numbers(batch) for batch in loader] == [[2, 3], [6, 7], [8]]
    session().on_batch = lambda batch: None  # a runtime is there, which knows better
    assert numbers(next(iter(loader))) == [0, 1, 2, 3]
