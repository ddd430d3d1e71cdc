"""Seeded worlds around the core of dynamic shards, and proof that they can find a fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

import pytest

from stoker.job.shard_queue import ShardQueue
from stoker.job.shard_records import DatasetRecords, OpenRecord
from stoker.job.shard_requests import WorkerCalls, WorkerRecord
from stoker.job.shards import Decision, Shards
from stoker.wire.shards import ReportShard
from tests.sim.shard_model import Model
from tests.sim.shard_world import ShardWorld, run_world


@pytest.mark.timeout(600)
def test_thousands_of_worlds_hold_their_invariants() -> None:
    verdicts = [run_world(seed) for seed in range(int(os.environ.get("STOKER_SIM_WORLDS", "2000")))]
    finished = sum(": finished after" in verdict for verdict in verdicts)
    assert 0.5 * len(verdicts) < finished < 0.95 * len(verdicts), (
        "worlds should end well or with a failed shard"
    )


def test_the_worlds_are_rough_enough() -> None:
    """Each of these moments comes up, or the invariants say little."""
    story = "\n".join(line for seed in range(300) for line in log_of(seed))
    for moment in (
        "the master dies",
        "repeats its report",
        "waits already",
        "holds shard",
        "though its lease was over",
        "was done before",
        "was put back since",
        "leases timed out",
        "reported on, before",
    ):
        assert moment in story, moment


def log_of(seed: int) -> list[str]:
    world = ShardWorld(seed)
    world.run()
    return world.log


def test_a_world_is_its_seed() -> None:
    assert log_of(12) == log_of(12)


def violations(seeds: range) -> Iterator[str]:
    for seed in seeds:
        try:
            run_world(seed)
        except AssertionError as error:
            yield str(error).rsplit("VIOLATED: ", 1)[-1]


def test_a_shard_that_is_dropped_after_its_failures_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DLRover does: the shard is given up, and the job succeeds without its records."""
    original: Callable[..., OpenRecord] = ShardQueue.give_back

    def careless(self: ShardQueue, number: int, failure: str = "") -> OpenRecord:
        entry = original(self, number, failure)
        if self.has_failed(entry):
            self.finish(number)
            return OpenRecord(entry.shard)
        return entry

    monkeypatch.setattr(ShardQueue, "give_back", careless)
    assert any("is counted wrongly" in v or "is said to be finished" in v for v in violations(range(2000)))


def test_a_master_that_forgets_what_it_answered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerCalls, "record", lambda self: WorkerRecord(answered=()))
    assert any("another answer than before" in v for v in violations(range(2000)))


def test_a_master_that_takes_the_leases_back_when_it_restarts_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = ShardQueue.restore

    def forgetful(self: ShardQueue, records: DatasetRecords, now: float) -> None:
        records.open = [OpenRecord(entry.shard) for entry in records.open]
        original(self, records, now)

    monkeypatch.setattr(ShardQueue, "restore", forgetful)
    assert any("leases: the core has" in v for v in violations(range(2000)))


def test_a_report_about_what_was_put_back_since_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ShardQueue.judge

    def gullible(self: ShardQueue, worker: str, report: ReportShard) -> tuple[bool, str]:
        accepted, why = original(self, worker, report)
        if not accepted and report.outcome == "done" and report.number in self.open:
            return True, why
        return accepted, why

    monkeypatch.setattr(ShardQueue, "judge", gullible)
    assert any("put back since" in v for v in violations(range(2000)))


def test_a_record_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Shards._decide

    def lossy(self: Shards, why: str) -> Decision:
        decision = original(self, why)
        kept: Mapping[str, bytes | None] = dict(decision.keep)
        return decision._replace(keep=tuple((k, v) for k, v in kept.items() if not k.endswith("/progress")))

    monkeypatch.setattr(Shards, "_decide", lossy)
    assert any("of another state" in v or "is done twice" in v for v in violations(range(2000)))


def test_a_failing_world_says_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "is_complete", lambda self, dataset: False)
    with pytest.raises(AssertionError, match=r"shard world \d+, the last events:"):
        _ = [run_world(seed) for seed in range(20)]
