"""Parts of shards that count at commits, and shards that are read but not done: the core."""

from __future__ import annotations

import pytest

from stoker.wire.shards import (
    CommitShards,
    ImportShards,
    LeaseShard,
    Mark,
    NoMoreShards,
    RecordSplit,
    Shard,
    ShardRefused,
    ShardsCommitted,
    StateLoaded,
)
from tests.unit.shard_job import TIMEOUT_S, Job


def marked(job: Job, worker: str, shard: Shard, read: int) -> Mark:
    lease = max(n for (w, n), a in job.replies.items() if w == worker and getattr(a, "shard", None) == shard)
    return Mark(shard.number, lease, read, shard.rewinds)


def commit(job: Job, worker: str, *marks: Mark, number: int = 0) -> ShardsCommitted:
    return job.get(ShardsCommitted, worker, CommitShards("train", marks), number)


def handed(job: Job, worker: str, *shards: Shard, at: int = 0) -> None:
    """Ask for another, and wait."""
    answer = job.ask(worker, LeaseShard("train", tuple(shard.number for shard in shards), at))
    assert answer is None


@pytest.mark.parametrize("restarts", [False, True])
def test_only_what_is_not_committed_is_given_out_again(restarts: bool) -> None:
    job = Job()
    first, second = job.lease("w1"), job.lease("w1")
    said = commit(job, "w1", marked(job, "w1", first, 10), marked(job, "w1", second, 4))
    assert not said.refused
    assert [(shard.number, shard.read) for shard in said.state.open] == [(1, 4)]
    if restarts:
        job.restart()
    job.gone("w1")
    again = job.lease("w2")
    assert (again.number, again.start, again.stop, again.read) == (1, 10, 20, 4)
    commit(job, "w2", marked(job, "w2", again, 10))
    assert job.status().done == 2


def test_all_of_a_commit_counts_or_none() -> None:
    job = Job()
    first = job.lease("w1")
    job.tick(TIMEOUT_S / 2)
    second = job.lease("w1")
    job.tick(TIMEOUT_S / 2)
    said = commit(job, "w1", marked(job, "w1", second, 5), marked(job, "w1", first, 10))
    assert said.refused == "shard 0 of train is not leased by w1 any more"
    assert [shard.read for shard in job.state().open] == [0, 0]


def test_a_repeated_commit_counts_once_and_is_answered_alike() -> None:
    job = Job()
    shard = job.lease("w1")
    late = Mark(shard.number, 1000, 10)
    assert commit(job, "w1", marked(job, "w1", shard, 10), number=50) == commit(
        job, "w1", marked(job, "w1", shard, 10), number=50
    )
    assert commit(job, "w1", late, number=51).refused
    job.restart()
    assert not commit(job, "w1", marked(job, "w1", shard, 10), number=50).refused
    assert commit(job, "w1", late, number=51).refused
    assert job.status().done == 1


@pytest.mark.parametrize("read", [3, 11])
def test_a_commit_of_records_that_cannot_have_been_read_is_refused(read: int) -> None:
    job = Job()
    shard = job.lease("w1")
    commit(job, "w1", marked(job, "w1", shard, 4))
    refused = job.get(ShardRefused, "w1", CommitShards("train", (marked(job, "w1", shard, read),)))
    assert f"cannot be read up to {read}" in refused.why


def test_a_commit_makes_leases_last() -> None:
    job = Job()
    shard = job.lease("w1")
    job.tick(TIMEOUT_S - 1)
    commit(job, "w1", marked(job, "w1", shard, 4))
    job.tick(TIMEOUT_S - 1)
    assert not commit(job, "w1", marked(job, "w1", shard, 5)).refused


def test_two_that_have_read_the_last_shards_do_not_wait_for_each_other() -> None:
    job = Job(RecordSplit(20, 10))
    first, second = job.lease("w1"), job.lease("w2")
    handed(job, "w1", first)
    waits = job.calls["w1"]
    assert job.ask("w2", LeaseShard("train", (second.number,))) == NoMoreShards()
    assert job.replies["w1", waits] == NoMoreShards()
    assert job.status().done == 0
    job.gone("w2")
    assert job.lease("w3").number == second.number, "it was never done"
    job.report("w1", first)
    assert job.status().done == 1


def test_shards_that_are_read_are_not_lost_to_their_timeout_while_their_worker_waits() -> None:
    job = Job(RecordSplit(20, 10))
    first, second = job.lease("w1"), job.lease("w2")
    job.tick(TIMEOUT_S / 2)
    handed(job, "w1", first)
    for read in range(5):
        commit(job, "w2", marked(job, "w2", second, read))
        job.tick(TIMEOUT_S / 2)
    assert job.status().failures == 0
    assert job.report("w1", first).accepted


def test_a_shard_that_is_to_be_read_again_is_read_no_more() -> None:
    job = Job(RecordSplit(20, 10))
    first, second = job.lease("w1"), job.lease("w2")
    handed(job, "w1", first, at=7)
    handed(job, "w1", at=9)
    handed(job, "w1", first, at=8)  # an older word, which comes late
    handed(job, "w2", second)
    job.tick(TIMEOUT_S)
    job.tick(TIMEOUT_S / 2)
    assert job.status().failures == 1, "its lease runs out as that of any other"
    handed(job, "w1", at=10)
    assert second.number in job.core.queues["train"].handed, "it is another worker's"


def test_nobody_else_says_that_a_workers_shard_is_read() -> None:
    job = Job(RecordSplit(10, 10))
    shard = job.lease("w1")
    handed(job, "w2", shard)
    job.tick(TIMEOUT_S)
    assert job.status().failures == 1


def test_a_state_that_begins_a_job_is_taken_over_once() -> None:
    saved = Job()
    shard = saved.lease("w1")
    state = commit(saved, "w1", marked(saved, "w1", shard, 7)).state
    job = Job()
    for worker in ("w1", "w2"):
        job.get(StateLoaded, worker, ImportShards(state, only_new=True))
        assert job.lease(worker).read == (7 if worker == "w1" else 0)
    assert job.status().doing == 2
