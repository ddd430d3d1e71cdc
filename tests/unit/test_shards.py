"""The core of dynamic shards, one story at a time. `tests/sim/shard_world.py` mixes them."""

from __future__ import annotations

import pytest

from stoker.job.shard_queue import OTHERS_SOUGHT
from stoker.job.shards import OPEN_CALLS_MAX, FailJob, Requeued
from stoker.wire.shards import (
    AddRecords,
    DatasetRegistered,
    DatasetSpec,
    EndStream,
    LeaseShard,
    NoMoreShards,
    RecordSplit,
    RegisterDataset,
    ReportShard,
    ShardCall,
    ShardLeased,
    ShardRefused,
    StateLoaded,
    StreamExtended,
    StreamSplit,
)
from tests.unit.shard_job import TIMEOUT_S, Job


def test_shards_go_from_todo_over_doing_to_done() -> None:
    job = Job(RecordSplit(25, 10, epochs=2))
    shards = []
    for turn in range(6):
        shards.append(job.lease(f"w{turn % 3}"))
        assert job.report(f"w{turn % 3}", shards[-1]).accepted
    assert [(s.number, s.epoch, s.start, s.stop) for s in shards] == [
        (0, 0, 0, 10),
        (1, 0, 10, 20),
        (2, 0, 20, 25),
        (3, 1, 0, 10),
        (4, 1, 10, 20),
        (5, 1, 20, 25),
    ]
    assert job.get(NoMoreShards, "w1", LeaseShard("train"))
    status = job.status()
    assert (status.total, status.done, status.doing, status.todo, status.is_finished) == (6, 6, 0, 0, True)


def test_who_must_wait_is_answered_when_a_shard_comes_back() -> None:
    job = Job()
    first, *_ = [job.lease(f"w{n}") for n in range(3)]
    early, late = job.wait("w3"), job.wait("w4")
    assert job.status().waiting == 2
    job.report("w0", first, "returned")
    assert job.replies["w3", early] == ShardLeased(first, early)
    assert ("w4", late) not in job.replies
    assert Requeued("train", 0, 0, "w0 has returned shard 0 of train") in job.decision.effects


def test_who_waits_is_told_of_the_end() -> None:
    job = Job()
    shards = [job.lease("w0") for _ in range(3)]
    waiting = job.wait("w1")
    for shard in shards:
        assert ("w1", waiting) not in job.replies
        job.report("w0", shard)
    assert job.replies["w1", waiting] == NoMoreShards()


def test_a_lease_that_times_out_goes_to_the_next_worker_and_comes_first() -> None:
    job = Job()
    shard = job.lease("w0")
    assert job.core.next_deadline() == job.now + TIMEOUT_S
    assert not job.tick(TIMEOUT_S - 1).effects
    job.tick(1)
    assert job.lease("w1") == shard
    assert job.status().failures == 1
    assert not job.report("w0", shard, "failed", "too late").accepted, "the shard is another worker's"


def test_the_first_report_of_done_counts_whoever_makes_it() -> None:
    job = Job()
    shard = job.lease("w0")
    job.tick(TIMEOUT_S)
    assert job.lease("w1") == shard
    assert job.report("w0", shard).accepted
    again = job.report("w1", shard)
    assert not again.accepted
    assert again.why == "shard 0 of train was done before w1 reported on it"
    assert job.status().done == 1


def test_a_dead_workers_shards_go_back_and_who_is_blamed_has_failed() -> None:
    job = Job(max_failures=1)
    shard = job.lease("w0")
    job.gone("w0")
    assert job.status().failures == 0
    assert job.lease("w1") == shard
    job.gone("w1", blame=True)
    assert job.failure() == (
        "shard 0 of dataset 'train' (records [0, 10) of epoch 0) failed 1 times, last with: w1 is gone: "
        "killed by signal 9"
    )


def test_a_shard_that_keeps_failing_fails_the_job_and_never_disappears() -> None:
    job = Job(max_failures=3)
    good = [job.lease("good"), job.lease("good")]
    for shard in good:
        job.report("good", shard)
    for attempt in range(3):
        shard = job.lease(f"w{attempt}")
        waiting = job.wait("late") if attempt == 2 else 0
        job.report(f"w{attempt}", shard, "failed", f"ValueError: bad record, attempt {attempt}")
    why = job.failure()
    assert "shard 2 of dataset 'train' (records [20, 30) of epoch 0) failed 3 times" in why
    assert why.endswith("last with: ValueError: bad record, attempt 2")
    assert job.replies["late", waiting] == ShardRefused(why, job_failed=True)
    assert job.get(ShardRefused, "good", LeaseShard("train")).job_failed
    assert not job.status().is_finished
    restored = job.restart()
    assert restored.effects == (FailJob("train", 2, why),)
    assert job.get(ShardRefused, "good", LeaseShard("train")) == ShardRefused(why, job_failed=True)


def test_a_failed_job_answers_those_who_wait_for_other_datasets() -> None:
    job = Job(max_failures=1)
    job.ask("w0", RegisterDataset("other", DatasetSpec(StreamSplit(5), TIMEOUT_S)))
    assert job.ask("w1", LeaseShard("other")) is None
    shard = job.lease("w0")
    job.report("w0", shard, "failed", "no")
    assert isinstance(job.replies["w1", 1], ShardRefused)


def test_timeouts_say_what_to_do() -> None:
    job = Job(max_failures=2)
    for worker in ("w0", "w1"):
        job.lease(worker)
        job.tick(TIMEOUT_S)
    assert (
        "w1 did not finish it within 30 s; if shards take that long, raise lease_timeout_s" in job.failure()
    )


def test_a_worker_gets_its_failures_back_last() -> None:
    job = Job()
    bad = job.lease("broken")
    job.report("broken", bad, "failed", "no disk")
    assert [job.lease("broken").number for _ in range(3)] == [1, 2, 0]


def test_a_worker_that_fails_at_everything_does_not_fill_the_memory() -> None:
    job = Job(RecordSplit(10**9, 10), max_failures=1000)
    for _ in range(200):
        job.report("broken", job.lease("broken"), "failed", "no disk")
        assert len(job.core.queues["train"].open) <= OTHERS_SOUGHT
    assert job.lease("good").number < OTHERS_SOUGHT


def test_one_worker_cannot_take_everything() -> None:
    job = Job(RecordSplit(10**9, 10))
    for _ in range(OPEN_CALLS_MAX):
        job.lease("greedy")
    assert "report on them before" in job.get(ShardRefused, "greedy", LeaseShard("train")).why
    assert job.lease("modest")


def test_registering_twice_must_say_the_same() -> None:
    job = Job(RecordSplit(30, 10, epochs=2))
    assert job.get(DatasetRegistered, "w1", RegisterDataset("train", job.spec)).shards == 6
    for spec in (
        DatasetSpec(RecordSplit(30, 10, epochs=3), TIMEOUT_S),
        DatasetSpec(RecordSplit(31, 10, epochs=2), TIMEOUT_S),
        DatasetSpec(RecordSplit(30, 10, epochs=2), TIMEOUT_S, 4),
    ):
        why = job.get(ShardRefused, "w1", RegisterDataset("train", spec)).why
        assert "'train' was registered by w0 as DatasetSpec(split=RecordSplit(records=30," in why
        assert f"but w1 says {spec}" in why
    job.restart()
    assert "by w0 as" in job.get(ShardRefused, "w1", RegisterDataset("train", spec)).why


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (LeaseShard("test"), r"no dataset 'test': register it first \(registered: train\)"),
        (ReportShard("train", 0, 1), "shard 0 of train was never handed out"),
        (ReportShard("train", -1, 1), "was never handed out"),
        (AddRecords("train", 5), "is no stream"),
        (EndStream("train"), "is no stream"),
        (RegisterDataset("a/b", DatasetSpec(RecordSplit(1, 1), 1.0)), "is not a dataset name"),
        (RegisterDataset("test", DatasetSpec(RecordSplit(0, 1), 1.0)), "records=0 cannot be"),
    ],
)
def test_calls_that_make_no_sense_are_refused_and_change_nothing(call: ShardCall, why: str) -> None:
    job = Job()
    before = dict(job.records)
    with pytest.raises(AssertionError, match=why):
        job.get(StateLoaded, "w0", call)
    assert job.records == before
    assert not job.decision.keep


def test_a_stream_is_handed_out_as_it_comes() -> None:
    job = Job(StreamSplit(10))
    waiting = job.wait("w0")
    assert job.get(StreamExtended, "feeder", AddRecords("train", 15, "p", 3)).stop == 15
    first = job.replies["w0", waiting]
    assert isinstance(first, ShardLeased)
    assert (first.shard.partition, first.shard.start, first.shard.stop) == ("p", 3, 13)
    assert job.get(StreamExtended, "feeder", AddRecords("train", 12, "p")).stop == 15
    job.restart()
    second = job.lease("w1")
    assert (second.start, second.stop) == (13, 15)
    job.report("w0", first.shard, "failed", "no")
    assert job.lease("w2") == first.shard
    assert "gap" in job.get(ShardRefused, "feeder", AddRecords("train", 30, "p", 20)).why
    job.ask("feeder", EndStream("train"))
    last = job.wait("w1")
    job.report("w1", second)
    job.restart()
    assert job.ask("w1", LeaseShard("train"), last) is None, "who waits asks again"
    job.report("w2", first.shard)
    assert job.replies["w1", last] == NoMoreShards()
    assert job.status().total == -1


def test_who_waits_is_forgotten_when_gone() -> None:
    job = Job()
    shards = [job.lease("w0") for _ in range(3)]
    job.wait("w1")
    job.gone("w1")
    assert job.status().waiting == 0
    job.report("w0", shards[0], "returned")
    assert job.status().doing == 2
    job.gone("w0")
    assert job.core.workers == frozenset()
    assert not [key for key in job.records if "@worker" in key]
