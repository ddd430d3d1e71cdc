"""10,000 seeded worlds against the shipping machines, and proof that the simulation can find a fault."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from stoker.data.audit import Report, audit
from stoker.job import membership, watch
from stoker.job.events import Effect, Keep, ScaleRequested
from stoker.job.generations import Generations
from stoker.job.machine import JobMachine
from stoker.job.membership import Candidate
from stoker.job.nodes import Presence
from stoker.job.roster import Roster
from stoker.job.state import JobState
from stoker.train.member import MemberCore
from stoker.wire.job import World
from tests.sim import job_world
from tests.sim.job_faults import Faults
from tests.sim.job_invariants import Invariants
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
    seed = next(seed for seed in range(1, 100) if play("job", seed, 1)[1])  # the first one that ends well
    _, failures = play("job", seed, 1)
    assert "1 records were never read" in failures[0]
    assert f"replay: python -m tests.sim.run --kind job --seed {seed} --worlds 1" in failures[0]


def cut_off(seed: int) -> str:
    """All who hold the state are cut off from the master for long, while a fresh node comes."""
    world = JobWorld(seed, faults=False)
    world.config = replace(world.config, min_nodes=1, max_nodes=8)
    world.machine = JobMachine(world.config)
    world.records, world.batch, world.epochs = 60, 1, 3
    world.broken.clear()

    def cut() -> None:
        for node in world.nodes:
            node.cut_until = world.loop.now + 30.0

    world.loop.after(6.0, cut)
    world.add_node(1, 9.0)
    return world.run()


def test_of_two_sides_only_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        assert cut_off(seed).startswith("done")
    monkeypatch.setattr(watch, "would_survive", lambda *_: True)
    monkeypatch.setattr(Invariants, "_check_loss", lambda *_: None)  # which would find it sooner
    with pytest.raises(AssertionError, match=r"a step of generation \d+ is complete while \d+ trains"):
        [cut_off(seed) for seed in range(30)]


def test_a_master_that_forgets_a_worlds_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the nodes, which know it, are not believed: with either of the two no world would be wrong."""
    original = JobState.changed_records

    def forgetful(self: JobState) -> list[Effect]:
        return [e for e in original(self) if not (isinstance(e, Keep) and e.key in ("world", "job"))]

    monkeypatch.setattr(JobState, "changed_records", forgetful)
    assert not violations(range(150))
    monkeypatch.setattr(Presence, "_note_generation", lambda *_: None)
    found = violations(range(150))
    assert any("two worlds in generation" in what for what in found)
    assert any("a step of generation 1 is complete while" in what for what in found)


def test_the_masters_death_alone_changes_nothing() -> None:
    """Jobs in which nothing else goes wrong: as many generations with a master that dies again and again as without."""
    for seed in range(40):
        calm, troubled = JobWorld(seed, faults=False), JobWorld(seed, faults=False)
        for at in range(4, 60, 5):
            troubled.loop.after(at + 0.3, troubled.lose_master)
        assert calm.run().startswith("done")
        assert troubled.run().startswith("done")
        assert len(troubled.worlds) == len(calm.worlds), "\n".join(troubled.log)


def test_a_master_that_is_stopped_for_longer_than_its_nodes_wait_changes_nothing() -> None:
    """They hang up on it, and come back: nobody is given up, and no world is left."""
    for seed in range(40):
        calm, troubled = JobWorld(seed, faults=False), JobWorld(seed, faults=False)
        for at in range(4, 60, 15):
            troubled.loop.after(at + 0.3, troubled.stop_master)
        assert calm.run().startswith("done")
        assert troubled.run().startswith("done")
        assert len(troubled.worlds) == len(calm.worlds), "\n".join(troubled.log)


def scaled(seed: int, *deaths: float) -> JobWorld:
    """A job with `--auto-scale apply` and nothing that goes wrong; all its nodes run workers from 5 s on."""
    world = JobWorld(seed, faults=False)
    most = world.config.max_nodes
    world.config = replace(world.config, min_nodes=1, auto_scale="apply")
    world.machine = JobMachine(world.config)
    world.records, world.batch, world.epochs = 120, 1, 1
    world.loop.after(5.0, lambda: world.feed(ScaleRequested(most, "measured")))
    for at in deaths:
        world.loop.after(at, world.lose_master)
    assert world.run().startswith("done")
    return world


def test_the_masters_death_leaves_an_auto_scaled_job_its_size() -> None:
    """As many worlds with a master that dies again and again as without, the last of them of the same nodes. The jobs
    end before anything is measured: what is measured is forgotten with a master, and what follows from it comes later.
    """
    sizes = []
    for seed in range(30):
        calm, troubled = scaled(seed), scaled(seed, *(at + 0.3 for at in range(10, 60, 5)))
        assert len(troubled.worlds) == len(calm.worlds), "\n".join(troubled.log)
        assert troubled.worlds[max(troubled.worlds)].members == calm.worlds[max(calm.worlds)].members
        sizes.append(len({m.node for m in calm.worlds[max(calm.worlds)].members}))
    assert max(sizes) > 1


def test_no_healthy_node_is_called_faulty_for_want_of_a_connection() -> None:
    """Checks under streams that are reset and messages that are lost, in jobs in which nothing else goes wrong."""
    repeated = 0
    for seed in range(60):
        world = JobWorld(seed, faults=False)
        world.config = replace(world.config, check_nodes=True)
        world.machine = JobMachine(world.config)
        world.broken, world.loss = set(), 0.3
        for at in range(1, 20):
            world.loop.after(at / 2, Faults(world).reset_stream)
        assert world.run().startswith("done"), "\n".join(world.log)
        assert not [line for line in world.log if "node-cordoned" in line], "\n".join(world.log)
        repeated += sum("node-back" in line for line in world.log)
    assert repeated > 100


def test_leaves_and_joins_alone_cost_no_step() -> None:
    """Nodes leave, are drained, come and are scaled, the last one that has the state among them."""
    finished = 0
    for seed in range(60):
        world = JobWorld(seed, faults=False)
        world.config = replace(world.config, min_nodes=1, max_nodes=8)
        world.machine = JobMachine(world.config)
        world.records, world.batch, world.epochs = 60, 1, 3
        world.broken.clear()
        faults = Faults(world)
        for _ in range(4):
            change = world.rng.choice(
                (faults.leave_node, faults.ask_node, faults.scale, lambda: world.add_node(1, 0.0))  # noqa: B023
            )
            world.loop.after(world.rng.uniform(8, 30), change)
        if world.run().startswith("done"):
            finished += 1
            report = audit(world.entries, {"d": world.records}, world.epochs)
            assert report.steps_lost == 0, "\n".join([f"seed {seed}", *world.log])
    assert finished > 30


def test_a_newcomer_that_is_taken_for_a_holder_of_the_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def anybody(generations: Generations, roster: Roster, without: set[str]) -> bool:
        members = (roster.workers.get(name) for name in generations.members)
        return generations.world is None or any(
            w is not None and not w.ended and w.worker not in without and not w.stopped_s for w in members
        )

    monkeypatch.setattr(watch, "would_survive", anybody)
    assert violations(range(60))
