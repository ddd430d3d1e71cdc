"""10,000 seeded worlds against the shipping machines, and proof that the simulation can find a fault."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stoker.data.audit import Report
from stoker.job import membership
from stoker.job.membership import Candidate
from stoker.train.member import MemberCore
from stoker.wire.job import World
from tests.sim import job_world
from tests.sim.job_world import JobWorld, run_world
from tests.sim.run import main, play


@pytest.mark.timeout(600)
def test_ten_thousand_worlds_hold_their_invariants(capsys: pytest.CaptureFixture[str]) -> None:
    worlds = os.environ.get("STOKER_SIM_WORLDS", "10000")
    code = main(["--kind", "job", "--seed", "1", "--worlds", worlds])
    print(capsys.readouterr().out)
    assert code == 0


def test_a_world_is_its_seed() -> None:
    first, second = JobWorld(12), JobWorld(12)
    assert first.run() == second.run()
    assert first.log == second.log


def violations(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        try:
            run_world(seed)
        except AssertionError as error:
            found.append(str(error).rsplit("VIOLATED: ", 1)[-1])
    return found


def test_a_wrong_source_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def youngest(ordered: list[Candidate]) -> int:
        return min(range(len(ordered)), key=lambda rank: ordered[rank].commits)

    monkeypatch.setattr(membership, "_source_rank", youngest)
    assert any(
        "does not stand at a commit" in v or "another state" in v or "read" in v
        for v in violations(range(150))
    )


def test_a_world_that_is_entered_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(self: MemberCore) -> World | None:
        return self.order.world if self.phase == "parked" else None

    monkeypatch.setattr(MemberCore, "offered_world", eager)
    assert violations(range(150))


def test_a_lost_step_that_is_not_undone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemberCore.leave

    def careless(self: MemberCore, **said: Any) -> None:
        original(self, **{**said, "clean": True})

    monkeypatch.setattr(MemberCore, "leave", careless)
    found = violations(range(600))
    assert any("a state nobody committed" in v or "with another state" in v for v in found), found


def test_a_failing_seed_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_world, "audit", lambda *_: Report(missed=1))
    _, failures = play("job", 3, 1)
    assert "1 records were never read" in failures[0]
    assert "replay: python -m tests.sim.run --kind job --seed 3 --worlds 1" in failures[0]
