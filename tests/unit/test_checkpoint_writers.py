"""Two writers to one place, around a change of the node that writes.

Whatever comes first, nothing that is whole is lost before something newer is there, and no checkpoint is in parts.
"""

from __future__ import annotations

import random
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.manifest import MANIFEST, PIECES, REMOVAL
from stoker.train.checkpoints.places import LocalPlace, RemotePlace
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.unit.checkpoint_states import image_at, same, state_of

OPERATIONS = ("list", "create", "read", "drop", "publish", "begin", "rename", "remove")
STEPS_MAX = 2000


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/run" if request.param == "folder" else f"memory://{uuid.uuid4().hex}/run"


class Killed(BaseException):
    pass


class Writer:
    """Writes checkpoints in a thread of its own, which goes on from one operation to the next when it is told to."""

    def __init__(self, url: str, keep: int, commits: list[int], dies_at: int) -> None:
        self.storage = CheckpointStorage(url, keep)
        self.written: list[int] = []
        self.failed: list[str] = []
        self.defect: BaseException | None = None
        self._commits = commits
        self._steps_left = dies_at
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = False
        self._gate(self.storage._place)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stands.acquire()

    def step(self) -> None:
        self._go.release()
        self._stands.acquire()

    def _gate(self, place: Any) -> None:
        for name in OPERATIONS:
            if (real := getattr(place, name, None)) is not None:
                setattr(place, name, self._gated(real))

    def _gated(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any) -> Any:
            # write_pieces has threads of its own where there are several files; here is one.
            self._stands.release()
            self._go.acquire()
            self._steps_left -= 1
            if self._steps_left < 0:
                raise Killed
            return real(*args)

        return gated

    def _run(self) -> None:
        try:
            for commits in self._commits:
                try:
                    self.storage.write(image_at(commits))
                    self.written.append(commits)
                except EnvironmentProblem as error:
                    self.failed.append(str(error))
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (raised in the test's thread)
            self.defect = error
        finally:
            self.is_done = True
            self._stands.release()


def whole_in(storage: CheckpointStorage) -> list[int]:
    """Commits of those of which every byte is as it was written; none has a manifest and not all of its files."""
    found = []
    for held in storage.held():
        if not held.is_torn:
            assert held.reader is not None, held.problem
            assert held.reader.verify() == []
            found.append(held.commits)
    return found


def readable(storage: CheckpointStorage) -> int:
    image = storage.read_newest()
    assert image is not None
    assert same(image.state(), state_of(image.commits))
    return image.commits


@pytest.mark.parametrize("seed", [*range(30), 238])
def test_in_any_order_of_their_operations(url: str, seed: int) -> None:
    rng = random.Random(seed)
    look = CheckpointStorage(url)
    look.write(image_at(1))
    dies = rng.random() < 0.3
    keep = rng.choice([1, 2])
    old = Writer(url, keep, [5, 8], rng.randrange(60) if dies else STEPS_MAX)
    new = Writer(url, keep, [rng.choice([5, 8]), rng.choice([8, 9]), 10], STEPS_MAX)
    newest = 1
    for _ in range(STEPS_MAX):
        under_way = [one for one in (old, new) if not one.is_done]
        if not under_way:
            break
        # In bursts: who is alone for a while gets to the end of something.
        one = rng.choice(under_way)
        for _ in range(rng.choice([1, 1, 2, 10, 40])):
            if not one.is_done:
                one.step()
        newest = max([newest, *new.written])
        assert readable(look) >= newest
    assert (old.defect, new.defect) == (None, None)
    assert new.written, new.failed
    if dies:
        assert set(whole_in_spite_of_a_death(look)) >= {max(new.written)}
    else:
        assert whole_in(look)[-1] == max(new.written)


def whole_in_spite_of_a_death(storage: CheckpointStorage) -> Iterator[int]:
    for held in storage.held():
        if held.reader is not None:
            assert held.reader.verify() == []
            yield held.commits


def meanwhile(place: Any, monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[], None]) -> None:
    """`act` before the next call of a method, once."""
    real = getattr(place, method)

    def once(*args: Any) -> Any:
        monkeypatch.setattr(place, method, real)
        act()
        return real(*args)

    monkeypatch.setattr(place, method, once)


def test_who_was_taken_for_dead_publishes_nothing(url: str) -> None:
    """1. The old writer has written its tensors. 2. The new one tidies up and writes. 3. The old one goes on."""
    old, new = CheckpointStorage(url, keep=1), CheckpointStorage(url, keep=1)
    image = image_at(5)
    old.write_pieces(5, 0, image.pieces, "old")
    new.write(image_at(7))
    with pytest.raises(EnvironmentProblem):
        old.finish(5, 1, image.plain, [piece.name for piece in image.pieces], "old")
    overtaken: list[int] = []

    def wrote(size_bytes: int) -> None:
        if not overtaken:
            overtaken.append(size_bytes)
            new.write(image_at(7))

    with pytest.raises(EnvironmentProblem, match=r"was removed from|cannot write to"):
        old.write(image_at(6), wrote)
    assert whole_in(new) == [7]
    old.write(image_at(8))
    assert whole_in(new) == [8]


def test_where_files_are_gone_no_manifest_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CheckpointStorage(f"memory://{uuid.uuid4().hex}/run")
    place, put = storage._place, []
    create = place.create

    def noted(directory: str, name: str) -> Any:
        put.append(name)
        if name == PIECES:
            place.drop(directory, "__0_0.distcp")
        return create(directory, name)

    monkeypatch.setattr(place, "create", noted)
    with pytest.raises(EnvironmentProblem, match=r"step-000000000005-\w+/__0_0.distcp was removed from"):
        storage.write(image_at(5))
    assert (PIECES in put, MANIFEST in put) == (True, False)
    assert place.list() == {}


def test_what_is_being_removed_from_a_folder_cannot_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files go one after the other; a name that it gets meanwhile would be that of a part."""
    old, new = CheckpointStorage(str(tmp_path)), CheckpointStorage(str(tmp_path))
    image = image_at(5)
    old.write_pieces(5, 0, image.pieces, "old")
    rmtree = shutil.rmtree

    def late(folder: Path) -> None:
        with pytest.raises(EnvironmentProblem):
            old._place.publish(".step-000000000005.old.part", "step-000000000005", "old")
        rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", late)
    new.write(image_at(7))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000007"]


def test_one_that_is_published_while_it_is_being_removed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The new writer takes it for dead and begins to say so. 2. It is published. 3. The new one looks once more."""
    url = f"memory://{uuid.uuid4().hex}/run"
    old, new = CheckpointStorage(url), CheckpointStorage(url)
    image = image_at(5)
    old.write_pieces(5, 0, image.pieces, "old")
    place = new._place
    assert isinstance(place, RemotePlace)
    names = [piece.name for piece in image.pieces]
    meanwhile(place, monkeypatch, "create", lambda: _finish(old, names))
    place.remove_torn("step-000000000005-old")
    assert whole_in(new) == [5]
    assert REMOVAL not in place.list()["step-000000000005-old"]


def _write(storage: CheckpointStorage, commits: int) -> None:
    storage.write(image_at(commits))


def _finish(storage: CheckpointStorage, names: list[str]) -> None:
    storage.finish(5, 1, image_at(5).plain, names, "old", forgets=False)


@pytest.mark.parametrize("at", ["manifest", "look"])
def test_one_that_is_being_removed_while_it_is_published_is_given_up(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. All files are there. 2. The removal begins, or is over. 3. The manifest is put, and taken back."""
    url = f"memory://{uuid.uuid4().hex}/run"
    old, new = CheckpointStorage(url), CheckpointStorage(url)
    new.write(image_at(1))
    place = old._place
    create = place.create

    def interfere() -> None:
        (torn,) = [name for name in place.list() if "5-" in name]
        if at == "manifest":
            new._clearing.clean(5)
        else:
            with new._place.create(torn, REMOVAL) as sink:
                sink.write(b"{}")

    def create_late(directory: str, name: str) -> Any:
        if name == MANIFEST:
            interfere()
        return create(directory, name)

    monkeypatch.setattr(place, "create", create_late)
    with pytest.raises(EnvironmentProblem, match="was removed from memory"):
        old.write(image_at(5))
    assert whole_in(new) == [1]


def test_of_two_of_one_commit_neither_removes_the_other_s(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Both publish. 2. Both tidy up."""
    old, new = CheckpointStorage(url, keep=1), CheckpointStorage(url, keep=1)
    old.write(image_at(1))
    meanwhile(old._clearing, monkeypatch, "forget_old", lambda: _write(new, 5))
    old.write(image_at(5))
    assert 5 in whole_in(new)
    new.write(image_at(6))
    assert whole_in(new) == [6]


def test_what_is_damaged_does_not_push_out_what_is_whole(url: str, caplog: pytest.LogCaptureFixture) -> None:
    storage = CheckpointStorage(url, keep=2)
    for commits in (1, 2):
        storage.write(image_at(commits))
    (step,) = [name for name in storage._place.list() if "0002" in name]
    storage._place.drop(step, "__0_0.distcp")
    storage.write(image_at(3))
    assert [(held.commits, held.reader is not None) for held in storage.held()] == [
        (1, True),
        (2, False),
        (3, True),
    ]
    storage.write(image_at(4))
    assert whole_in(storage) == [3, 4]


def test_a_folder_is_removed_under_a_name_that_nobody_publishes(tmp_path: Path) -> None:
    """A removal that breaks off leaves no checkpoint, and what it leaves goes with the next."""
    place = LocalPlace(tmp_path)
    storage = CheckpointStorage(str(tmp_path))
    storage.write(image_at(1))
    (tmp_path / "step-000000000001").rename(tmp_path / ".step-000000000001.gone-1234.part")
    assert storage.newest() is None
    storage.write(image_at(2))
    assert list(place.list()) == ["step-000000000002"]
