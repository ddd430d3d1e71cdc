"""Checkpoints in folders and in what fsspec opens: written whole, read back, the last ones kept."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.train.checkpoints import dcp_write
from stoker.train.checkpoints.dcp_read import Slice
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.manifest import MANIFEST
from stoker.train.checkpoints.places import RemotePlace, Sink, place_within
from stoker.train.checkpoints.reader import CheckpointReader
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.sharded_storage import StoredParts
from tests.unit.checkpoint_states import image_at, rows, same, state_of


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        name = uuid.uuid4().hex
        yield f"memory://{name}/run"
        files = fsspec.filesystem("memory")
        if files.exists(f"/{name}"):
            files.rm(f"/{name}", recursive=True)
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/run"


def commits_in(storage: CheckpointStorage) -> list[int]:
    return [held.commits for held in storage.held()]


def test_what_was_written_is_read_back(url: str) -> None:
    storage = CheckpointStorage(url)
    assert storage.newest() is None
    assert storage.read_newest() is None
    written_bytes = []
    manifest = storage.write(image_at(200), written_bytes.append)
    assert sum(written_bytes) > manifest.size_bytes  # and the manifest itself
    again = CheckpointStorage(url)
    image = again.read(200)
    assert image.commits == 200
    assert same(image.state(), state_of(200))
    found = again.newest()
    assert found is not None
    commits, reader = found
    assert commits == 200
    assert reader.verify() == []
    assert same(reader.read().state(), state_of(200))


def test_the_last_ones_are_kept(url: str) -> None:
    storage = CheckpointStorage(url, keep=2)
    for commits in (100, 200, 300):
        storage.write(image_at(commits))
    assert commits_in(storage) == [200, 300]
    older = storage.newest(below=300)
    assert older is not None
    assert older[0] == 200
    assert storage.newest(below=200) is None
    with pytest.raises(EnvironmentProblem, match="no checkpoint at commit 100"):
        storage.read(100)


def test_one_that_is_written_again_is_the_new_one(url: str) -> None:
    storage = CheckpointStorage(url)
    storage.write(image_of(5, {"values": {"x": torch.zeros(3)}}))
    storage.write(image_of(5, {"values": {"x": torch.ones(3)}}))
    assert commits_in(storage) == [5]
    assert torch.equal(storage.read(5).state()["values"]["x"], torch.ones(3))


def test_one_that_is_written_again_is_never_without_the_one_before(url: str) -> None:
    """A writer that is killed in the middle of it takes nothing away."""
    storage = CheckpointStorage(url, keep=1)
    storage.write(image_at(5))

    class Killed(BaseException):
        pass

    whole_meanwhile = []

    def wrote(size_bytes: int) -> None:
        whole_meanwhile.append(CheckpointStorage(url).newest() is not None)
        if len(whole_meanwhile) > 2:
            raise Killed

    with pytest.raises(Killed):
        storage.write(image_at(5), wrote)
    assert all(whole_meanwhile)
    assert same(storage.read(5).state(), state_of(5))
    assert len(storage._place.list()) == 1


def test_several_may_write_the_same_commit_at_once(url: str) -> None:
    """Of nodes that know nothing of each other: each has one of its own, and none removes another's."""
    images = [image_of(9, {"values": {"x": torch.full((3,), float(n))}}) for n in range(2)]
    CheckpointStorage(url, keep=1).write(image_at(1))

    def wrote(size_bytes: int) -> None:
        nonlocal inner
        if not inner:
            inner = True
            CheckpointStorage(url, keep=1).write(images[1], beside_others=True)

    inner = False
    CheckpointStorage(url, keep=1).write(images[0], wrote, beside_others=True)
    assert commits_in(CheckpointStorage(url)) == [1, 9, 9]
    for held in CheckpointStorage(url).held():
        assert held.reader is not None
        assert held.reader.verify() == []
    CheckpointStorage(url, keep=1).write(image_at(10))
    assert commits_in(CheckpointStorage(url)) == [10]


def test_one_that_is_overtaken_while_it_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A newcomer finds 5 and 10. 2. The run writes 15 and 20, which removes them. 3. The newcomer reads 10."""
    storage, read = CheckpointStorage(url), CheckpointReader.read
    for commits in (5, 10):
        storage.write(image_at(commits))

    def overtaken(reader: CheckpointReader) -> Image:
        if reader.commits == 10:
            for commits in (15, 20):
                storage.write(image_at(commits))
        return read(reader)

    monkeypatch.setattr(CheckpointReader, "read", overtaken)
    image = CheckpointStorage(url).read_newest()
    assert image is not None
    assert image.commits == 20


def test_a_folder_that_goes_while_it_is_written_to_is_a_problem_of_the_environment(tmp_path: Path) -> None:
    def wrote(size_bytes: int) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    with pytest.raises(EnvironmentProblem, match="cannot write to"):
        CheckpointStorage(str(tmp_path / "run")).write(image_at(1), wrote)


@pytest.mark.parametrize("defect", [TypeError, AttributeError, AssertionError, NameError, MemoryError])
@pytest.mark.parametrize("at", [0, 3])
def test_a_defect_is_no_trouble_of_the_storage(url: str, at: int, defect: type[Exception]) -> None:
    """It would be tried again and again, and the console would blame the storage. Nothing is left of the attempt."""
    storage, words = CheckpointStorage(url), 0
    storage.write(image_at(1))

    def wrote(size_bytes: int) -> None:
        nonlocal words
        words += 1
        if words > at:
            raise defect("of our own")

    with pytest.raises(defect, match="of our own"):
        storage.write(image_at(2), wrote)
    assert commits_in(storage) == [1]
    assert len(storage._place.list()) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_of_the_files_fails_so_does_the_checkpoint(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    storage, create = CheckpointStorage(url), RemotePlace.create
    monkeypatch.setattr(dcp_write, "FILE_BYTES_MIN", 64)
    storage.write(image_at(1))
    ((step, files),) = storage._place.list().items()
    assert step.startswith("step-000000000001-")
    assert len([name for name in files if name.endswith(".distcp")]) > 1

    def create_or_fail(place: RemotePlace, directory: str, name: str) -> AbstractContextManager[Sink]:
        if name == f"__0_{failing}.distcp":
            raise EnvironmentProblem("cannot write to it: 503 Slow Down")
        return create(place, directory, name)

    monkeypatch.setattr(RemotePlace, "create", create_or_fail)
    with pytest.raises(EnvironmentProblem, match="503 Slow Down"):
        storage.write(image_at(2))
    assert commits_in(storage) == [1]


def test_of_several_of_a_commit_the_last_whole_one_is_read(url: str) -> None:
    """Pieces of ranks stay beside each other where a run comes to a commit once more."""
    storage = CheckpointStorage(url)
    for attempt in range(4):
        image = image_of(9, {"values": {"x": torch.full((3,), float(attempt))}})
        storage.write_pieces(9, 0, image.pieces, f"{7 * attempt % 4}")
        storage.finish(9, 1, image.plain, ["values.x"], f"{7 * attempt % 4}", forgets=False)
        assert torch.equal(storage.read(9).state()["values"]["x"], torch.full((3,), float(attempt)))
        newest = storage.newest()
        assert newest is not None
        assert newest[1].manifest == storage.reader(9).manifest
    (last,) = [name for name in storage._place.list() if name.endswith("-1")]
    storage._place.drop(last, "__0_0.distcp")
    assert torch.equal(storage.read(9).state()["values"]["x"], torch.full((3,), 2.0))


def test_those_beyond_the_run_do_not_push_out_what_it_writes(url: str) -> None:
    """Where the newest could not be read, the run has gone on from an older one."""
    storage = CheckpointStorage(url, keep=1)
    ahead = CheckpointStorage(url, keep=9)
    for commits in (300, 400):
        ahead.write(image_at(commits))
    storage.write(image_at(150))
    storage.write(image_at(250))
    assert commits_in(storage) == [250, 300, 400]
    storage.write(image_at(350))
    assert commits_in(storage) == [350, 400]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_plain_torch_reads_it(tmp_path: Path) -> None:
    CheckpointStorage(str(tmp_path)).write(image_at(7))
    step = tmp_path / "step-000000000007"
    target = {
        "modules.model.weight": torch.empty(5, 3),
        "modules.model.half": torch.empty(7, dtype=torch.bfloat16),
    }
    dcp.load(target, checkpoint_id=str(step), no_dist=True)
    assert torch.equal(target["modules.model.weight"], torch.full((5, 3), 7.0))
    assert torch.equal(target["modules.model.half"], torch.ones(7, dtype=torch.bfloat16))
    dcp_to_torch_save(str(step), str(tmp_path / "all.pt"))
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    wanted = state_of(7)["modules"]["model"]
    for name, tensor in wanted.items():
        assert torch.equal(saved[f"modules.model.{name}"], tensor)


def test_pieces_of_ranks_make_a_whole(url: str) -> None:
    """Seven rows over three ranks, two rows over three, and what only one rank has."""
    whole = torch.arange(21.0).reshape(7, 3)
    short = torch.arange(2, dtype=torch.int64)
    image = image_of(
        9, {"modules": {"m": {"w": whole, "short": short, "own": torch.ones(4)}}, "values": {"x": 1}}
    )
    names = [piece.name for piece in image.pieces]
    storage = CheckpointStorage(url)
    for rank, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7)]):
        pieces = [
            rows("modules.m.w", whole, start, stop),
            rows("modules.m.short", short, min(rank, 2), min(rank + 1, 2)),
        ]
        if rank == 1:
            pieces.append(image.pieces[2])
        storage.write_pieces(9, rank, pieces, "generation-4")
        assert storage.newest() is None  # not before it is finished
    manifest = storage.finish(9, 3, image.plain, names, "generation-4")
    assert manifest.world_size == 3
    assert same(storage.read(9).state(), image.state())
    reader = storage.reader(9)
    assert reader.shapes["modules.m.w"] == (7, 3)
    # A world of two ranks takes its own rows, which lie across those of three.
    found = reader.read_slices({"modules.m.w": Slice((2, 1), (4, 2)), "modules.m.short": Slice((1,), (1,))})
    assert torch.equal(found["modules.m.w"], whole[2:6, 1:3])
    assert torch.equal(found["modules.m.short"], short[1:])
    assert reader.verify() == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_plain_torch_reads_pieces_of_ranks(tmp_path: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    storage = CheckpointStorage(str(tmp_path))
    storage.write_pieces(1, 0, [rows("w", whole, 0, 3)], "a")
    storage.write_pieces(1, 1, [rows("w", whole, 3, 5)], "a")
    storage.finish(1, 2, {"d": [["w", {"t": 0}]]}, ["w"], "a")
    target = {"w": torch.empty(5, 2)}
    dcp.load(target, checkpoint_id=str(tmp_path / "step-000000000001"), no_dist=True)
    assert torch.equal(target["w"], whole)


def test_pieces_of_another_attempt_are_not_taken(url: str) -> None:
    whole = torch.arange(4.0)
    storage = CheckpointStorage(url)
    storage.write_pieces(1, 0, [rows("w", whole, 0, 2)], "first")
    storage.write_pieces(1, 1, [rows("w", whole, 2, 4)], "first")
    storage.write_pieces(1, 0, [rows("w", whole, 0, 2)], "second")
    with pytest.raises(EnvironmentProblem, match="rank 1 has not written its pieces"):
        storage.finish(1, 2, {}, ["w"], "second")
    assert storage.newest() is None


def test_pieces_that_are_not_the_whole_are_refused(url: str) -> None:
    storage = CheckpointStorage(url)
    storage.write_pieces(1, 0, [rows("w", torch.ones(4), 0, 3)], "a")
    with pytest.raises(ConfigError, match="hold 3 of its 4 elements"):
        storage.finish(1, 1, {}, ["w"], "a")
    assert storage.newest() is None


def test_what_a_killed_writer_left_goes_with_the_next(url: str, caplog: pytest.LogCaptureFixture) -> None:
    storage = CheckpointStorage(url)
    storage.write(image_at(1))
    storage.write_pieces(2, 0, image_at(2).pieces, "killed")
    found = storage.newest()
    assert found is not None
    assert found[0] == 1
    storage.write_pieces(9, 0, image_at(9).pieces, "at-work")  # beyond: not this writer's to remove
    storage.write(image_at(3))
    assert "has left" in caplog.text
    assert sorted(name for name in storage._place.list() if "000000000002" in name) == []
    assert any("000000000009" in name for name in storage._place.list())


def test_there_is_no_torn_one_whose_manifest_is_there(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path))
    storage.write(image_at(1))
    storage.write(image_at(2))
    (tmp_path / "step-000000000002" / MANIFEST).unlink()
    assert [(held.commits, held.is_torn) for held in storage.held()] == [(1, False), (2, True)]
    found = storage.newest()
    assert found is not None
    assert found[0] == 1


def test_what_cannot_be_a_storage_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot open"):
        CheckpointStorage("nonsense://x/y")
    with pytest.raises(ConfigError, match="at least 1"):
        CheckpointStorage("/tmp/x", keep=0)
    with pytest.raises(ConfigError, match="names no bucket"):
        CheckpointStorage("s3://")
    for no_folder in ("file://shared/checkpoints", "file://relative", ""):
        with pytest.raises(ConfigError, match="is no place for checkpoints"):
            CheckpointStorage(no_folder)


def test_a_relative_folder_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts go to other folders: torch's, Hydra's and many of their own."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    storage, whole = CheckpointStorage("run"), RunStorage("run", 2)
    parts = StoredParts(whole.url, 2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.write(image_at(5))
    assert [held.commits for held in storage.held()] == [5]
    assert whole.has(5)
    assert parts._storage(0).folder == tmp_path / "run" / "sharded-0"
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-000000000005"]
    assert (storage.shown, whole.url) == (str(tmp_path / "run"), str(tmp_path / "run"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_parts_lie_in_the_folder_whatever_its_name_is(scheme: str, tmp_path: Path) -> None:
    parts = StoredParts(f"{scheme}{tmp_path}/what?#1", 2)
    assert parts._storage(3).folder == tmp_path / "what?#1" / "sharded-3"


def test_parts_in_a_bucket_have_its_options() -> None:
    assert place_within("s3://b/run/?region=x#1", "sharded-0") == "s3://b/run/sharded-0?region=x#1"
    assert place_within("memory://run", "sharded-0") == "memory://run/sharded-0"


@pytest.mark.parametrize(("url", "name"), [("a b", "a b"), ("a%20b", "a%20b"), ("file:a%20b?c#d", "a b?c#d")])
def test_folders_by_path_and_by_url(tmp_path: Path, url: str, name: str) -> None:
    scheme, _, rest = url.rpartition(":")
    CheckpointStorage(f"file://{tmp_path}/{rest}" if scheme else f"{tmp_path}/{rest}").write(image_at(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]
