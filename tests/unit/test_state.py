"""State: what a commit seals, what a broken step leaves behind, what a copy carries."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError, DatasetChanged, EnvironmentProblem, StokerError
from stoker.train.checkpoints import hashing, place_files
from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.elastic import elastic
from stoker.train.runtime import runtime
from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, record: int) -> int:
        return record


def make(**more: Any) -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return State(model=model, optimizer=optimizer, epoch=0, **more)


def stored_in(folder: Path) -> RunStorage:
    return RunStorage(str(folder), keep=2)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def forward(state: State) -> torch.Tensor:
    return state.model(torch.randn(4, 2)).sum()  # type: ignore[no-any-return]


def test_a_step_that_broke_before_its_optimizer_leaves_nothing_behind() -> None:
    scheduler_model = torch.nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(scheduler_model.parameters(), lr=1.0), 1)
    state = make(scheduler=scheduler, history=[1])
    loader = Loader(Numbers(), global_batch_size=3)
    state.seal()
    before = [t.clone() for t in state.model.state_dict().values()]
    next_random = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    batches = iter(loader)
    next(batches)
    forward(state).backward()
    state.epoch += 1
    state.history.append(2)
    state.optimizer.param_groups[0]["lr"] = 7.0
    random.random()
    np.random.random()
    assert state.stands_at_commit
    state.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.state_dict().values(), strict=True))
    assert (state.epoch, state.history) == (0, [1])
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    assert all(p.grad is None for p in state.model.parameters())
    assert (loader.epoch, loader.cursor) == (0, 0)
    assert random.getstate() == next_random[0]
    assert np.random.get_state()[1].tolist() == next_random[1]
    assert torch.equal(torch.get_rng_state(), next_random[2])


def test_an_optimizers_step_without_a_commit_stands_at_no_commit() -> None:
    state = make()
    state.seal()
    forward(state).backward()
    state.optimizer.step()
    assert not state.stands_at_commit
    state.seal()
    assert state.stands_at_commit


def test_a_copy_is_the_same_state() -> None:
    state = make()
    forward(state).backward()
    state.optimizer.step()
    state.epoch = 4
    exported = state.export()
    other = make()
    other.load(exported)
    assert other.epoch == 4
    for mine, theirs in zip(
        state.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    momentum = [s["momentum_buffer"] for s in other.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a["momentum_buffer"], b) for a, b in
               zip(state.optimizer.state_dict()["state"].values(), momentum, strict=True))  # fmt: skip


class Shadow:
    """An object that takes over the very tensors that it loads."""

    def __init__(self, device: str) -> None:
        self.held: dict[str, Any] = {"mean": torch.zeros(2, device=device), "steps": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_what_comes_from_a_checkpoint_is_where_the_script_had_it(tmp_path: Path) -> None:
    """A checkpoint is read to the host."""
    first = State(
        x=torch.ones(2), nested={"a": [torch.ones(1), 3], "b": (torch.ones(1),)}, shadow=Shadow("cpu")
    )
    folder = stored_in(tmp_path)
    assert folder.save(1, first.export())
    away = torch.zeros(2, device="meta")
    state = State(x=away, nested={"a": [away, 3, away], "b": ()}, shadow=Shadow("meta"))
    saved = folder.newest()
    assert saved is not None
    state.load(saved[1])
    assert state.x.device.type == state.nested["a"][0].device.type == "meta"
    assert state.nested["a"][1:] == [3]
    assert torch.equal(state.nested["b"][0], torch.ones(1)), "there was none, so it is on the host"
    assert state.shadow.held["mean"].device.type == "meta"
    assert state.shadow.held["steps"] == 0


def test_a_run_that_had_to_go_back_keeps_what_it_writes(tmp_path: Path) -> None:
    folder = stored_in(tmp_path)
    for commits in (100, 200, 300):
        assert folder.save(commits, {"x": commits})
    for path in tmp_path.glob("*/manifest.json"):
        path.write_bytes(b"broken")
    assert folder.save(100, {"x": 1})
    assert folder.save(150, {"x": 2})
    assert folder.save(175, {"x": 3})
    found = folder.newest()
    assert found is not None
    assert (found.commits, found.state) == (175, {"x": 3})


def test_what_a_state_cannot_hold_is_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match="is a object: State holds"):
        State(log=object())

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"seen": {1, 2}}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with pytest.raises(ConfigError, match=r"state\['odd'\]\['seen'\] is a set"):
        State(odd=Odd())
    with pytest.raises(ConfigError, match="'commit': the name is taken"):
        State(commit=1)
    state = make()
    with pytest.raises(ConfigError, match="name values when the State is made"):
        state.other = 1
    with pytest.raises(ConfigError, match="cannot be assigned"):
        state.model = torch.nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="it holds model, optimizer, epoch"):
        _ = state.other
    with pytest.raises(ConfigError, match="needs a module"):
        _ = State(epoch=0).ddp
    with pytest.raises(StokerError, match=r"inside the @stoker.elastic function"):
        _ = state.ddp
    with pytest.raises(ConfigError, match="is it from another script"):
        state.load({"modules": {"net": {}}, "optimizers": {}, "objects": {}, "values": {}, "positions": {}})


def test_an_elastic_function_alone() -> None:
    state = make()
    loader = Loader(Numbers(), global_batch_size=4, shuffle=True)
    seen: list[int] = []

    @elastic
    def train(state: State, times: int) -> str:
        while state.epoch < times:
            for batch in loader:
                seen.extend(batch.tolist())
                state.ddp(torch.randn(4, 2)).sum().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.commit()
            state.epoch += 1
        return "done"

    assert train(state, 2) == "done"
    assert sorted(seen) == sorted([*range(10), *range(10)])
    assert seen[:10] != seen[10:]
    assert state.commits == 6
    with pytest.raises(ConfigError, match=r"one @stoker.elastic function, once"):
        train(state, 2)


def test_an_error_of_the_script_is_raised_as_it_is() -> None:
    @elastic
    def train(state: State) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(make())
    with pytest.raises(ConfigError, match=r"is a stoker\.State, not int"):
        train(3)  # type: ignore[arg-type]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    for stop_after, expected in ((7, 7), (99, 10)):
        runtime.cache_clear()
        session.cache_clear()
        state = make(checkpoint_dir=str(tmp_path), checkpoint_every=3)
        loader = Loader(Numbers(), global_batch_size=2)
        seen: list[int] = []

        @elastic
        def train(
            state: State, loader: Loader = loader, seen: list[int] = seen, stop: int = stop_after
        ) -> None:
            while state.epoch < 2:
                for batch in loader:
                    seen.extend(batch.tolist())
                    state.ddp(torch.randn(4, 2)).sum().backward()
                    state.optimizer.step()
                    state.commit()
                    if state.commits == stop:
                        return
                state.epoch += 1

        train(state)
        assert state.commits == expected
        torch.distributed.destroy_process_group()
    assert seen == [4, 5, 6, 7, 8, 9], "the second run began after commit 7, with which the first had ended"


def test_checkpoints_are_kept_by_two_and_broken_ones_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stored_in(tmp_path / "c")
    assert folder.newest() is None
    for commits in (5, 10, 15):
        assert folder.save(commits, {"x": torch.ones(2) * commits})
    assert names_in(tmp_path / "c") == ["step-000000000010", "step-000000000015"]
    newest = tmp_path / "c" / "step-000000000015" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:100])
    other = tmp_path / "c" / "step-000000000020"
    other.mkdir()
    (other / "manifest.json").write_bytes(b"no checkpoint at all")
    found = folder.newest()
    assert found is not None
    assert found[0] == 10
    assert caplog.text.count("skipping a checkpoint") >= 2


def test_numbers_of_numpy_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    for expected in ((0.0, 0.1), (0.5, 0.01)):
        runtime.cache_clear()
        session.cache_clear()
        state = make(best=0.0, checkpoint_dir=str(tmp_path), checkpoint_every=1)

        @elastic
        def train(state: State, expected: tuple[float, float] = expected) -> None:
            assert (state.best, state.optimizer.param_groups[0]["lr"]) == expected
            state.best = np.float64(0.5)
            state.optimizer.param_groups[0]["lr"] = np.float64(0.01)
            state.commit()

        train(state)
        torch.distributed.destroy_process_group()


def test_where_no_checkpoint_can_be_read_nothing_is_begun_anew(tmp_path: Path) -> None:
    folder = stored_in(tmp_path)
    for commits in (5, 10):
        assert folder.save(commits, {"x": torch.ones(2)})
    (tmp_path / "step-000000000005" / "manifest.json").write_bytes(b"no checkpoint at all")
    torch.save([1, 2], tmp_path / "step-000000000010" / "__0_0.distcp")
    with pytest.raises(
        EnvironmentProblem, match=r"bring back a whole one, or name another place .*--checkpoint-dir"
    ) as told:
        folder.newest()
    assert "The newest: step-000000000010" in str(told.value)


KILLED_WHILE_SAVING = """
import os, signal, sys, torch
from stoker.train.checkpoints.storage_port import RunStorage

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

RunStorage(sys.argv[1], keep=2).save(5, {"x": torch.ones(9)}, kill)
"""


@pytest.mark.real
def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    (tmp_path / "notes.part").write_text("somebody else's")
    folder = stored_in(tmp_path)
    assert folder.newest() is None
    assert folder.save(7, {})
    assert names_in(tmp_path) == ["notes.part", "step-000000000007"]


def test_a_checkpoint_is_on_the_disk_by_name_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flush = stored_in(tmp_path), os.fsync
    for commits in (1, 2):
        folder.save(commits, {"x": torch.ones(3)})
    flushed = []

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        flushed.append((name, [int(path.name.partition("-")[2]) for path in sorted(tmp_path.glob("step-*"))]))

    monkeypatch.setattr(os, "fsync", fsync)
    assert folder.save(3, {"x": torch.ones(3)})
    *files, part, last = flushed
    assert files == [(name, [1, 2]) for name in ("__0_0.distcp", ".metadata", "pieces.json", "manifest.json")]
    assert (part[0][:18], part[1]) == (".step-000000000003", [1, 2])
    assert last == (tmp_path.name, [1, 2, 3])
    assert names_in(tmp_path) == ["step-000000000002", "step-000000000003"]


def test_what_reaches_the_disk_is_told_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_files, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(hashing, "HASH_BYTES", 1000)
    folder, flush, flushed = stored_in(tmp_path), os.fdatasync, []
    state = {"large": torch.arange(5000, dtype=torch.uint8), "many": [torch.ones(9) * n for n in range(99)]}

    def fdatasync(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    told: list[int] = []
    assert folder.save(3, state, lambda: told.append(len(flushed)))
    assert len(flushed) > 10
    assert {after - before for before, after in itertools.pairwise(told)} == {0, 1}, (
        "each flush is told at once"
    )
    found = folder.newest()
    assert found is not None
    assert torch.equal(found[1]["large"], state["large"])
    assert all(map(torch.equal, found[1]["many"], state["many"]))


def test_who_writes_a_checkpoint_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_files, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(hashing, "HASH_BYTES", 1000)
    state = make(x=torch.zeros(5000), checkpoint_dir=str(tmp_path), checkpoint_every=1)
    seen: list[int] = []
    flush = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        flush(descriptor)
        seen.append(session().progress)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    session().progress = 7
    state.seal()
    state.commit()
    assert seen == sorted(set(seen)), "each time there was some"
    assert len(seen) > 20
    assert session().progress == 0, "as on ranks that write none"


def test_a_disk_that_is_full_in_the_middle_costs_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_files, "FLUSH_BYTES", 1000)

    def fdatasync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = stored_in(tmp_path)
    assert folder.save(1, {})
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert not folder.save(2, {"x": torch.zeros(5000)})
    assert "No space left" in folder.problem
    assert names_in(tmp_path) == ["step-000000000001"]


def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    assert not stored_in(tmp_path / "c").save(1, {})


@pytest.mark.parametrize("every", [0, -1])
def test_a_checkpoint_every_no_commits_is_refused(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=rf"State\(checkpoint_every=…\) must be at least 1 commit, not {every}"
    ):
        make(checkpoint_every=every)
    runtime.cache_clear()
    monkeypatch.setenv("STOKER_CHECKPOINT_EVERY", str(every))
    with pytest.raises(ConfigError, match=f"STOKER_CHECKPOINT_EVERY must be at least 1 commit, not {every}"):
        make()
    assert make(checkpoint_every=1).commits == 0


def test_a_loader_restored_to_the_end_of_an_epoch_yields_nothing_once() -> None:
    loader = Loader(Numbers(4), global_batch_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    at_end = loader.state_dict()
    assert list(batches) == []
    assert (loader.epoch, loader.cursor) == (1, 0)
    loader.load_state_dict(at_end)
    assert list(loader) == []
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]


def test_loader_shares_and_the_rank_without_one() -> None:
    live = session()
    loader = Loader(Numbers(5), global_batch_size=4)
    live.rank, live.world_size = 2, 3
    batches = []
    noted: list[tuple[int, ...]] = []
    live.on_batch = lambda batch: noted.append(batch.records)
    batches.extend((batch.tolist(), live.share) for batch in loader)
    assert [b for b, _ in batches] == [[2, 3], [4]]
    live.rank = 0
    list(loader)
    assert noted == [(2, 3), (4,), (0,), ()], "a record that only keeps in step is not counted"
    assert len(loader) == 2


class Slow(Numbers):
    """Notes what is read; each read takes so long that what is to be read ahead is not read at once."""

    def __init__(self, log: Path) -> None:
        super().__init__(200)
        self.log = log

    def __getitem__(self, record: int) -> int:
        with self.log.open("a") as file:
            file.write(f"{record}\n")
        time.sleep(0.4)
        return record


def test_what_loader_processes_have_still_to_read_for_an_old_pass_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "read"
    loader = Loader(Slow(log), global_batch_size=2, num_workers=1, prefetch_factor=8)
    first = iter(loader)
    position = loader.state_dict()
    assert next(first).tolist() == [0, 1]
    loader.load_state_dict(position)
    second = iter(loader)
    assert [next(second).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    read = [int(line) for line in log.read_text().split()]
    begun_anew = read.index(0, 1)
    assert begun_anew < 2 * 8, f"the old pass was read to its end: {read}"
    with pytest.raises(ConfigError, match="is iterated twice at once"):
        next(first)


def test_other_records_are_noticed() -> None:
    position = Loader(Numbers(5), global_batch_size=4).state_dict()
    with pytest.raises(DatasetChanged, match="the records are not those that the run started with"):
        Loader(Numbers(6), global_batch_size=4).load_state_dict(position)


@pytest.mark.parametrize("wrong", [{"global_batch_size": 0}, {"global_batch_size": 1, "num_workers": -1}])
def test_wrong_sizes(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Loader(Numbers(), **wrong)


def test_two_loaders_of_one_name() -> None:
    first = Loader(Numbers(), global_batch_size=1, name="train")
    with pytest.raises(ValueError, match="named 'train' already"):
        Loader(Numbers(), global_batch_size=1, name="train")
    assert first.name == "train"


def test_a_state_of_another_shape_is_no_broken_world() -> None:
    exported = make().export()
    exported["modules"]["model"]["0.weight"] = torch.zeros(7, 7)
    with pytest.raises(
        ConfigError, match=r"(?s)does not fit 'model'.*another version of this script.*size mismatch"
    ):
        make().load(exported)


def test_a_loader_made_inside_the_training_function_is_refused() -> None:
    """It would be a new one after each change of the world, with its position lost and its records read again."""
    state = make()

    @elastic
    def train(state: State) -> None:
        Loader(Numbers(), global_batch_size=2)

    with pytest.raises(ConfigError, match=r"before the @stoker.elastic function"):
        train(state)


def test_another_launchers_world_is_not_taken_for_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="start the script with `stoker run`"):
        make()


class Growing(torch.nn.Module):
    """Makes a buffer when it is first used, and a larger one for more rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen") or len(self.seen) < len(x):
            self.register_buffer("seen", torch.zeros(len(x)))
        self.seen += 1
        return self.linear(x)  # type: ignore[no-any-return]


def test_buffers_may_come_and_grow_in_any_step() -> None:
    state = State(model=Growing())
    state.seal()
    for rows, kept in ((2, None), (3, [1.0, 1.0]), (5, [1.0, 1.0, 1.0])):
        state.model(torch.ones(9, 2))
        state.roll_back()
        assert (state.model.seen.tolist() if hasattr(state.model, "seen") else None) == kept
        state.model(torch.ones(rows, 2))
        state.seal()


@pytest.mark.parametrize("commits_in_eval_mode", [False, True])
def test_the_function_is_called_anew_in_the_modes_in_which_it_was_called_first(
    commits_in_eval_mode: bool,
) -> None:
    """As newcomers are: some break off in an evaluation, some have committed in one."""
    state = make()
    state.model[1].eval()  # a frozen layer
    modes = [module.training for module in state.model.modules()]
    state.seal()
    state.model.eval()
    torch.set_grad_enabled(False)
    if commits_in_eval_mode:
        state.seal()
    state.roll_back()
    assert [module.training for module in state.model.modules()] == modes == [True, True, False, True]
    assert torch.is_grad_enabled()
