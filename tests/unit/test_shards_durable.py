"""What the core of dynamic shards keeps: over repeated calls, restarts and checkpoints."""

from __future__ import annotations

import msgspec
import pytest

from stoker.errors import WireError
from stoker.wire.shards import (
    AddRecords,
    ImportShards,
    LeaseShard,
    NoMoreShards,
    RecordSplit,
    ReportShard,
    Shard,
    ShardLeased,
    ShardRefused,
    ShardReported,
    ShardState,
    StateLoaded,
    StreamPartition,
    StreamSplit,
    decode_answer,
    decode_call,
    encode,
)
from tests.unit.shard_job import TIMEOUT_S, Job


def test_a_call_that_is_repeated_gives_the_same_shard_also_over_a_restart() -> None:
    job = Job()
    shard = job.lease("w0")
    number = job.calls["w0"]
    for _ in range(2):
        assert job.get(ShardLeased, "w0", LeaseShard("train"), number).shard == shard
        assert not job.decision.keep
        job.restart()
    assert job.lease("w1").number == 1


def test_a_report_that_is_repeated_gets_the_same_answer_also_over_a_restart() -> None:
    job = Job()
    shard = job.lease("w0")
    job.tick(TIMEOUT_S)
    job.lease("w1")
    assert job.report("w0", shard).accepted
    accepted = ReportShard("train", 0, 1)
    late = job.report("w1", shard)
    assert not late.accepted
    for _ in range(2):
        assert job.get(ShardReported, "w0", accepted, job.calls["w0"]).accepted
        assert not job.get(ShardReported, "w1", accepted, job.calls["w1"]).accepted
        job.restart()
    assert job.status().done == 1


def test_a_late_copy_of_a_lease_call_leases_nothing() -> None:
    job = Job()
    shard = job.lease("w0")
    number = job.calls["w0"]
    job.report("w0", shard)
    for _ in range(2):
        assert "before" in job.get(ShardRefused, "w0", LeaseShard("train"), number).why
        assert job.status().doing == 0
        job.restart()


def test_workers_keep_their_leases_over_a_restart_and_are_given_their_whole_time() -> None:
    job = Job()
    shard = job.lease("w0")
    job.now += TIMEOUT_S - 1
    job.restart()
    assert not job.tick(TIMEOUT_S - 1).effects
    assert job.report("w0", shard).accepted
    assert job.core.workers == {"w0"}


def test_a_lease_that_ended_unseen_is_not_held_twice() -> None:
    """1. w0's call 2 leases shard 0, but the answer is on its way for too long. 2. The lease times out. 3. w0 repeats
    call 2 and is given shard 0 anew, or another. 4. The first answer arrives, w0 works and reports on it.
    """
    job = Job()
    shard = job.lease("w0")
    number = job.calls["w0"]
    job.tick(TIMEOUT_S)
    assert job.lease("w1") == shard
    del job.replies["w0", number]
    other = job.get(ShardLeased, "w0", LeaseShard("train"), number).shard
    assert other.number == 1
    assert job.report("w0", shard, lease=number).accepted
    assert job.status().doing == 0, "nobody works on shard 1: w0 has taken the first answer"
    assert job.lease("w2") == other
    assert "answered" in job.get(ShardRefused, "w0", LeaseShard("train"), number).why


def test_a_lease_of_the_same_worker_is_another_one() -> None:
    """Two threads of w0: the first one's lease of shard 0 times out and goes to the second, whose answer gets lost."""
    job = Job(RecordSplit(10, 10))
    shard = job.lease("w0")
    first = job.calls["w0"]
    second = job.wait("w0")
    job.tick(TIMEOUT_S)
    assert job.replies["w0", second] == ShardLeased(shard, second)
    assert not job.report("w0", shard, "returned", lease=first).accepted
    assert job.get(ShardLeased, "w0", LeaseShard("train"), second).shard == shard


def test_ten_million_shards_are_kept_in_a_few_small_records() -> None:
    job = Job(RecordSplit(10**9, 100, shuffle=True))
    held: list[tuple[str, Shard]] = []
    for turn in range(3000):
        worker = f"w{turn % 500}"
        held.append((worker, job.lease(worker)))
        assert len(job.decision.keep) == 1
        if len(held) >= 500:
            worker, shard = held.pop(turn % 7)
            call = ReportShard("train", shard.number, job.calls[worker] if worker == f"w{turn % 500}" else 1)
            job.get(ShardReported, worker, call)
            assert len(job.decision.keep) <= 3
            assert sum(len(key) + len(value or b"") for key, value in job.decision.keep) < 500
    assert len(job.records) <= 2 + 500 + 500
    before = job.state()
    job.restart()
    assert job.state() == before


def test_a_checkpoint_puts_the_progress_back() -> None:
    job = Job()
    done, held = job.lease("w0"), job.lease("w1")
    job.report("w0", done)
    saved = job.state()
    assert saved.handed_out == 2
    assert [shard.number for shard in saved.open] == [1]
    job.report("w1", held)
    lost = job.lease("w1")
    waiting = job.wait("w3")
    job.get(StateLoaded, "w0", ImportShards(saved))
    answer = job.replies["w3", waiting]
    assert isinstance(answer, ShardLeased)
    again = answer.shard
    assert (again.number, again.start, again.rewinds) == (1, held.start, 1)
    late = job.report("w1", lost)
    assert (late.accepted, "put back" in late.why) == (False, True)
    job.restart()
    assert job.report("w3", again).accepted
    assert job.lease("w4").number == 2
    assert job.status().done == 2


def test_a_repeated_import_puts_nothing_back() -> None:
    job = Job()
    saved = job.state()
    job.get(StateLoaded, "w0", ImportShards(saved))
    number = job.calls["w0"]
    job.report("w1", job.lease("w1"))
    for _ in range(2):
        job.get(StateLoaded, "w0", ImportShards(saved), number)
        assert job.status().done == 1
        job.restart()


def test_a_checkpoint_goes_on_in_a_new_job_with_more_epochs() -> None:
    job = Job(RecordSplit(30, 10, epochs=1, shuffle=True, seed=4))
    shards = [job.lease("w0") for _ in range(3)]
    job.report("w0", shards[0])
    job.report("w0", shards[2])
    saved = msgspec.convert(msgspec.to_builtins(job.state()), ShardState)
    other = Job(RecordSplit(30, 10, epochs=2, shuffle=True, seed=4))
    other.get(StateLoaded, "w0", ImportShards(saved))
    rest = [other.lease("w0") for _ in range(4)]
    assert [(s.epoch, s.number) for s in rest] == [(0, 1), (1, 3), (1, 4), (1, 5)]
    assert rest[0].start == shards[1].start
    shorter = Job(RecordSplit(10, 10))
    assert "was cut as" in shorter.get(ShardRefused, "w0", ImportShards(saved)).why


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (ShardState("train", RecordSplit(30, 10), 4), "stands at shard 4, but there are only 3"),
        (ShardState("train", RecordSplit(30, 10), -1), "does not fit together"),
        (ShardState("train", RecordSplit(30, 10), 1, (Shard(1, 0, 10, 20),)), "does not fit together"),
        (ShardState("train", RecordSplit(30, 10), 2, (Shard(1, 0, 10, 21),)), "does not fit together"),
        (ShardState("train", RecordSplit(30, 10), 2, (Shard(1, 0, 10, 20),) * 2), "does not fit together"),
        (ShardState("train", StreamSplit(10), 2), "was cut as StreamSplit"),
        (ShardState("test", RecordSplit(30, 10), 2), "no dataset 'test'"),
    ],
)
def test_a_state_that_is_not_this_datasets_is_refused(state: ShardState, why: str) -> None:
    job = Job()
    shard = job.lease("w1")
    assert why in job.get(ShardRefused, "w0", ImportShards(state)).why
    assert job.report("w1", shard).accepted


@pytest.mark.parametrize(
    "state",
    [
        ShardState("train", StreamSplit(10), 1, (), (StreamPartition("p", 0, 5, 6),)),
        ShardState("train", StreamSplit(10), 1, (), (StreamPartition("p" * 300, 0, 5, 5),)),
        ShardState("train", StreamSplit(10), 1, (), (StreamPartition("p", 0, 5, 5),) * 2),
        ShardState("train", StreamSplit(10), 1, (Shard(0, 0, 0, 5, "q"),), (StreamPartition("p", 0, 5, 5),)),
        ShardState("train", StreamSplit(10), 1, (Shard(0, 0, 0, 6, "p"),), (StreamPartition("p", 0, 8, 5),)),
    ],
)
def test_a_streams_state_must_fit_together(state: ShardState) -> None:
    job = Job(StreamSplit(10))
    job.ask("w0", AddRecords("train", 3, "p"))
    shard = job.lease("w1")
    assert "does not fit together" in job.get(ShardRefused, "w0", ImportShards(state)).why
    assert job.report("w1", shard).accepted


def test_a_streams_state_goes_on_in_a_new_job() -> None:
    job = Job(StreamSplit(4))
    job.ask("w0", AddRecords("train", 20, "p", 10))
    shards = [job.lease("w0"), job.lease("w0")]
    job.report("w0", shards[1])
    other = Job(StreamSplit(4))
    other.get(StateLoaded, "w0", ImportShards(job.state()))
    other.restart()
    assert [(s.start, s.stop) for s in (other.lease("w0"), other.lease("w0"))] == [(10, 14), (18, 20)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shards/train/progress", b"\xc1"),
        ("shards/train/progress", msgspec.msgpack.encode({"handed_out": "many"})),
        ("shards/train/what", b"\x80"),
        ("shards/test/progress", msgspec.msgpack.encode({"handed_out": 3})),
        ("shards/train", b""),
        ("shards/@worker/w0", b"\x01"),
        ("shards/x/spec", msgspec.msgpack.encode({"spec": {}, "worker": "w0"})),
    ],
)
def test_records_that_cannot_be_read_are_a_typed_error(key: str, value: bytes) -> None:
    job = Job()
    job.records[key] = value
    with pytest.raises(WireError, match=f"record '{key}' cannot be read: .*Start the job with a new journal"):
        job.restart()


def test_records_of_others_are_passed_over() -> None:
    job = Job()
    job.records |= {"job": b"\xc1", "worker/w0": b"\xc1"}
    job.restart()
    assert job.status().total == 3


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(NoMoreShards()), b"\x81\xa4type\xa5lease"])
def test_what_is_no_call_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(WireError, match="not a call of the shard service"):
        decode_call(body)
    with pytest.raises(WireError, match="not an answer of the shard service"):
        decode_answer(encode(LeaseShard("train")))
