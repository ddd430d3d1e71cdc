"""`stoker.shards()` with several workers around one core, and when waiting is cut short."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest

from stoker.errors import ConfigError, MasterUnreachable
from stoker.job.shards import Decision, Reply, Shards
from stoker.train.shards import shards
from stoker.train.shards_alone import AloneCaller
from stoker.train.shards_session import ServiceCaller, ShardSession, shard_session
from stoker.wire.shards import (
    LeaseShard,
    ReportShard,
    ShardAnswer,
    ShardCall,
    decode_call,
    encode,
)


class Hub:
    """The master's side: one core for several workers, which dies and comes back on demand."""

    def __init__(self) -> None:
        self.core = Shards()
        self.records: dict[str, bytes] = {}
        self.now = 0.0
        self._changed = threading.Condition()
        self._asked: dict[tuple[str, int], ShardCall] = {}
        self._answers: dict[tuple[str, int], bytes] = {}

    def session(self, worker: str) -> ShardSession:
        numbers = itertools.count(1)
        session = ShardSession()
        session.caller = ServiceCaller(
            lambda _, body: self.call(worker, next(numbers), body),
            lambda _, body, _late: self.call(worker, next(numbers), body),
        )
        return session

    def call(self, worker: str, number: int, body: bytes) -> bytes:
        with self._changed:
            self._asked[worker, number] = decode_call(body)
            self.take(self.core.call(worker, number, self._asked[worker, number], self.now))
            while (worker, number) not in self._answers:
                assert self._changed.wait(60), "nobody answers"
            del self._asked[worker, number]
            return self._answers.pop((worker, number))

    def take(self, decision: Decision) -> None:
        for key, value in decision.keep:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        for effect in decision.effects:
            if isinstance(effect, Reply):
                self._answers[effect.worker, effect.request_id] = encode(effect.answer)
        self._changed.notify_all()

    def pass_time(self, seconds: float) -> None:
        with self._changed:
            self.now += seconds
            self.take(self.core.tick(self.now))

    def lose_worker(self, worker: str) -> None:
        with self._changed:
            self.take(self.core.worker_gone(worker, self.now, "killed by signal 9"))

    def restart(self) -> None:
        """A new master: who still waits for the old one's answer asks again, as agents do."""
        with self._changed:
            self.core = Shards()
            self.take(self.core.restore(self.records, self.now))
            for (worker, number), message in self._asked.items():
                if (worker, number) not in self._answers:
                    self.take(self.core.call(worker, number, message, self.now))


def test_workers_share_a_dataset_though_one_dies_and_the_master_restarts() -> None:
    hub = Hub()
    read: Counter[int] = Counter()
    lock = threading.Lock()

    def work(worker: str, give_up_after: int = 10**9) -> None:
        source = shards("train", records=2000, shard_size=10, lease_timeout_s=50, session=hub.session(worker))
        for count, shard in enumerate(source):
            if count == give_up_after:
                hub.lose_worker(worker)
                shard.is_open = False  # it is dead and reports no more
                return
            if count % 20 == 3:
                hub.restart()
            assert shard.done()
            with lock:
                read.update(shard.records)

    threads = [threading.Thread(target=work, args=(f"w{n}", *([7] if n == 0 else []))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert read == Counter(range(2000))


def test_a_shard_that_took_too_long_is_done_by_who_is_first() -> None:
    hub = Hub()
    slow = shards("train", records=10, shard_size=10, lease_timeout_s=5, session=hub.session("slow"))
    fast = shards("train", records=10, shard_size=10, lease_timeout_s=5, session=hub.session("fast"))
    held = next(iter(slow))
    hub.pass_time(5)
    for shard in fast:
        assert shard.done()
    assert not held.done()
    assert slow.status().done == 1


def test_a_stream_ends_when_its_end_is_known_and_all_is_done() -> None:
    hub = Hub()
    read: list[tuple[str, int]] = []

    def work() -> None:
        for shard in shards("clicks", stream=True, shard_size=4, session=hub.session("w0")):
            assert shard.column == ""
            read.extend((shard.partition, offset) for offset in shard.records)

    thread = threading.Thread(target=work)
    thread.start()
    source = shards("clicks", stream=True, shard_size=4, session=hub.session("feeder"))
    assert source.add_records(10, partition="a", start=7) == 10
    assert source.add_records(5, partition="b") == 5
    assert source.add_records(12, partition="a") == 12
    source.end_of_stream()
    thread.join(30)
    assert sorted(read) == [("a", n) for n in range(7, 12)] + [("b", n) for n in range(5)]
    with pytest.raises(TypeError, match="'clicks' is a stream"):
        len(source)
    with pytest.raises(ConfigError, match="after the end of the stream"):
        source.add_records(13, partition="a")
    with pytest.raises(ConfigError, match="start=-2 cannot be"):
        source.add_records(13, partition="a", start=-2)


def test_a_worker_must_be_connected_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AGENT_SOCKET", "/run/agent.sock")
    with pytest.raises(ConfigError, match=r"call stoker.init\(\) before"):
        shards("train", records=5, shard_size=2, session=ShardSession())
    assert shard_session() is shard_session()


class Unreachable:
    """A master that goes away once a shard is leased."""

    def __init__(self) -> None:
        self._core = AloneCaller(lambda: 0.0)

    def call(self, message: ShardCall, *, is_ahead: bool = False) -> ShardAnswer:
        if isinstance(message, ReportShard):
            raise MasterUnreachable("no master answers")
        return self._core.call(message)


def test_a_master_that_is_gone_ends_the_loop_but_not_a_break(caplog: pytest.LogCaptureFixture) -> None:
    session = ShardSession()
    session.caller = Unreachable()
    source = shards("train", records=30, shard_size=10, session=session)
    for _ in source:
        break
    assert "shard 0 of train could not be handed back: no master answers" in caplog.text
    with pytest.raises(MasterUnreachable):
        list(source)


@pytest.mark.parametrize("answered", [False, True])
def test_an_interrupted_wait_leaves_no_lease_behind(answered: bool) -> None:
    """Ctrl-C while waiting for a shard, before and after it came."""
    interrupt = threading.Event()
    waits = threading.Event()
    waiter: list[threading.Thread] = []

    def clock() -> float:
        if threading.current_thread() in waiter:
            if interrupt.is_set():
                interrupt.clear()
                raise KeyboardInterrupt
            waits.set()
        return 0.0

    session = ShardSession()
    session.caller = caller = AloneCaller(clock)
    source = shards("train", records=10, shard_size=10, lease_timeout_s=1000, session=session)
    held = next(loop := iter(source))

    def wait() -> None:
        with pytest.raises(KeyboardInterrupt):
            caller.call(LeaseShard("train"))

    thread = threading.Thread(target=wait)
    waiter.append(thread)
    thread.start()
    assert waits.wait(60)
    if answered:
        with caller._changed:
            interrupt.set()
            held.give_back()
    else:
        interrupt.set()
        source.status()
    thread.join(60)
    assert not thread.is_alive()
    if not answered:
        held.give_back()
    assert source.status().doing == 0
    assert next(loop).number == 0
