"""Seeded worlds around the core of a mount, and proof that they can find a fault."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stoker.cache.mount import waiting
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.files import Files
from stoker.cache.mount.handles import Handles, OpenFolder
from stoker.cache.mount.known import Known
from stoker.cache.mount.nodes import NodeTable
from stoker.cache.mount.questions import CloseOtherBackings, Effect
from stoker.cache.mount.source_port import Page
from stoker.cache.mount.state import MountState
from stoker.cache.mount.waiting import Waiting
from tests.sim.mount_world import MountWorld, run_world

Patch = tuple[object, str, Callable[..., Any]]


@pytest.mark.timeout(600)
def test_hundreds_of_worlds_hold_their_invariants() -> None:
    for seed in range(int(os.environ.get("STOKER_SIM_WORLDS", "400"))):
        run_world(seed)


def test_the_worlds_are_rough_enough() -> None:
    """Each of these moments comes up, or the invariants say little."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        world = MountWorld(seed)
        world.run()
        seen += world.kernel.seen
        seen["deaths"] += world.driver.deaths
        seen += Counter(line.rsplit(": ", 1)[-1] for line in world.story)
        seen += Counter(type(question).__name__ for question in world.source.asked)
    for moment in (
        "deaths", "resent", "ESTALE at OPEN", "opened by a backing file", "opened by requests",
        "killed before it was read", "notice INVAL_ENTRY", "EINTR", "ETIMEDOUT", "EIO", "ESTALE", "Refresh", "Back",
        "Read", "List", "Status", "Fetch",
    ):  # fmt: skip
        assert seen[moment] > 5, (moment, seen)


def test_a_world_is_its_seed() -> None:
    def story(seed: int) -> list[str]:
        world = MountWorld(seed)
        world.run()
        return world.story

    assert [story(seed) for seed in range(10)] == [story(seed) for seed in range(10)]


def without(method: Callable[..., list[Effect]], kind: type[Effect]) -> Callable[..., list[Effect]]:
    """What it has done, but for that."""
    return lambda *given: [effect for effect in method(*given) if not isinstance(effect, kind)]


def by_first_page(self: OpenFolder, start: int, page: Page, asked_at: float) -> list[tuple[int, str | None]]:
    """What was once known of where pages begin stays."""
    self.page, self.page_at = (start, page), asked_at
    following = start + len(page.entries)
    if page.after is None or following <= self.starts[-1][0]:
        return []
    self.add_start(following, page.after)
    return [(following, page.after)]


@pytest.mark.parametrize(
    ("patch", "violation"),
    [
        ((waiting, "type", lambda _: None), "(?s).*"),
        ((Known, "is_old", lambda *_: False), "since change"),
        ((Known, "drop_below", lambda *_: None), "since change"),
        ((NodeTable, "below", lambda *_: []), "since change"),
        ((Waiting, "tick", lambda *_: []), "wait for too long"),
        ((OpenFolder, "turn_to", by_first_page), "were listed|all the time"),
        (
            (Handles, "backing_of", lambda *_: None),
            "another way|from a backing file|EIO, for no reason|are never closed",
        ),
        ((Files, "backed", lambda *_: []), "are never closed"),
        ((Handles, "opened_by", lambda *_: None), "are never closed|has it open"),
        ((Handles, "folder_opened_by", lambda *_: 0), "has it open"),
        ((MountCore, "begin", without(MountCore.begin, CloseOtherBackings)), "are never closed"),
        ((MountState, "told", lambda self, named: (TOLD(self, named)[0], [])), "the next daemon would know"),
        ((NodeTable, "forget", lambda *_: None), "the daemon has not|was looked up"),
        (
            (NodeTable, "number_of", lambda self, path, **_: NUMBER_OF(self, path)),
            "another file than before|no version is so long|is not|was one of",
        ),
    ],
    ids=lambda given: (
        f"{getattr(given[0], '__name__', given[0])}.{given[1]}" if isinstance(given, tuple) else ""
    ),
)
def test_the_worlds_notice(patch: Patch, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*patch, raising=False)
    with pytest.raises(Exception, match=violation):  # some defects are met by an assertion of the core
        _ = [run_world(seed) for seed in range(1000)]


TOLD = MountState.told
NUMBER_OF = NodeTable.number_of
