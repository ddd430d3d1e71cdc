"""Seeded worlds around a mount that is written to, and proof that they can find a fault."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.cache.mount.files import Files
from stoker.cache.mount.finding import Finding
from stoker.cache.mount.handles import Handles
from stoker.cache.mount.moving import Moving
from stoker.cache.mount.putting import Putting
from stoker.cache.mount.questions import Effect
from stoker.cache.mount.requests import Header
from stoker.cache.mount.staged import Busy, StagedFiles
from stoker.cache.mount.state import MountState
from stoker.cache.mount.writing import WritingFiles
from tests.sim.mount_writing_world import MountWritingWorld, run_world

Patch = tuple[object, str, Any]
WORLDS = int(os.environ.get("STOKER_SIM_WORLDS", "300"))


@pytest.mark.timeout(900)
def test_hundreds_of_worlds_hold_their_invariants() -> None:
    for seed in range(WORLDS):
        run_world(seed)


def test_the_worlds_are_rough_enough(tmp_path: Path) -> None:
    """Each of these moments comes up, or the invariants say little."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = MountWritingWorld(seed, folder)
        world.run()
        seen += world.kernel.seen
        seen["deaths"] += world.driver.deaths
        seen += Counter(line.rsplit(": ", 1)[-1] for line in world.story)
        seen += Counter(type(question).__name__ for question in world.source.asked)
        seen["kept"] += len(world.source.kept)
        seen["made whole"] += sum("has synced" in line for line in world.story)
    for moment in (
        "deaths", "resent", "a program is killed", "read by who knows", "EINTR", "EIO", "ENOSPC", "EBUSY", "Put",
        "Stage", "StageDrop", "Remove", "Rename", "MakeFolder", "RemoveFolder", "kept", "made whole",
        "listed while it is written", "listed by who knows",
    ):  # fmt: skip
        assert seen[moment] > 5, (moment, seen)


def test_a_world_is_its_seed(tmp_path: Path) -> None:
    def story(seed: int, again: int) -> list[str]:
        folder = tmp_path / f"{seed}-{again}"
        folder.mkdir()
        world = MountWritingWorld(seed, folder)
        world.run()
        return world.story

    assert [story(seed, 1) for seed in range(10)] == [story(seed, 2) for seed in range(10)]


def as_ever(self: Busy, paths: object, again: object) -> bool:
    """Nobody waits for another one."""
    self._waiting.update((path, []) for path in paths)  # type: ignore[attr-defined]
    return True


def copies(finding: Finding, path: str, to: str, *, replaces: bool) -> object:
    """A rename that leaves the old name."""
    found = finding._source.find(path)
    return found, finding._source.copy(path, to)


def of_the_living(self: WritingFiles, header: Header, handle: int, now: float) -> list[Effect]:
    """As if whoever was killed had closed it."""
    return FLUSH(self, header._replace(pid=abs(header.pid)), handle, now)


@pytest.mark.parametrize(
    ("patch", "violation"),
    [
        ((Busy, "take", as_ever), "(?s).*"),
        ((Putting, "finish", lambda self, staged, now: self._begin(staged, now)), "nobody has made whole"),
        ((WritingFiles, "flush", of_the_living), "nobody has made whole"),
        ((Putting, "drop_superseded", lambda *_: []), "are left on the disk"),
        ((Handles, "opened_by", lambda *_: None), "(?s).*"),
        ((Moving, "_is_removed", lambda *_: []), "(?s).*"),
        ((StagedFiles, "new_in", lambda *_: []), "is writing"),
        ((StagedFiles, "records_of", lambda *_: []), "(?s).*"),
        ((MountState, "named", lambda _, node: node.named()), "the next daemon would know"),
        ((Files, "close", lambda self, unique, handle, now: CLOSE(self, unique, handle, now)[:2]), "(?s).*"),
        ((Finding, "_rename", copies), "(?s).*"),
    ],
    ids=lambda given: f"{given[0].__name__}.{given[1]}" if isinstance(given, tuple) else "",
)
def test_the_worlds_notice(patch: Patch, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*patch)
    with pytest.raises(Exception, match=violation):
        _ = [run_world(seed) for seed in range(600)]


CLOSE, FLUSH = Files.close, WritingFiles.flush
