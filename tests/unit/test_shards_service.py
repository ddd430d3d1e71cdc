"""The shard service behind the master's port."""

from __future__ import annotations

import msgspec
import pytest

from stoker.errors import WireError
from stoker.job.shard_service import ShardService
from stoker.wire.shards import (
    DatasetSpec,
    LeaseShard,
    RecordSplit,
    RegisterDataset,
    ReportShard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    decode_answer,
    encode,
)

SPEC = DatasetSpec(RecordSplit(20, 10), lease_timeout_s=5.0, max_failures=1)


class Desk:
    """Keeps what the service wants to be kept."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.failure = ""
        self.service = ShardService()

    def ask(self, worker: str, number: int, call: ShardCall) -> None:
        self.service.call(worker, number, encode(call), now=0.0)

    def take(self) -> dict[tuple[str, int], ShardAnswer]:
        served = self.service.take()
        for key, value in served.records.items():
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        self.failure = self.service.failure
        return {(a.worker, a.answer.number): decode_answer(a.answer.body) for a in served.answers}


def test_a_lease_survives_the_master_and_goes_back_when_its_worker_ends() -> None:
    desk = Desk()
    desk.ask("w0", 1, RegisterDataset("train", SPEC))
    desk.ask("w0", 2, LeaseShard("train"))
    desk.ask("w1", 1, LeaseShard("train"))
    desk.ask("w1", 2, LeaseShard("train"))
    answers = desk.take()
    assert isinstance(answers["w0", 2], ShardLeased)
    assert ("w1", 2) not in answers, "it waits"
    desk.service = ShardService(desk.records, now=100.0)
    desk.ask("w1", 2, LeaseShard("train"))
    desk.service.on_world(None, ["w0", "w1"], now=101.0)
    assert desk.take() == {}
    desk.service.on_world(None, ["w1"], now=102.0)
    assert desk.take()["w1", 2] == ShardLeased(answers["w0", 2].shard, 2)


def test_a_shard_that_fails_too_often_ends_the_job() -> None:
    desk = Desk()
    desk.ask("w0", 1, RegisterDataset("train", SPEC))
    desk.ask("w0", 2, LeaseShard("train"))
    desk.ask("w0", 3, ReportShard("train", 0, 2, "failed", "bad record"))
    desk.take()
    assert "shard 0 of dataset 'train'" in desk.failure
    desk.service = ShardService(desk.records)
    desk.take()
    assert desk.failure.endswith("bad record")


def test_an_end_counts_against_the_shard_only_if_its_records_may_have_brought_it_about() -> None:
    desk = Desk()
    patient = msgspec.structs.replace(SPEC, max_failures=2)
    desk.ask("w0", 1, RegisterDataset("train", patient))
    for number, (reason, failures) in enumerate([("evicted", 0), ("finished", 0), ("crashed", 1)]):
        worker = f"w{number}"
        desk.ask(worker, 2, LeaseShard("train"))
        assert [lease.worker for lease in desk.service.leases("train", now=1.0)] == [worker]
        desk.service.on_exit(worker, reason, "was killed by SIGSEGV", now=1.0)
        assert desk.service.status()[0].failures == failures
        assert desk.service.leases("train", now=1.0) == ()
    events = desk.service.take().events
    assert [event.kind for event in events] == ["shard-returned", "shard-returned", "shard-failed"]
    assert desk.service.failure == ""
    desk.ask("w3", 2, LeaseShard("train"))
    desk.service.on_exit("w3", "oom", "was killed by the kernel for want of memory", now=1.0)
    assert desk.service.failure.endswith("w3 is gone: it was killed by the kernel for want of memory")


def test_work_that_is_done_is_counted() -> None:
    desk = Desk()
    desk.ask("w0", 1, RegisterDataset("train", SPEC))
    desk.ask("w0", 2, LeaseShard("train"))
    assert desk.service.work_done == 0
    desk.ask("w0", 3, ReportShard("train", 0, 2, "done"))
    assert desk.service.work_done == 1


def test_time_passes() -> None:
    desk = Desk()
    desk.ask("w0", 1, RegisterDataset("train", SPEC))
    desk.ask("w0", 2, LeaseShard("train"))
    desk.service.on_tick(5.0)
    desk.take()
    assert "w0 did not finish it within 5 s" in desk.failure


def test_what_is_no_call_is_refused() -> None:
    with pytest.raises(WireError):
        Desk().service.call("w0", 1, b"\xc1", now=0.0)
