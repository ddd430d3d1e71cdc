"""Checkpoints that others have damaged or made: skipped with a message, and nothing of them is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import msgspec
import pytest
import torch

from stoker.errors import CheckpointDamaged, EnvironmentProblem
from stoker.train.checkpoints.manifest import MANIFEST, METADATA, PIECES
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.unit.checkpoint_states import flip, forge, image_at, same, state_of

DATA = "__0_0.distcp"


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    made = CheckpointStorage(str(tmp_path))
    made.write(image_at(1))
    made.write(image_at(2))
    return made


def newest_of(storage: CheckpointStorage) -> int:
    image = storage.read_newest()
    assert image is not None
    assert same(image.state(), state_of(image.commits))
    return image.commits


@pytest.mark.parametrize("name", [DATA, METADATA, PIECES, MANIFEST])
@pytest.mark.parametrize("damage", ["shorter", "gone", "empty", "other bytes"])
def test_a_damaged_one_is_skipped(
    storage: CheckpointStorage, tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step-000000000002" / name
    if damage == "gone":
        path.unlink()
    elif damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
    assert newest_of(storage) == 1
    assert "skipping" in caplog.text


def test_a_file_of_another_size_is_found_without_reading_it(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    path = tmp_path / "step-000000000002" / DATA
    with path.open("ab") as file:
        file.write(b"more")
    found = storage.newest()
    assert found is not None
    assert found[0] == 1
    (damaged,) = [held for held in storage.held() if held.reader is None]
    assert f"{DATA} has {path.stat().st_size} bytes, not the" in damaged.problem


def test_every_flipped_bit_of_a_tensor_is_found(storage: CheckpointStorage, tmp_path: Path) -> None:
    path = tmp_path / "step-000000000002" / DATA
    at = path.read_bytes().index(torch.full((5, 3), 2.0).numpy().tobytes())
    flip(path, at + 30)
    with pytest.raises(CheckpointDamaged, match=r"modules\.model\.weight .* does not match its checksum"):
        storage.read(2)
    assert storage.reader(2).verify() == [f"step-000000000002/{DATA} does not match its checksum"]
    assert torch.equal(
        storage.reader(2).read_tensors(["modules.model.half"])["modules.model.half"], torch.ones(7).bfloat16()
    )
    assert newest_of(storage) == 1


def test_where_none_can_be_read_the_run_does_not_begin_anew(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    for commits in (1, 2):
        flip(tmp_path / f"step-{commits:012d}" / METADATA, 20)
    with pytest.raises(EnvironmentProblem, match=r"no checkpoint in .* can be read"):
        storage.newest()
    with pytest.raises(EnvironmentProblem, match=r"no checkpoint in .* can be read"):
        storage.read_newest()


def test_where_no_tensors_can_be_read_the_run_does_not_begin_anew(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    for commits in (1, 2):
        (tmp_path / f"step-{commits:012d}" / DATA).write_bytes(
            b"x" * (tmp_path / f"step-{commits:012d}" / DATA).stat().st_size
        )
    assert storage.newest() is not None  # which reads no tensors
    with pytest.raises(EnvironmentProblem, match=r"no checkpoint in .* can be read"):
        storage.read_newest()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_forged_metadata_is_never_unpickled(storage: CheckpointStorage, tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "executed"))
    forge(tmp_path, 2, METADATA, evil)
    assert newest_of(storage) == 2  # the tensors are as they were
    assert storage.reader(2).verify() == []
    assert not (tmp_path / "executed").exists()
    (tmp_path / "step-000000000002" / METADATA).write_bytes(
        evil
    )  # and so with one that the manifest does not know
    flip(tmp_path / "step-000000000002" / METADATA, 0)
    assert newest_of(storage) == 1


def test_a_forged_tensor_is_not_executed(storage: CheckpointStorage, tmp_path: Path) -> None:
    step = tmp_path / "step-000000000002"
    torch.save({"a": Evil(tmp_path / "executed")}, tmp_path / "evil.pt")
    raw = (tmp_path / "evil.pt").read_bytes()
    pieces = msgspec.json.decode((step / PIECES).read_bytes())
    for chunk in pieces["chunks"]:
        chunk["start"], chunk["length"] = 0, len(raw)
    forge(tmp_path, 2, DATA, raw)
    forge(tmp_path, 2, PIECES, msgspec.json.encode(pieces))
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        storage.read(2)
    assert not (tmp_path / "executed").exists()
    assert newest_of(storage) == 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dtype", "nn", "unknown type of tensor"),
        ("offsets", [1, 0], "does not fit"),
        ("offsets", [0], "does not fit"),
        ("shape", [10**9, 10**9], "do not make up"),
        ("sizes", [10**6, 10**6], "does not fit"),
        ("start", 10**9, "lies beyond the end"),
        ("file", "../../etc/passwd", "lies beyond the end"),
    ],
)
def test_forged_pieces_are_refused(
    storage: CheckpointStorage, tmp_path: Path, field: str, value: object, says: str
) -> None:
    step = tmp_path / "step-000000000002"
    pieces = msgspec.json.decode((step / PIECES).read_bytes())
    next(c for c in pieces["chunks"] if c["name"] == "modules.model.weight")[field] = value
    forge(tmp_path, 2, PIECES, msgspec.json.encode(pieces))
    with pytest.raises(CheckpointDamaged, match=says):
        storage.read(2)
    assert newest_of(storage) == 1


def test_a_manifest_leads_to_no_other_folder(storage: CheckpointStorage, tmp_path: Path) -> None:
    path = tmp_path / "step-000000000002" / MANIFEST
    path.write_bytes(path.read_bytes().replace(DATA.encode(), b"../../secret"))
    with pytest.raises(CheckpointDamaged, match="no file of a checkpoint"):
        storage.read(2)


def test_one_of_a_newer_format_is_said(storage: CheckpointStorage, tmp_path: Path) -> None:
    path = tmp_path / "step-000000000002" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 99'))
    with pytest.raises(CheckpointDamaged, match="format 99"):
        storage.read(2)
