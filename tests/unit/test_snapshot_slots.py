"""Two slots in shared memory: one is whole at any time, whoever dies, reads or has no room."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.train.checkpoints import memory
from stoker.train.checkpoints import slots as slot_files
from stoker.train.checkpoints.copying import Copy
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.memory import MemorySlots
from tests.unit.snapshot_helpers import RUN, a_state, newest_in_memory, same, stable, take


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[MemorySlots]:
    made = MemorySlots(tmp_path, RUN, 0)
    yield made
    made.close()


class Paused:
    """Stops a copy between what is copied at once and the rest, until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        run = Copy.run

        def wait_and_run(copy: Copy) -> None:
            self.release.wait()
            run(copy)

        monkeypatch.setattr(Copy, "run", wait_and_run)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    made = Paused(monkeypatch)
    yield made
    made.release.set()


def newest(folder: Path, run: str = RUN) -> int | None:
    image = newest_in_memory(folder, run)
    return image.commits if image is not None else None


def damage(path: Path, at: int = 4096) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# -- two slots -------------------------------------------------------------------------------------------------


def test_slots_take_turns_and_the_newest_is_found(slots: MemorySlots) -> None:
    assert newest(slots.folder) is None
    for commits in (3, 4, 5):
        state = take(slots, commits)
        image = newest_in_memory(slots.folder, RUN)
        assert image is not None
        assert image.commits == commits
        assert same(image.state(), state)
    assert slots.taken == 3
    assert sorted(path.name for path in slots.folder.iterdir()) == ["0-0.snapshot", "0-1.snapshot"]


def test_what_was_read_is_not_changed_by_the_next_snapshots(slots: MemorySlots) -> None:
    state = take(slots, 1)
    image = newest_in_memory(slots.folder, RUN)
    assert image is not None
    for commits in (2, 3, 4, 5):
        take(slots, commits)
    assert same(image.state(), state)


def test_a_state_may_grow_and_shrink(slots: MemorySlots) -> None:
    for commits, size in ((1, 10), (2, 2_000_000), (3, 3_000_000), (4, 5)):
        state = a_state(float(commits), size)
        assert slots.take(image_of(commits, state), stable(state))
        slots.finish()
        image = newest_in_memory(slots.folder, RUN)
        assert image is not None
        assert same(image.state(), state), slots.problem


@pytest.mark.parametrize("at", [4096, 20, 4096 + 200_000])
def test_a_damaged_snapshot_is_skipped_with_a_message(
    slots: MemorySlots, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    for commits in (1, 2):
        take(slots, commits)
    damage(slots.folder / "0-1.snapshot", at)
    assert newest(slots.folder) == 1
    assert "0-1.snapshot: the checksum of" in caplog.text
    damage(slots.folder / "0-0.snapshot", at)
    assert newest(slots.folder) is None


def test_what_is_ahead_of_the_state_is_no_reason_to_overwrite_the_newest(tmp_path: Path) -> None:
    """1. Commit 9 is damaged, so that the run goes on from 5. 2. It takes 6 and 7: 6 is there while 7 is written."""
    first = MemorySlots(tmp_path, RUN, 0)
    take(first, 5)
    take(first, 9)
    damage(tmp_path / "0-1.snapshot")
    second = MemorySlots(tmp_path, RUN, 0)
    take(second, 6)
    assert newest(tmp_path) == 6
    assert [slot.peek() is not None and slot.peek().commits for slot in second._slots] == [5, 6]  # type: ignore[union-attr]
    take(second, 7)
    damage(tmp_path / "0-0.snapshot")
    assert newest(tmp_path) == 6


# -- writer and readers ----------------------------------------------------------------------------------------


def test_while_both_slots_are_taken_a_snapshot_is_skipped(slots: MemorySlots) -> None:
    for commits in (1, 2):
        take(slots, commits)
    older = os.open(slots.folder / "0-0.snapshot", os.O_RDONLY)
    fcntl.flock(older, fcntl.LOCK_SH)
    take(slots, 3)
    assert (slots.taken, slots.skipped, slots.failed) == (2, 1, 0)
    assert newest(slots.folder) == 2
    os.close(older)
    take(slots, 4)
    assert slots.taken == 3
    assert newest(slots.folder) == 4


def test_the_newest_may_be_read_while_the_next_is_taken(slots: MemorySlots) -> None:
    for commits in (1, 2):
        take(slots, commits)
    newer = os.open(slots.folder / "0-1.snapshot", os.O_RDONLY)
    fcntl.flock(newer, fcntl.LOCK_SH)
    take(slots, 3)
    assert newest(slots.folder) == 3
    os.close(newer)


def test_what_is_being_written_is_not_read(slots: MemorySlots, paused: Paused) -> None:
    paused.release.set()
    take(slots, 1)
    paused.release.clear()
    state = a_state(2.0)
    assert slots.take(image_of(2, state), stable(state))
    assert newest(slots.folder) == 1
    assert not slots.take(image_of(3, state), stable(state)), "the last one is still under way"
    paused.release.set()
    slots.finish()
    assert newest(slots.folder) == 2


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(
    slots: MemorySlots, paused: Paused
) -> None:
    state = a_state()
    assert slots.take(image_of(1, state), stable(state))
    held = slots._slots[0]._locked
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(held)
            os.write(writing, b"open")
        except OSError:
            os.write(writing, b"closed")
        finally:
            os._exit(0)
    assert os.read(reading, 10) == b"closed"
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    paused.release.set()
    slots.finish()
    assert newest(slots.folder) == 1


# -- copied while the training goes on -------------------------------------------------------------------------


def test_the_optimizer_waits_for_the_copy_and_the_rest_may_change_at_once(
    slots: MemorySlots, paused: Paused
) -> None:
    state = a_state(1.0)
    expected = a_state(1.0)
    assert slots.take(image_of(1, state), stable(state))
    state["modules"]["model"]["odd"].zero_()
    state["values"]["half"].zero_()
    state["optimizers"]["sgd"]["state"][0]["step"].add_(1)
    is_over = threading.Event()

    def step() -> None:
        slots.settle()
        is_over.set()
        state["modules"]["model"]["w"].add_(1)

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not is_over.wait(0.2)
    paused.release.set()
    stepping.join()
    slots.finish()
    image = newest_in_memory(slots.folder, RUN)
    assert image is not None
    assert same(image.state(), expected)
    assert slots.overlaps


def test_a_change_outside_of_an_optimizers_step_makes_the_snapshot_void(
    slots: MemorySlots, paused: Paused, caplog: pytest.LogCaptureFixture
) -> None:
    paused.release.set()
    take(slots, 1)
    paused.release.clear()
    state = a_state(2.0)
    assert slots.take(image_of(2, state), stable(state))
    state["modules"]["model"]["w"].add_(1)
    paused.release.set()
    slots.settle()
    slots.finish()
    assert (slots.taken, slots.void, slots.failed, slots.overlaps) == (1, 1, 0, False)
    assert "the script changes parameters outside of an optimizer's step" in caplog.text
    assert newest(slots.folder) == 1, "the one before stays"
    state = a_state(3.0)
    assert slots.take(image_of(3, state), stable(state))
    state["modules"]["model"]["w"].add_(1)  # it has been copied by now
    slots.finish()
    image = newest_in_memory(slots.folder, RUN)
    assert image is not None
    assert same(image.state(), a_state(3.0))
    assert slots.problem == ""


def test_a_change_between_the_copy_and_its_checksum_is_noticed_too(
    slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation counts itself when it ends, and the copy may have read in the middle of it."""
    state, encode = a_state(1.0), memory.encode_description

    def change(*arguments: Any) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            state["modules"]["model"]["w"].add_(1)
        return encode(*arguments)

    monkeypatch.setattr(memory, "encode_description", change)
    assert slots.take(image_of(1, state), stable(state))
    slots.finish()
    assert slots.void == 1
    assert newest(slots.folder) is None


def test_steps_after_the_copy_do_not_make_it_void(
    slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, encode, goes_on = a_state(1.0), memory.encode_description, threading.Event()

    def wait(*arguments: Any) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait()
        return encode(*arguments)

    monkeypatch.setattr(memory, "encode_description", wait)
    assert slots.take(image_of(1, state), stable(state))
    slots.settle()
    state["modules"]["model"]["w"].add_(1)
    goes_on.set()
    slots.finish()
    assert (slots.taken, slots.void) == (1, 0)


# -- deaths and full memory ------------------------------------------------------------------------------------

KILLED_IN_MID_COPY = """
import os, signal, sys
from pathlib import Path
from stoker.train.checkpoints.copying import Copy
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.memory import MemorySlots
from tests.unit.snapshot_helpers import RUN, a_state, stable, take

slots = MemorySlots(Path(sys.argv[1]), RUN, 0)
take(slots, 1)
take(slots, 2)
move, moves = Copy._move, []

def deadly(copy, tensor, place):
    moves.append(place.name)
    if len(moves) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    move(copy, tensor, place)

Copy._move = deadly
state = a_state(3.0)
slots.take(image_of(3, state), stable(state))
slots.finish()
"""


@pytest.mark.real
@pytest.mark.parametrize("move", [1, 6, 7])
def test_a_writer_killed_in_the_middle_leaves_the_other_snapshot(
    tmp_path: Path, move: int, caplog: pytest.LogCaptureFixture
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_MID_COPY, str(tmp_path), str(move)],
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert killed.returncode == -signal.SIGKILL
    image = newest_in_memory(tmp_path, RUN)
    assert image is not None
    assert image.commits == 2
    assert same(image.state(), a_state(2.0))
    assert "its writer, process" in caplog.text
    after = MemorySlots(tmp_path, RUN, 0)
    take(after, 3)
    assert newest(tmp_path) == 3
    damage(tmp_path / "0-0.snapshot")
    assert newest(tmp_path) == 2, "what was cut off was overwritten, not what was whole"


def test_a_full_memory_costs_the_snapshot_not_the_run(
    slots: MemorySlots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for commits in (1, 2):
        take(slots, commits)
    assert (slots.taken, slots.failed) == (0, 2)
    assert "no room for a snapshot of" in slots.problem
    assert "--shm-size" in slots.problem
    assert [r.levelno for r in caplog.records if "no room" in r.message] == [logging.WARNING], "said once"
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    take(slots, 3)
    assert slots.problem == ""
    assert newest(slots.folder) == 3


def test_shared_memory_is_not_filled_to_the_last_byte(
    slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "FREE_SHARE", 1.0)
    take(slots, 1)
    assert "no room" in slots.problem


def test_room_is_made_ahead(slots: MemorySlots) -> None:
    slots.prepare(image_of(0, a_state(size=1_000_000)))
    slots.finish()
    sizes = {path.stat().st_size for path in slots.folder.iterdir()}
    assert len(sizes) == 1
    assert sizes.pop() > 8_000_000
    assert newest(slots.folder) is None


def test_a_snapshot_does_not_wait_long_for_its_room(
    slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, goes_on = os.posix_fallocate, threading.Event()

    def slow(descriptor: int, offset: int, size: int) -> None:
        goes_on.wait()
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(memory, "ROOM_WAIT_S", 0.01)
    state = a_state()
    slots.prepare(image_of(0, state))
    assert not slots.take(image_of(1, state), stable(state))
    goes_on.set()
    slots.finish()
    take(slots, 2)
    assert newest(slots.folder) == 2


@pytest.mark.parametrize("harm", ["removed", "cut off"])
def test_files_that_others_have_removed_or_cut_off_are_made_anew(slots: MemorySlots, harm: str) -> None:
    """A cleaner of /dev/shm, say. The process has the old ones mapped: a write behind their end would kill it."""
    for commits in (1, 2):
        take(slots, commits)
    for path in slots.folder.iterdir():
        path.unlink() if harm == "removed" else os.truncate(path, 0)
    for commits in (3, 4):
        take(slots, commits)
        assert newest(slots.folder) == commits


def test_a_folder_that_is_gone_costs_the_snapshot(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path / "gone", RUN, 0)
    take(slots, 1)
    assert slots.failed == 1
    assert "No such file or directory" in slots.problem
    assert newest_in_memory(tmp_path / "gone", RUN) is None


# -- who reads whose -------------------------------------------------------------------------------------------


def test_snapshots_of_another_run_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    take(MemorySlots(tmp_path, "run-2", 0), 100)
    assert newest(tmp_path) is None
    mine = MemorySlots(tmp_path, RUN, 0)
    take(mine, 1)
    take(mine, 2)
    assert newest(tmp_path) == 2
    assert newest(tmp_path, "run-2") is None, "they made room"


def test_any_workers_snapshot_will_do(tmp_path: Path) -> None:
    for local_rank, commits in ((0, 5), (1, 7), (2, 6)):
        take(MemorySlots(tmp_path, RUN, local_rank), commits)
    (tmp_path / "notes.txt").write_text("somebody else's")
    assert newest(tmp_path) == 7
    damage(tmp_path / "1-0.snapshot")
    assert newest(tmp_path) == 6


def test_a_tensor_made_in_inference_mode_is_copied_at_once(slots: MemorySlots) -> None:
    with torch.inference_mode():
        state = {"modules": {"m": {"w": torch.ones(100_000)}}}
    storages = {state["modules"]["m"]["w"].untyped_storage().data_ptr()}
    assert slots.take(image_of(1, state), storages)
    slots.settle()
    slots.finish()
    assert newest(slots.folder) == 1
