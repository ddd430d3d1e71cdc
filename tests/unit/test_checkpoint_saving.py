"""When a saver writes which snapshot, and what it says."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.errors import WireError
from stoker.train.checkpoints import growth
from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.manifest import MANIFEST
from stoker.train.checkpoints.patience import Patience
from stoker.train.checkpoints.place_files import Flushed
from stoker.train.checkpoints.saver import Service
from stoker.train.checkpoints.saving import GIVE_WAY_S, LOOK_AGAIN_S, RETRY_MOST_S, Saver
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


class Sleeper:
    """In place of sleeping: time passes, and others do something."""

    def __init__(self, world: World, others: Iterator[None]) -> None:
        self.world = world
        self.others = others
        self.naps = 0

    def __call__(self, delay_s: float) -> None:
        self.naps += 1
        self.world.now += delay_s
        next(self.others, None)


def survivor(url: str, others: Iterator[None], commits: int = 12) -> tuple[World, Sleeper]:
    """One that is told to write the newest snapshot beside others."""
    world = World(url)
    sleeper = Sleeper(world, others)
    world.saver._pause = sleeper
    world.saver.beside_others = True
    world.snapshots.commits = commits
    return world, sleeper


@pytest.fixture(params=["folder", "memory"])
def place_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/run" if request.param == "folder" else f"memory://{uuid.uuid4().hex}/run"


def test_a_survivor_waits_while_another_ones_attempt_grows(place_url: str) -> None:
    """It takes minutes, in files that come one after the other; then there is nothing left to write."""
    other = CheckpointStorage(place_url)
    image = image_at(12)

    def write() -> Iterator[None]:
        for rank in range(5):
            other.write_pieces(12, rank, image.pieces if rank == 0 else [], "other")
            yield
            yield from itertools.repeat(None, int(GIVE_WAY_S / LOOK_AGAIN_S) - 1)
        other.finish(12, 5, image.plain, [piece.name for piece in image.pieces], "other")

    others = write()
    next(others)
    world, sleeper = survivor(place_url, others)
    world.saver.save()
    assert world.take() == []
    assert [held.commits for held in other.held()] == [12]
    assert sleeper.naps > 4 * GIVE_WAY_S / LOOK_AGAIN_S


def test_a_survivor_writes_where_the_attempt_is_a_dead_ones(place_url: str) -> None:
    other = CheckpointStorage(place_url)
    other.write_pieces(12, 0, image_at(12).pieces, "dead")
    world, sleeper = survivor(place_url, iter(()))
    world.saver.save()
    assert world.take() == ["saved 12"]
    assert sleeper.naps == GIVE_WAY_S / LOOK_AGAIN_S
    older, sleeper = survivor(place_url, iter(()), commits=13)
    older.saver.save()
    assert older.take() == ["saved 13"]
    assert sleeper.naps == 0, "for one of an older state nobody waits"


def test_an_attempt_that_is_given_up_is_waited_for_no_longer(place_url: str) -> None:
    other = CheckpointStorage(place_url)

    def fail() -> Iterator[None]:
        yield
        other.give_up(12, "other")
        yield

    other.write_pieces(12, 0, image_at(12).pieces, "other")
    world, sleeper = survivor(place_url, fail())
    world.saver.save()
    assert world.take() == ["saved 12"]
    assert sleeper.naps == 2


def test_what_a_survivor_writes_is_seen_to_grow_before_a_file_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "SHOW_EVERY_S", 0.0)
    storage = CheckpointStorage(f"memory://{uuid.uuid4().hex}/run")
    seen: list[dict[str, int]] = []
    manifest = storage.write(
        image_at(12), lambda size_bytes: seen.extend(storage.attempts(12).values()), beside_others=True
    )
    grown = [files[growth.GROWTH] for files in seen if growth.GROWTH in files]
    assert len(set(grown)) > 2
    assert grown == sorted(grown)
    (files,) = storage._place.list().values()
    assert sorted(files) == sorted([MANIFEST, *(file.name for file in manifest.files)])


# -- a storage that hangs ---------------------------------------------------------------------------------------


def test_who_waits_for_a_storage_says_so_ever_more_seldom() -> None:
    now = 0.0
    patience = Patience(lambda: now, hangs_after_s=60)
    said: list[tuple[int, str]] = []

    def wait(until: int) -> None:
        nonlocal now
        while now < until:
            now += 1
            if (hanging := patience.overdue()) is not None:
                said.append((int(now), hanging.text))

    wait(500)
    assert said == [], "nothing is asked of it"
    with patience.asking("writing x", 7, size_bytes=10_000_000):
        wait(550)
        patience.went_on(2_000_000)
        wait(900)
    wait(2000)
    assert [at - 550 for at, _ in said] == [60, 120, 240]
    assert (
        said[0][1]
        == "the storage hangs: writing x, after 2 MB of 10 MB: nothing has come of it for 1 min 0 s"
    )
    with patience.asking("looking", 7):
        wait(2060)
    assert said[-1][1] == "the storage hangs: looking: nothing has come of it for 1 min 0 s"


def test_a_storage_that_hangs_is_told_while_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes some bytes and no more; one thread waits for it, another says so; and then it goes on."""
    said: queue.SimpleQueue[Result] = queue.SimpleQueue()
    snapshots, commands = Snapshots(), queue.SimpleQueue[bytes]()
    snapshots.commits = 5
    hangs, goes_on = threading.Event(), threading.Event()
    write = Flushed.write

    def slow(file: Flushed, data: bytes | memoryview) -> int:
        hangs.set()
        goes_on.wait()
        return write(file, data)

    monkeypatch.setattr(Flushed, "write", slow)
    now = 1000.0
    service = Service(lambda folder, run_id: snapshots, said.put, Rng(1), now=lambda: now)
    commands.put(encode_line(Command(watch=str(tmp_path), url=str(tmp_path / "out"), hangs_after_s=60)))
    commands.put(encode_line(Command(finish=True)))
    serving = threading.Thread(target=service.serve, args=(commands,), daemon=True)
    serving.start()
    assert said.get().ready
    hangs.wait()
    service.look_after()
    assert said.empty()
    now += 60
    for _ in range(3):
        service.look_after()
    failed = said.get_nowait()
    assert said.empty(), "it is said once"
    assert failed.commits == 5
    assert f"writing the checkpoint of commit 5 to {tmp_path}/out" in failed.failed
    assert "for 1 min" in failed.failed
    goes_on.set()
    while (heard := said.get()).done_bytes:
        pass
    assert heard.saved == 5
    serving.join()


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
