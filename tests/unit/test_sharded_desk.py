"""What a worker holds and what counts: when leases end, commits are refused, loops end at an awkward time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import stoker
from stoker.errors import JobError, MasterUnreachable
from stoker.job.shards import Reply, Shards
from stoker.train import sharded_desk
from stoker.train.attempts import attempts
from stoker.train.member_link import WorldChanged
from stoker.train.sharded_desk import Desk
from stoker.train.sharded_relay import Relay
from stoker.train.shards import shards
from stoker.train.shards_session import ShardSession
from stoker.wire.shards import LeaseShard, ReportShard, ShardAnswer, ShardCall
from tests.unit.test_sharded import sharded

LEASE_S = 10.0


class Worker:
    """Calls the core; `on_call` comes after each call, and may raise in place of its answer."""

    def __init__(self, master: Master, name: str) -> None:
        self.master, self.name = master, name
        self.calls = 0
        self.on_call: Callable[[ShardCall], None] = lambda _: None

    def call(self, message: ShardCall, *, is_ahead: bool = False) -> ShardAnswer:
        self.calls += 1
        decision = self.master.core.call(self.name, self.calls, message, self.master.now)
        self.on_call(message)
        replies = [effect for effect in decision.effects if isinstance(effect, Reply)]
        mine = [e.answer for e in replies if (e.worker, e.request_id) == (self.name, self.calls)]
        assert mine, f"{message} has to wait"
        return mine[0]


class Master:
    def __init__(self, records: int) -> None:
        self.core = Shards()
        self.now = 0.0
        self.records = records

    def worker(self, name: str, *, exactly_once: bool = True) -> tuple[Desk, Worker]:
        session = ShardSession()
        session.caller = caller = Worker(self, name)

        def opened() -> Any:
            return shards("d", records=self.records, shard_size=10, lease_timeout_s=LEASE_S, session=session)

        return Desk(opened, exactly_once=exactly_once), caller

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)

    @property
    def queue(self) -> Any:
        return self.core.queues["d"]


def read_all(desk: Desk) -> list[int]:
    """Read and commit what there is, by one reader."""
    read: list[int] = []
    turn = desk.begin()
    held = desk.next(turn)
    while held is not None:
        read += held.shard.records[held.given :]
        desk.give([(held.shard.number, len(held.shard))])
        held = desk.next(turn, held.shard.number)
    desk.commit()
    return read


def test_a_worker_that_is_given_its_own_shard_once_more_commits_nothing_of_it() -> None:
    """One loader process has read a part when its lease ends, and another one asks."""
    master = Master(10)
    desk, _ = master.worker("w1")
    turn = desk.begin()
    assert desk.next(turn) is not None
    desk.give([(0, 4)])
    master.pass_time(LEASE_S)
    again = desk.next(turn)
    assert again is not None
    assert (again.shard.number, again.given) == (0, 0)
    desk.give([(0, 8)])
    with pytest.raises(JobError, match="lease of shard 0 was over, and its records are read once more"):
        desk.commit()
    assert master.queue.open[0].shard.read == 0
    assert read_all(desk) == [*range(10)], "and none of it counts"
    assert master.queue.is_finished


def test_what_was_read_of_a_shard_that_fails_is_not_committed_in_silence() -> None:
    master = Master(20)
    desk, _ = master.worker("w1")
    turn = desk.begin()
    desk.next(turn), desk.next(turn)
    desk.give([(0, 4), (1, 2)])
    desk.fail(0, "record 5 is damaged", turn - 1)
    assert master.queue.status().failures == 0, "that is a loop before"
    desk.fail(0, "record 5 is damaged", turn)
    with pytest.raises(JobError, match="shard 0 could not be read to its end"):
        desk.commit()
    assert sorted(read_all(desk)) == [*range(20)]


def test_a_worker_whose_commit_is_refused_holds_nothing_any_more() -> None:
    master = Master(30)
    one, caller = master.worker("w1")
    two, _ = master.worker("w2")
    first, second = one.begin(), two.begin()
    one.next(first)
    master.now = LEASE_S / 2
    one.next(first), two.next(second)
    master.pass_time(LEASE_S / 2)
    one.give([(0, 3), (1, 10)])
    two.give([(2, 10)])
    held = two.next(second, 2)
    assert held is not None
    assert held.shard.number == 0
    caller.calls += 1
    master.core.call("w1", caller.calls, LeaseShard("d", (1,), 1 << 62), master.now)  # and waits
    assert 1 in master.queue.handed
    with pytest.raises(JobError, match="shard 0 of d is not leased by w1 any more"):
        one.commit()
    assert 1 not in master.queue.handed
    assert master.queue.open[1].failures == 0
    two.give([(0, 10)])
    two.commit()
    master.core.worker_gone("w1", master.now, "its script ended")
    assert read_all(two) == [*range(10, 20)], "they are read by whoever asks"
    assert master.queue.is_finished


def test_a_loop_that_begins_anew_holds_nothing_of_before() -> None:
    data = sharded(exactly_once=True)
    saved = data.state_dict()
    loop = iter(data)
    next(loop)
    data._position.put_back_to(saved, only_new=True)
    assert data.status().doing == 0
    assert list(data) == [*range(25)]
    data.commit()
    assert data.status().is_finished


@pytest.mark.parametrize("error", [WorldChanged(), MasterUnreachable("gone")])
def test_all_that_is_used_is_reported_though_one_report_is_broken_off(error: BaseException) -> None:
    master = Master(40)
    desk, caller = master.worker("w1", exactly_once=False)
    turn = desk.begin()
    for _ in range(3):
        desk.next(turn)
    desk.give([(0, 10), (1, 10), (2, 10)])

    def broken_off(message: ShardCall) -> None:
        if isinstance(message, ReportShard):
            raise error

    caller.on_call = broken_off
    with pytest.raises(type(error)):
        desk.settle(turn)
    assert master.queue.status().done == 3
    assert not desk._held


def test_what_ctrl_c_leaves_unreported_is_held() -> None:
    master = Master(40)
    desk, caller = master.worker("w1", exactly_once=False)
    turn = desk.begin()
    desk.next(turn), desk.next(turn)
    desk.give([(0, 10), (1, 10)])

    def interrupted(_: ShardCall) -> None:
        caller.on_call = lambda _: None
        raise KeyboardInterrupt

    caller.on_call = interrupted
    with pytest.raises(KeyboardInterrupt):
        desk.settle(turn)
    assert [*desk._held] == [1]
    desk.settle(turn)
    assert master.queue.status().done == 2


def test_an_old_loop_settles_and_breaks_off_nothing_of_the_new_one() -> None:
    master = Master(40)
    desk, _ = master.worker("w1", exactly_once=False)
    old = desk.begin()
    turn = desk.begin()
    desk.next(turn)
    desk.give([(0, 10)])
    desk.settle(old)
    desk.leave(old)
    desk.break_off(WorldChanged(), old)
    desk.check()
    assert desk.turn == turn
    assert master.queue.status().done == 0
    desk.break_off(WorldChanged(), turn)
    with pytest.raises(WorldChanged):
        desk.check()


def test_a_loop_that_ends_while_the_lock_is_taken_is_seen_to_by_who_has_it() -> None:
    master = Master(40)
    desk, _ = master.worker("w1", exactly_once=False)
    turn = desk.begin()
    desk.next(turn)
    with desk._lock:
        desk.leave(turn)
        assert master.queue.status().doing == 1
    assert desk.turn == turn + 1
    assert master.queue.status().doing == 0


def test_what_is_read_ahead_is_no_word_of_the_script() -> None:
    """An exception on its way may still turn out to be a peer's death."""
    master = Master(40)
    desk, _ = master.worker("w1")
    turn = desk.begin()
    attempt = attempts().begin()
    try:
        verdict = attempt.verdict()
        desk.next(turn, is_ahead=True)
        assert not verdict.done()
        desk.begin()
        assert verdict.result(0) is False
    finally:
        attempt.end(world_broke=False)


@pytest.mark.parametrize("by_batches", [False, True])
def test_the_garbage_collector_may_end_a_loop_anywhere(
    by_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in the middle of what the desk does under its lock."""
    data: stoker.ShardedDataset = sharded(100)
    loops = data.loader(batch_size=5) if by_batches else data
    is_given = sharded_desk.Held.is_given.fget
    armed: list[bool] = []

    def collecting(held: sharded_desk.Held) -> Any:
        if armed:
            armed.clear()
            gc.collect()
        return is_given(held)  # type: ignore[misc]

    monkeypatch.setattr(sharded_desk.Held, "is_given", property(collecting))
    gc.disable()
    try:
        cycle: list[Any] = [iter(loops)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        armed.append(True)
        read: list[Any] = []
        thread = threading.Thread(target=lambda: read.extend(loops), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert not armed
    assert len(read) == (20 if by_batches else 100)
    assert data.status().is_finished


def test_what_fails_at_the_desk_is_not_taken_for_the_end_of_the_loop() -> None:
    """A loader process that hears nothing any more ends as if all was read: the training process must know better."""
    desk, worker = Master(20).worker("w0")
    turn = desk.begin()

    def fail(_: ShardCall) -> None:
        raise OSError("no way to the agent")

    worker.on_call = fail
    relay = Relay(desk, owner=worker)
    client = relay.address.connect(turn)
    assert client.next(None) is None
    client.close()
    with pytest.raises(OSError, match="no way to the agent"):
        desk.check()
