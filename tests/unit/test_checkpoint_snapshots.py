"""Snapshots as a saver reads them: the newest whole one, where it lies."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from stoker.errors import WireError
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.layout import HEADER_BYTES
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.nearest import nearest_in_memory
from stoker.train.checkpoints.slots import Slot
from stoker.train.checkpoints.snapshots import SlotSnapshots
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.unit.checkpoint_states import flip
from tests.unit.snapshot_helpers import RUN, a_state, same, stable, take


def test_the_newest_is_given_as_it_was_taken(tmp_path: Path) -> None:
    source = SlotSnapshots(tmp_path, RUN)
    assert source.newest_commits() is None
    with source.newest() as none:
        assert none is None
    slots = MemorySlots(tmp_path, RUN, 0)
    for commits in (3, 5):
        state = take(slots, commits)
    assert source.newest_commits() == 5
    with source.newest() as image:
        assert image is not None
        assert image.commits == 5
        assert same(image.state(), state)
        CheckpointStorage(str(tmp_path / "out")).write(image)
    slots.close()
    saved = CheckpointStorage(str(tmp_path / "out")).read_newest()
    assert saved is not None
    assert same(saved.state(), state)


def test_those_of_another_run_do_not_count(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, "another", 0)
    take(slots, 3)
    slots.close()
    assert SlotSnapshots(tmp_path, RUN).newest_commits() is None


def test_what_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    take(slots, 1)
    state = take(slots, 2)
    with SlotSnapshots(tmp_path, RUN).newest() as image:
        assert image is not None
        for commits in (3, 4, 5):
            later = a_state(float(commits))
            slots.take(image_of(commits, later), stable(later))
            slots.settle()
            slots.finish()
        assert same(image.state(), state)
    slots.close()


def test_a_damaged_one_is_said(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    take(slots, 1)
    slots.close()
    (path,) = (p for p in tmp_path.glob("*.snapshot") if p.read_bytes()[HEADER_BYTES:].strip(b"\0"))
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WireError, match="does not hold"), SlotSnapshots(tmp_path, RUN).newest():
        pass


def test_its_memory_is_given_back(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    take(slots, 1)
    slots.close()
    source = SlotSnapshots(tmp_path, RUN)
    for _ in itertools.repeat(None, 3):
        with source.newest() as image:
            assert image is not None
            assert float(image.pieces[0].tensor.sum()) != 0
        image = None
    maps = Path("/proc/self/maps").read_text()
    assert sum(str(tmp_path) in line for line in maps.splitlines()) <= 2  # those of the slots themselves


def test_what_is_kept_of_the_nearest_does_not_change_with_the_next_snapshots(tmp_path: Path) -> None:
    """A module's hook, say, holds on to a tensor that it was to copy."""
    slots = MemorySlots(tmp_path, RUN, 0)
    take(slots, 1)
    with nearest_in_memory(tmp_path, RUN) as image:
        assert image is not None
        kept = next(piece.tensor for piece in image.pieces if piece.name == "modules.model.w")
        del image
    for commits in (2, 3, 4):
        take(slots, commits)
    slots.close()
    assert bool((kept == 1.0).all())


def test_the_nearest_is_given_back_and_only_one_and_the_same_has_its_fingerprint(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    fingerprints = []
    for commits in (1, 1, 2):
        take(slots, commits)
        with nearest_in_memory(tmp_path, RUN) as image:
            assert image is not None
            fingerprints.append(image.fingerprint)
            del image
    slots.close()
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    maps = Path("/proc/self/maps").read_text()
    assert sum(str(tmp_path) in line for line in maps.splitlines()) <= 2  # those of the slots themselves


def test_the_nearest_is_not_written_over_while_it_is_read(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    take(slots, 1)
    with nearest_in_memory(tmp_path, RUN) as image:
        assert image is not None
        for commits in (2, 3):
            take(slots, commits)
        w = next(piece.tensor for piece in image.pieces if piece.name == "modules.model.w")
        assert bool((w == 1.0).all())
    slots.close()
    assert (slots.taken, slots.skipped) == (1 + 1, 1)


def test_where_the_newest_is_damaged_the_one_before_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    first = take(slots, 1)
    take(slots, 2)
    slots.close()
    (path,) = (p for p in tmp_path.glob("*.snapshot") if (header := Slot(p).peek()) and header.commits == 2)
    flip(path, HEADER_BYTES + 100)
    with SlotSnapshots(tmp_path, RUN).newest() as image:
        assert image is not None
        assert image.commits == 1
        assert same(image.state(), first)
    assert "skipping the snapshot" in caplog.text
