"""When a saver writes which snapshot, and what it says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.errors import WireError
from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.saver import Service
from stoker.train.checkpoints.saving import RETRY_MOST_S, Saver
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.saving import Command, Result, decode_command, encode_line
from tests.unit.checkpoint_states import image_at


class Snapshots:
    def __init__(self) -> None:
        self.commits: int | None = None
        self.is_damaged = False
        self.open = 0

    def newest_commits(self) -> int | None:
        return self.commits

    @contextlib.contextmanager
    def newest(self) -> Iterator[Image | None]:
        if self.is_damaged:
            raise WireError("the checksum of modules.model.w does not hold")
        self.open += 1
        try:
            yield None if self.commits is None else image_at(self.commits)
        finally:
            self.open -= 1


class World:
    def __init__(self, url: str, every_s: float = 0.0) -> None:
        self.now = 1000.0
        self.said: list[Result] = []
        self.snapshots = Snapshots()
        self.storage = CheckpointStorage(url)
        self.saver = Saver(
            self.snapshots,
            self.storage,
            say=self.said.append,
            now=lambda: self.now,
            rng=Rng(1),
            every_s=every_s,
        )

    def look(self, commits: int | None) -> list[str]:
        self.snapshots.commits = commits
        self.saver.look()
        return self.take()

    def take(self) -> list[str]:
        words = [f"saved {r.saved}" if r.saved is not None else f"failed {r.commits}" for r in self.said]
        self.said.clear()
        return words


def test_each_new_snapshot_is_written_once(tmp_path: Path) -> None:
    world = World(str(tmp_path / "run"))
    assert world.look(None) == []
    assert world.look(10) == ["saved 10"]
    assert world.look(10) == []
    assert world.look(20) == ["saved 20"]
    assert world.look(15) == ["saved 15"]  # the run has gone back
    assert world.snapshots.open == 0
    assert [held.commits for held in world.storage.held()] == [10, 15, 20]


def test_it_says_how_large_and_how_long(tmp_path: Path) -> None:
    world = World(str(tmp_path))
    world.snapshots.commits = 10
    world.saver.look()
    (said,) = world.said
    assert said.size_bytes == sum(f.stat().st_size for f in (tmp_path / "step-000000000010").iterdir()) - (
        (tmp_path / "step-000000000010" / "manifest.json").stat().st_size
    )


def test_between_two_there_is_time_unless_one_is_asked_for(tmp_path: Path) -> None:
    world = World(str(tmp_path), every_s=60)
    assert world.look(10) == ["saved 10"]
    world.now += 59
    assert world.look(20) == []
    world.now += 2
    assert world.look(30) == ["saved 30"]
    assert world.look(40) == []
    world.saver.save()
    assert world.take() == ["saved 40"]


def test_what_failed_is_tried_again_a_little_later(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("a file in the way")
    world = World(str(folder))
    assert world.look(10) == ["failed 10"]
    assert world.look(10) == []  # not at once
    for _ in range(20):
        world.now += RETRY_MOST_S + 1
        assert world.look(10) == ["failed 10"]
    folder.unlink()
    world.now += RETRY_MOST_S + 1
    assert world.look(10) == ["saved 10"]


def test_a_damaged_snapshot_is_said(tmp_path: Path) -> None:
    world = World(str(tmp_path))
    world.snapshots.is_damaged = True
    assert world.look(10) == ["failed 10"]
    world.snapshots.is_damaged = False
    world.saver.save()
    assert world.take() == ["saved 10"]


def test_what_the_run_came_from_is_not_written_again(tmp_path: Path) -> None:
    World(str(tmp_path)).look(10)
    again = World(str(tmp_path))
    assert again.look(10) == []
    assert again.look(20) == ["saved 20"]


def test_beside_others_it_writes_when_told_to_what_is_not_there_yet(tmp_path: Path) -> None:
    CheckpointStorage(str(tmp_path)).write(image_at(10))
    world = World(str(tmp_path))
    world.saver.beside_others = True
    assert world.look(12) == []  # not on its own
    for commits, said in ((9, []), (10, []), (12, ["saved 12"])):
        world.snapshots.commits = commits
        world.saver.save()
        assert world.take() == said
    other = CheckpointStorage(str(tmp_path))
    for commits in (20, 30):
        other.write(image_at(commits))
    world.snapshots.commits = 25
    world.saver.save()
    assert world.take() == [], "another node had a newer one"
    assert [held.commits for held in other.held()] == [20, 30]


def test_commands_are_lines_and_bad_ones_are_said(tmp_path: Path) -> None:
    said: list[Result] = []
    snapshots = Snapshots()
    snapshots.commits = 5
    service = Service(lambda folder, run_id: snapshots, said.append, Rng(1))
    lines: list[bytes] = [
        b"nonsense\n",
        encode_line(Command(watch=str(tmp_path), url="nonsense://x")),
        encode_line(Command(watch=str(tmp_path), run_id="r", url=str(tmp_path / "out"))),
        b'{"save": {}}\n',
        b'{"finish": true}\n',
    ]

    class Lines:
        def get(self, timeout: float) -> bytes:
            return lines.pop(0)

    service.serve(Lines())  # type: ignore[arg-type]
    assert lines == []
    assert ["not a message" in said[0].failed, "cannot open" in said[1].failed] == [True, True]
    assert said[2].ready
    assert [one.saved for one in said[3:]] == [5]


def test_a_line_that_is_no_command_is_refused() -> None:
    for line in (b"", b"[]", b'{"watch": 5}', b"\xff"):
        with pytest.raises(WireError):
            decode_command(line)
