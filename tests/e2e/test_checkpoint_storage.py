"""Checkpoints in storages that fail: a full disk, a killed writer, an S3 server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.e2e.disks import small_disk
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = pytest.mark.real


def image_at(commits: int, megabytes: int = 1) -> Image:
    tensors = {f"w{i}": torch.full((250_000,), float(commits)) for i in range(megabytes)}
    return image_of(commits, {"modules": {"model": tensors}, "values": {"commits": commits}})


def test_a_full_disk_costs_the_checkpoint_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "12m") as disk:
        storage = CheckpointStorage(str(disk / "run"))
        storage.write(image_at(1, 4))
        with pytest.raises(EnvironmentProblem, match=r"cannot write to .*No space left on device"):
            storage.write(image_at(2, 12))
        left = [entry.name for entry in (disk / "run").iterdir()]
        assert left == ["step-000000000001"], "no leftover either"
        storage.write(image_at(3, 4))  # there is room again for what fits
        found = storage.read_newest()
        assert found is not None
        assert found.state()["values"]["commits"] == 3


def killed_writer(url: str, environment: dict[str, str], after: int) -> None:
    """Writes 40 MB, and is killed when so many writes are done."""
    command = [sys.executable, "-m", "tests.e2e.checkpoint_writer", url, "2", "40", str(after)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
    ) as writer:
        assert writer.stdout is not None
        said = 0
        for line in writer.stdout:
            said += line == "wrote\n"
            if said >= after:
                break
        writer.kill()
    assert writer.wait() == -9


def test_a_writer_that_is_killed_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = CheckpointStorage(str(tmp_path))
    storage.write(image_at(1))
    for after in (1, 25):
        killed_writer(str(tmp_path), {}, after)
        assert len(list(tmp_path.iterdir())) >= 2
        found = storage.read_newest()
        assert found is not None
        assert found.commits == 1
    with caplog.at_level(logging.WARNING):
        storage.write(image_at(3))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000000000001", "step-000000000003"]
    assert "a writer that broke off has left" in caplog.text


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}/run?endpoint={endpoint}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_s3_server_has_checkpoints(s3_url: str, endpoint: str, tmp_path: Path) -> None:
    storage = CheckpointStorage(s3_url)
    assert storage.newest() is None
    for commits in (1, 2, 3):
        storage.write(image_at(commits, 40))
    assert "?" not in storage.shown
    assert [held.commits for held in storage.held()] == [2, 3]
    assert storage.reader(3).verify() == []
    image = CheckpointStorage(s3_url).read_newest()
    assert image is not None
    assert image.state()["values"]["commits"] == 3
    assert torch.equal(image.state()["modules"]["model"]["w39"], torch.full((250_000,), 3.0))
    client = s3_client(endpoint)
    prefix = s3_url.removeprefix(f"s3://{BUCKET}/").partition("?")[0]
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/step-000000000003-")["Contents"]
    for found in listed:
        client.download_file(BUCKET, found["Key"], str(tmp_path / found["Key"].rpartition("/")[2]))
    client.close()
    target = {"modules.model.w7": torch.empty(250_000)}
    dcp.load(target, checkpoint_id=str(tmp_path), no_dist=True)  # what was copied down is plain torch's
    assert torch.equal(target["modules.model.w7"], torch.full((250_000,), 3.0))


def test_a_writer_to_s3_that_is_killed_leaves_a_torn_one(
    s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = CheckpointStorage(s3_url)
    storage.write(image_at(1))
    killed_writer(s3_url, KEYS, 38)
    assert [held.commits for held in storage.held() if not held.is_torn] == [1]
    storage.write_pieces(2, 0, image_at(2).pieces, "killed")  # its file is there, the manifest is not
    found = storage.read_newest()
    assert found is not None
    assert found.commits == 1
    assert [(held.commits, held.is_torn) for held in storage.held()] == [(1, False), (2, True)]
    storage.write(image_at(3))
    assert [held.commits for held in storage.held()] == [1, 3]


def test_of_two_writers_to_s3_none_leaves_a_part(s3_url: str) -> None:
    """The node that writes changes while the one before is at it."""
    old, new = CheckpointStorage(s3_url, keep=1), CheckpointStorage(s3_url, keep=1)
    old.write(image_at(1))
    is_over = False

    def wrote(size_bytes: int) -> None:
        nonlocal is_over
        if not is_over and any(held.is_torn for held in new.held()):  # the first of its files is there
            is_over = True
            new.write(image_at(3))

    with pytest.raises(EnvironmentProblem, match=r"was removed from s3://.* has another node become the one"):
        old.write(image_at(2, 40), wrote)
    assert [(held.commits, held.is_torn) for held in new.held()] == [(3, False)]
    assert new.reader(3).verify() == []
    old.write(image_at(4))
    (held,) = new.held()
    assert held.reader is not None
    assert (held.commits, held.reader.verify()) == (4, [])


def test_pieces_of_ranks_on_s3(s3_url: str) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    image = image_of(4, {"values": {"w": whole}})
    storage = CheckpointStorage(s3_url)
    for rank, (start, stop) in enumerate([(0, 3), (3, 5)]):
        piece = image.pieces[0]._replace(offsets=(start, 0), tensor=whole[start:stop])
        storage.write_pieces(4, rank, [piece], "one")
    storage.finish(4, 2, image.plain, ["values.w"], "one")
    assert torch.equal(storage.read(4).state()["values"]["w"], whole)


def test_a_storage_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    storage = CheckpointStorage("s3://bucket/run?endpoint=http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match=r"cannot list s3://bucket/run: "):
        storage.newest()  # nothing is known of what is there: the run must not begin anew
    with pytest.raises(EnvironmentProblem, match=r"cannot .* s3://bucket/run: "):
        storage.write(image_at(1))


def test_wrong_keys_are_said_without_them(endpoint: str) -> None:
    url = f"s3://{BUCKET}/run?endpoint={endpoint}&access_key_id=AK&secret_access_key=hidden-secret"
    with pytest.raises(EnvironmentProblem, match="cannot") as problem:
        CheckpointStorage(url).write(image_at(1))
    assert "hidden-secret" not in str(problem.value)
