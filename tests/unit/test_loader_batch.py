"""How batches are put together and cross between processes; what a loader tells of its waiting."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from stoker._native import Lent
from stoker.data.loader import Loader
from stoker.data.loader_arena import ArenaFile, ArenaReader, ArenaWriter
from stoker.data.loader_batch import BatchWriter, Collator, reading_from, size_of
from stoker.data.loader_plan import Pass, Plan
from stoker.data.loader_process import ForkingPickler
from stoker.data.loader_source import new_source, pinning
from stoker.data.loader_spent import spent
from stoker.data.loader_stats import LoaderStats
from stoker.data.session import session
from tests.unit.loader_data import Rows, as_list


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


class Channel:
    """Both sides in one process."""

    def __init__(self) -> None:
        self.file = ArenaFile()
        self.arena = ArenaWriter(self.file)
        self.writer = BatchWriter(self.arena, lambda slot: self.file.mark(slot, used=True))
        self.reader = ArenaReader(self.file)

    def send(self, batch: Any) -> Any:
        message = self.writer.message(batch)
        with reading_from(self.reader):
            return ForkingPickler.loads(message)

    @property
    def used(self) -> list[int]:
        return [slot for slot in range(64) if self.file.is_used(slot)]


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    yield made
    made.file.close()


def assert_same(one: Any, other: Any) -> None:
    """Types, shapes and contents."""
    assert type(one) is type(other)
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(other, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_same(one[key], other[key])
    elif isinstance(other, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


BIG = 9000
CONTENTS: list[Any] = [
    torch.arange(BIG),
    torch.arange(BIG).view(90, 100).t(),
    torch.rand(2, 3, 60, 60).to(memory_format=torch.channels_last),
    torch.rand(BIG).to(torch.bfloat16),
    torch.rand(5).to(torch.bfloat16),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.rand(BIG).to_sparse(),
    torch.complex(torch.rand(BIG), torch.rand(BIG)).conj(),
    np.arange(BIG).reshape(90, 100),
    np.arange(BIG).astype(">i4"),
    np.array(["a", "b"]),
    {"x": [torch.rand(BIG), ("text", b"bytes", None)], "y": Pair(torch.rand(BIG), "name")},
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_every_content_arrives_as_it_was_sent(content: Any, channel: Channel) -> None:
    channel.writer.begin()
    (came,) = channel.send([content])
    assert_same(came, content)


def test_memory_format_and_writability(channel: Channel) -> None:
    channel.writer.begin()
    pictures = torch.rand(2, 3, 60, 60).to(memory_format=torch.channels_last)
    readable = np.arange(BIG)
    readable.flags.writeable = False
    came, array = channel.send((pictures, readable))
    assert came.is_contiguous(memory_format=torch.channels_last)
    came += 1
    array += 1
    assert array[0] == 1


def test_a_tensor_that_comes_twice_is_free_when_both_are_gone(channel: Channel) -> None:
    channel.writer.begin()
    one = channel.writer.room(torch.int64, (BIG,))
    assert one is not None
    one.copy_(torch.arange(BIG))
    first, second, view = channel.send((one, one, one.detach()))
    assert len(channel.used) == 2
    del first, view
    assert len(channel.used) == 1
    assert second[5] == 5
    part = second[10:20].view(2, 5)
    del second
    assert len(channel.used) == 1
    del part
    assert channel.used == []


def test_no_python_runs_when_a_batch_goes(channel: Channel) -> None:
    """A Ctrl-C that came then would be raised there, where nobody hears of it, and the slot be lost."""
    channel.writer.begin()
    came: list[Any] = channel.send([torch.arange(BIG), np.arange(BIG)])
    assert len(channel.used) == 2
    ran: list[str] = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        came.clear()
    finally:
        sys.setprofile(None)
    assert (ran, channel.used) == ([], [])


def test_a_forked_copy_that_goes_frees_nothing(channel: Channel) -> None:
    channel.writer.begin()
    (came,) = channel.send([np.arange(BIG)])
    child = os.fork()
    if not child:
        try:
            del came
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(channel.used) == 1
    del came
    assert channel.used == []


@pytest.mark.parametrize(("size_bytes", "mark"), [(101, 0), (100, 8), (2**63, 0)])
def test_memory_beyond_what_is_there_is_not_lent(size_bytes: int, mark: int) -> None:
    marks = bytearray(b"\1" * 8)
    with pytest.raises((ValueError, TypeError)):
        Lent(bytearray(100), size_bytes, marks, mark)
    assert marks == b"\1" * 8
    lent = memoryview(Lent(bytearray(100), 100, marks, 7))
    lent[99] = 5
    part = lent[:10]
    del lent
    assert marks[7] == 1
    del part
    assert marks == b"\1" * 7 + b"\0"


def test_slots_are_used_again_and_grow_with_the_batches(channel: Channel) -> None:
    for turn in range(50):
        size = BIG + 400 * (turn % 9)
        channel.writer.begin()
        batch = Collator(channel.writer)([np.full(size, turn), np.full(size, turn)])
        came = channel.send(batch)
        assert came.shape == (2, size)
        assert bool((came == turn).all())
        kept = came if turn == 20 else kept if turn > 20 else None  # noqa: F821
    assert bool((kept == 20).all())
    assert len(channel.arena._slots) <= 3
    assert os.fstat(channel.file.fd).st_blocks * 512 < 4 * 2 * 8 * (BIG + 4000) * 2


def test_without_memory_batches_come_as_torch_sends_them(channel: Channel, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    channel.writer.begin()
    batch = Collator(channel.writer)([np.arange(BIG), np.arange(BIG)])
    assert channel.send(batch).shape == (2, BIG)
    assert channel.used == []


SAMPLES: list[list[Any]] = [
    [np.arange(4000, dtype=np.float32)] * 3,
    [torch.rand(4000)] * 3,
    [torch.rand(4000), torch.rand(4000).double()],
    [(np.float32(1), 2, "a", {"k": np.ones(3)})] * 2,
    [Pair(torch.ones(5000), "x")] * 2,
    [b"ab", b"cd"],
    [True, False],
]


@pytest.mark.parametrize("samples", SAMPLES, ids=range(len(SAMPLES)))
def test_collating_is_torchs(samples: list[Any], channel: Channel) -> None:
    channel.writer.begin()
    expected = default_collate(samples)
    for collator in (Collator(None), Collator(channel.writer)):
        assert_same(collator(samples), expected)


def test_collating_differing_shapes_is_refused(channel: Channel) -> None:
    for samples in ([np.ones(3), np.ones(4)], [torch.ones(3), torch.ones(4)]):
        with pytest.raises(RuntimeError, match="equal size"):
            Collator(channel.writer)(samples)


def test_gradients_of_samples_are_kept_in_this_process() -> None:
    weights = torch.ones(3, requires_grad=True)
    Collator(None)([weights * 2, weights * 3]).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [5.0, 5.0, 5.0]


# -- over processes ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_process")
def test_batches_stay_what_they_are_for_as_long_as_they_are_kept() -> None:
    with Loader(Rows(40), global_batch_size=2, num_workers=2) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        rows = [batch[0] for batch in kept]
        del kept
    del loader
    gc.collect()
    assert [int(row[0, 0]) for row in rows] == [*range(0, 40, 2)] * 3
    assert all(bool((row == torch.tensor([[row[0, 0]], [row[1, 0]]])).all()) for row in rows)


def test_sizes_of_batches() -> None:
    """Whatever a batch is: its size is only told."""
    assert size_of([(b"abc", 1, "text"), (b"", 2, None)]) == 3
    assert size_of({"x": torch.zeros(3), "y": [torch.zeros(2, 2).to_sparse(), np.zeros(2, "u1")]}) == 14


@pytest.mark.usefixtures("fresh_process")
def test_a_forked_child_that_drops_a_batch_frees_nothing_here() -> None:
    with Loader(Rows(40), global_batch_size=2, num_workers=1, prefetch_factor=1) as loader:
        batches = iter(loader)
        batch = next(batches)
        child = os.fork()
        if child == 0:
            del batch
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        for _ in range(5):
            next(batches)
        assert batch[0][:, 0].tolist() == [0, 1]


def test_what_came_early_is_pinned_before_its_turn() -> None:
    """Pinning is torch's; this is about when it is done, and that each batch is pinned once."""
    pinned: list[int] = []

    def pin(batch: list[Any]) -> list[Any]:
        pinned.append(batch[0][1])
        return batch

    for workers in (0, 2):
        pinned.clear()
        source = new_source(Rows(12), as_list, num_workers=workers, prefetch_factor=2, context=None, pin=pin)
        source.begin(Plan(Pass(1, 12, 0, 0, False, 0, 2, 0, 1)))
        try:
            assert [source.take(step).batch[0][1] for step in range(6)] == [0, 2, 4, 6, 8, 10]
        finally:
            source.close()
        assert sorted(pinned) == [0, 2, 4, 6, 8, 10]


@pytest.mark.usefixtures("fresh_process")
def test_pinned_memory_and_copies_that_do_not_wait() -> None:
    """Without an accelerator both are nothing, and say nothing: warnings are errors here."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert pinning(False) is None
    assert (pinning(True) is None) == (device is None)
    for workers in (0, 1):
        with Loader(Rows(4), global_batch_size=2, num_workers=workers, pin_memory=True) as loader:
            for rows, _ in loader:
                assert rows.is_pinned() == (device is not None)
                assert rows.to(device or "cpu", non_blocking=True).shape == rows.shape


# -- stats -------------------------------------------------------------------------------------------------------------


class Metered(Rows):
    def __getitem__(self, record: int) -> Any:
        with spent().reading():
            sum(range(20_000))
        return super().__getitem__(record)


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_tells(workers: int) -> None:
    with Loader(Metered(40), global_batch_size=8, num_workers=workers, name="train") as loader:
        for _ in loader:
            assert loader.stats.last_wait_s > 0
        told = loader.stats.as_dict()
        assert (told["loader"], told["num_workers"], told["steps"], told["records"]) == (
            "train",
            workers,
            5,
            40,
        )
        assert told["size_bytes"] == 40 * (4 * 8192 + 8)
        assert told["waited_s"] >= session().waited_s  # what starts a loop is not a step's waiting
        assert sum(told["waiting"].values()) == pytest.approx(told["waited_s"])
        assert told["waited_s"] == pytest.approx(sum(loader.stats.waits_s))
        assert loader.stats.longest_wait_s == max(loader.stats.waits_s)
        if workers == 0:
            assert told["waiting"]["reading_s"] > told["waiting"]["samples_s"] == 0
        assert 0 < told["busy_share"] <= 1
        loader.stats.figures["cache"] = lambda: {"prefetched": 3}
        assert loader.stats.as_dict()["cache"] == {"prefetched": 3}
        text = str(loader.stats)
        assert "loader train: 5 steps, 40 records" in text
        assert "cache    prefetched 3" in text
        loader.stats.reset()
        assert (loader.stats.steps, loader.stats.waited_s, str(loader.stats)) != (5, 0, text)


def test_empty_stats_can_be_told() -> None:
    assert "0 steps" in str(LoaderStats("x"))
