"""Auto-tune over real DataLoaders, tensors and process groups."""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from stoker.errors import ConfigError
from stoker.train.tuner import Bounds, Decision, Setting, Tuner
from stoker.train.tuning import Alone, GroupExchange, Tuning
from stoker.train.tuning_batches import micro_batches

CPU = torch.device("cpu")
BATCH = 4


class SlowToDecode(Dataset[int]):
    """Records that take their time, without needing a core for it."""

    def __init__(self, decode_s: float) -> None:
        self.decode_s = decode_s

    def __getitem__(self, record: int) -> int:
        time.sleep(self.decode_s)
        return record


class TunableLoader:
    """A position and a DataLoader that may be replaced at any batch, as tuning needs it."""

    def __init__(self, dataset: SlowToDecode) -> None:
        self.dataset = dataset
        self.cursor = 0
        self.num_workers = 0
        self.tuning: Tuning | None = None

    def retune(self, *, num_workers: int) -> None:
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            records = list(range(self.cursor, self.cursor + 10_000))
            source = DataLoader(self.dataset, sampler=records, batch_size=BATCH, num_workers=self.num_workers)
            batches = iter(source)
            while source.num_workers == self.num_workers:
                began = time.perf_counter()
                batch = next(batches)
                if self.tuning is not None:
                    self.tuning.waited(time.perf_counter() - began)
                self.cursor += BATCH
                yield batch


@pytest.mark.real
def test_loader_workers_are_added_in_mid_epoch_and_no_record_is_lost_or_read_twice() -> None:
    loader = TunableLoader(SlowToDecode(decode_s=0.01))
    said: list[Decision] = []
    tuning = Tuning(Tuner(Setting(0), Bounds(max_workers=2)), loader, CPU, say=said.append)
    loader.tuning = tuning
    tuning.enter(Alone())
    seen: list[int] = []
    for batch in loader:
        seen += batch.tolist()
        time.sleep(0.01)
        tuning.commit(BATCH)
        if said[-1].done:
            break
    assert seen == list(range(len(seen)))
    assert (tuning.setting, loader.num_workers) == (Setting(2), 2)
    assert [d.why.split(":")[0] for d in said] == [
        "measuring 0 loader workers",
        "trying loader workers 0 → 2",
        "loader workers 0 → 2",
    ]


def test_a_pass_that_runs_out_of_memory_is_undone_and_the_next_world_knows() -> None:
    loader = TunableLoader(SlowToDecode(0))
    said: list[Decision] = []
    tuning = Tuning(Tuner(Setting(0, micro_batch=8), Bounds(max_workers=0)), loader, CPU, say=said.append)
    tuning.enter(Alone())
    undone = 0
    while not said[-1].done:
        try:
            if tuning.setting.micro_batch > 8:
                torch.empty(1 << 60)
        except RuntimeError as error:
            undone += tuning.failed(error)
            tuning.enter(Alone())
        else:
            tuning.commit(64)
    assert (undone, tuning.setting) == (1, Setting(0, 8))
    assert [d.why for d in said] == [
        "measuring 0 loader workers, micro-batch 8",
        "trying micro-batch 8 → 16: now 8 passes make a step",
        "micro-batch 8 → 16 taken back: out of memory; not tried again",
        "measuring 0 loader workers, micro-batch 8",
        "micro-batch stays at 8: 16 ran out of memory",
    ]


def test_other_errors_and_errors_without_a_trial_are_the_scripts_own() -> None:
    tuning = Tuning(Tuner(Setting(0, 8), Bounds(0)), TunableLoader(SlowToDecode(0)), CPU, say=lambda d: None)
    tuning.enter(Alone())
    assert not tuning.failed(MemoryError())
    while tuning.setting == Setting(0, 8):
        tuning.commit(64)
    assert not tuning.failed(ValueError("out of memory"))
    assert not tuning.failed(RuntimeError("shape mismatch"))
    assert tuning.failed(MemoryError())


def test_the_tensors_of_the_step_are_free_when_the_allocators_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    monkeypatch.setattr(
        "stoker.train.tuning.empty_cache",
        lambda device: alive.append(sum(ref() is not None for ref in held)),
    )

    def forward(x: torch.Tensor) -> None:
        hidden = x * 2
        held.append(weakref.ref(hidden))
        raise MemoryError

    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        held.append(weakref.ref(x))
        try:
            forward(x)
        except MemoryError as error:
            raise MemoryError("in the forward pass") from error

    tuner = Tuner(Setting(0, 8), Bounds(0))
    tuning = Tuning(tuner, TunableLoader(SlowToDecode(0)), CPU, say=lambda decision: None)
    tuner.follow(best=Setting(0, 8), running=Setting(0, 16))
    is_blamed = False
    try:
        step()
    except MemoryError as error:
        is_blamed = tuning.failed(error)
    assert (is_blamed, len(held), alive) == (True, 2, [0])


def with_workers(loader: TunableLoader, workers: int = 2) -> Tuning:
    """Tuning in the middle of a trial of loader workers."""
    tuner = Tuner(Setting(0), Bounds(workers))
    tuning = Tuning(tuner, loader, CPU, say=lambda decision: None)
    tuner.follow(best=Setting(0), running=Setting(workers))
    return tuning


class OneProcess(SlowToDecode):
    """Holds what does not outlive a fork."""

    def __init__(self) -> None:
        super().__init__(0)
        self.owner = os.getpid()

    def __getitem__(self, record: int) -> int:
        if os.getpid() != self.owner:
            raise KeyError("this handle belongs to another process")
        return record


def what_it_raises(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as told:
        call()
    return told.value


@pytest.mark.real
def test_what_comes_out_of_the_tuned_loader_is_told_from_all_else() -> None:
    loader, other = TunableLoader(OneProcess()), TunableLoader(OneProcess())
    loader.num_workers = other.num_workers = 1
    of_loader = what_it_raises(lambda: next(iter(loader)))
    of_other = what_it_raises(lambda: next(iter(other)))
    assert "KeyError" in str(of_loader)
    assert "KeyError" in str(of_other)

    def wrapped() -> None:
        try:
            next(iter(loader))
        except KeyError as error:
            raise LookupError("no batch") from error

    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert with_workers(loader).failed(of_loader)
    assert with_workers(loader).failed(what_it_raises(wrapped))
    assert with_workers(loader).failed(killed), "which is raised wherever the loop is by then"
    assert not with_workers(loader).failed(of_other)
    assert not with_workers(loader).failed(KeyError("of the model"))
    assert not with_workers(loader, workers=0).failed(of_loader), "the script's own"


def test_an_interrupt_while_the_loop_waits_for_data_is_no_fault_of_the_loader() -> None:
    class Interrupted(SlowToDecode):
        def __getitem__(self, record: int) -> int:
            raise KeyboardInterrupt

    loader = TunableLoader(Interrupted(0))
    interrupt = what_it_raises(lambda: next(iter(loader)))
    assert isinstance(interrupt, KeyboardInterrupt)
    assert not with_workers(loader).failed(interrupt)


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("ValueError: zu groß", "ValueError: zu groß"),
        ("x" * 159 + "ß", "x" * 159),
        ("\udcff", "?"),
    ],
)
def test_what_failed_is_told_to_all_ranks(text: str, arrives: str) -> None:
    said: list[Decision] = []
    loader = TunableLoader(SlowToDecode(0))
    tuning = with_workers(loader)
    tuning._say, tuning._failure = said.append, text
    tuning.enter(Alone())
    assert [d.why for d in said] == [
        f"loader workers 0 → 2 taken back: {arrives}; not tried again",
        "measuring 0 loader workers",
    ]


# -- several ranks -------------------------------------------------------------------------------------------------


class FixedLoader:
    def __init__(self) -> None:
        self.num_workers = 0
        self.retuned: list[int] = []

    def retune(self, *, num_workers: int) -> None:
        self.num_workers = num_workers
        self.retuned.append(num_workers)


def one_rank(rank: int, port: int, pipe: Connection) -> None:
    """Rank 1 alone waits for data, until there are workers; both are told of it, and rank 0 decides."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    now = 0.0
    loader, said = FixedLoader(), []
    # A newcomer brings other settings with it: those of rank 0 count.
    begin = Setting(0) if rank == 0 else Setting(3)
    tuning = Tuning(Tuner(begin, Bounds(2)), loader, CPU, say=said.append, clock=lambda: now)
    tuning.enter(GroupExchange(CPU))
    for _ in range(300):
        wait_s = 0.05 if rank == 1 and loader.num_workers == 0 else 0.0
        now += 0.1 if loader.num_workers == 0 else 0.05
        tuning.waited(wait_s)
        tuning.commit(8)
    pipe.send((tuple(tuning.setting), loader.retuned, [d.why for d in said]))
    dist.destroy_process_group()


def one_device(rank: int, port: int, pipe: Connection) -> None:
    """Rank 0 has a device that would hold a larger pass, rank 1 has not, and they have other cores to spare."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    now = 0.0
    said: list[Decision] = []
    tuner = Tuner(Setting(0, 8), Bounds(0))
    tuning = Tuning(tuner, FixedLoader(), CPU, say=said.append, clock=lambda: now)
    roomy, tight = Bounds(4, 1 << 50), Bounds(1, 1 << 20)
    story = []
    for bounds in ((roomy, tight), (roomy, roomy)):
        tuning.enter(GroupExchange(CPU), bounds[rank])
        for _ in range(20):
            now += 0.1
            tuning.commit(64)
        story.append((tuple(tuner.bounds), tuple(tuning.setting), tuner.may_be_at_fault))
    pipe.send((story, [d.why.split(":")[0] for d in said]))
    dist.destroy_process_group()


@pytest.mark.real
def test_ranks_of_other_devices_try_what_fits_all_and_agree_on_whose_fault_it_is() -> None:
    first, second = two_ranks(one_device)
    assert first[0] == second[0] == [((1, 1 << 20), (0, 8), False), ((4, 1 << 50), (0, 16), True)]
    assert first[1][1:] == [
        "micro-batch stays at 8",
        "measuring 0 loader workers, micro-batch 8",
        "trying micro-batch 8 → 16",
    ]
    assert second[1] == []


def two_ranks(target: Callable[[int, int, Connection], None]) -> tuple[Any, Any]:
    """What two processes with a group send."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, store.port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        first, second = (pipe.recv() if pipe.poll(90) else None for pipe in pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return first, second


@pytest.mark.real
def test_all_ranks_follow_rank_zero_which_knows_who_waits() -> None:
    first, second = two_ranks(one_rank)
    assert first is not None
    assert second is not None
    assert first[0] == second[0] == (2, 0)
    assert (first[1], second[1]) == ([2], [2])
    assert first[2] == [
        "measuring 0 loader workers",
        "trying loader workers 0 → 2: 50% of the step is waiting for data",
        "loader workers 0 → 2: waiting for data fell from 50% to 0% of the step, and the step takes 0.50 of the time; "
        "nothing left to try with 2 loader workers",
    ]
    assert second[2] == []


# -- micro-batches -----------------------------------------------------------------------------------------------------


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    got = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return got


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("records", [0, 1, 3, 4, 10, 99])
def test_the_pieces_gradients_add_up_to_the_batchs_own(records: int, alone_in_a_group: None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    wrapped = DistributedDataParallel(model)
    batch = (torch.randn(10, 5), torch.randint(2, (10,)))
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    whole = gradients(model)
    for target in (model, wrapped):
        pieces = 0
        for (x, y), weight in micro_batches(batch, records, wrapped if target is wrapped else None):
            (torch.nn.functional.cross_entropy(target(x), y) * weight).backward()
            pieces += 1
        assert pieces == (1 if records in (0, 10, 99) else -(-10 // records))
        for one, other in zip(whole, gradients(model), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("records", [0, 3, 10])
def test_pieces_beyond_a_batch_weigh_nothing(records: int, alone_in_a_group: None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(5, 2))
    x = torch.randn(10, 5)
    model(x).mean().backward()
    whole = gradients(model)
    reduces = []
    for piece, weight in micro_batches(x, records, model, at_least=6):
        reduces.append(model.require_backward_grad_sync)
        (model(piece).mean() * weight).backward()
    assert reduces == [False] * 5 + [True]
    for one, other in zip(whole, gradients(model), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_gradients_are_reduced_in_the_last_piece_only(alone_in_a_group: None) -> None:
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 1))
    reduces = [wrapped.require_backward_grad_sync for _ in micro_batches(torch.randn(7, 3), 3, wrapped)]
    assert reduces == [False, False, True]
    assert wrapped.require_backward_grad_sync


class Pair(NamedTuple):
    image: torch.Tensor
    name: list[str]


def test_batches_of_every_usual_shape_are_cut() -> None:
    batch: Any = {
        "pair": Pair(torch.arange(5), ["a", "b", "c", "d", "e"]),
        "more": [np.arange(5), torch.ones(5, 2)],
    }
    (first, one), (second, other) = micro_batches(batch, 3)
    assert (one, other) == (0.6, 0.4)
    assert second["pair"].image.tolist() == [3, 4]
    assert second["pair"].name == ["d", "e"]
    assert first["more"][0].tolist() == [0, 1, 2]
    assert second["more"][1].shape == (2, 2)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ((torch.ones(3), torch.ones(4)), r"parts of \[3, 4\] records"),
        ({}, "no tensor in it"),
        ((torch.ones(3), 7), "it holds a int"),
    ],
)
def test_a_batch_that_cannot_be_cut_says_why(batch: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        list(micro_batches(batch, 2))
