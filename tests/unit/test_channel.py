"""A worker's calls over a real socket to the agent's end of it, and those that nobody waits for any more."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.agent.workers import WorkerChannel
from stoker.errors import ConfigError, JobError, MasterUnreachable
from stoker.job.shard_service import ShardService
from stoker.train.channel import AgentChannel
from stoker.train.shards_session import ServiceCaller
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Answer, Call, Failure, FromWorker, Hello, Order
from stoker.wire.shards import DatasetSpec, LeaseShard, RecordSplit, RegisterDataset, ShardLeased

SPEC = DatasetSpec(RecordSplit(10, 10), lease_timeout_s=1000.0)


class Interrupted(BaseException):
    """What `check` raises."""


class Agent:
    """The agent's end, with the master's shard service behind it. `answer` decides which calls reach the service."""

    def __init__(self, folder: Path) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self.failures: queue.Queue[str] = queue.Queue()
        self._hellos: queue.Queue[str] = queue.Queue()
        self.service = ShardService()
        self._lost: list[threading.Event] = []
        self._loop = asyncio.new_event_loop()
        self.path = folder / "agent.sock"
        self._channel = WorkerChannel(
            self.path,
            on_hello=lambda worker, _: self._hellos.put(worker),
            on_state=lambda *_: None,
            on_failure=lambda _, words: self.failures.put(words),
            on_call=lambda _, call: self.calls.put(call),
        )
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._channel.start(), self._loop).result(60)

    def next_call(self) -> Call:
        return self.calls.get(timeout=60)

    def serve(self, call: Call) -> None:
        self.service.call("w", call.number, call.body, 0.0)
        for answer in self.service.take().answers:
            self.give(answer.answer)

    def give(self, answer: Answer) -> None:
        self._loop.call_soon_threadsafe(self._channel.give, "w", answer)

    def connect(self, *, on_beat: Callable[[], None] = lambda: None, beat_s: float = 1.0) -> AgentChannel:
        channel, lost = AgentChannel(str(self.path), "w"), threading.Event()
        channel.start(lambda _: None, lost.set, on_beat=on_beat, beat_s=beat_s)
        self._lost.append(lost)
        self._hellos.get(timeout=60)  # only then does `close` know of the connection
        return channel

    async def _settle(self) -> None:
        """Close, and wait for the ends of the connections."""
        await self._channel.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        await asyncio.sleep(0)

    def talk(self, channel: AgentChannel, *, until: Callable[[], bool]) -> None:
        """Answer call after call, so that the channel is never silent for long."""
        for _ in range(100_000):
            if until():
                return
            thread, _ = in_thread(lambda: channel.call("shards", b"?"))
            self.give(Answer(number=self.next_call().number))
            thread.join(60)
        raise AssertionError("it was never so")

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        assert all(lost.wait(60) for lost in self._lost)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.close()


@pytest.fixture
def channel(agent: Agent) -> AgentChannel:
    return agent.connect()


def in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []

    def run() -> None:
        try:
            said.append(action())
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            said.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_a_shard_that_comes_when_nobody_waits_is_handed_back(agent: Agent, channel: AgentChannel) -> None:
    interrupt = threading.Event()

    def check() -> None:
        if interrupt.is_set():
            raise Interrupted

    caller = ServiceCaller(
        channel.call, lambda service, body, on_late: channel.call(service, body, check, on_late)
    )
    thread, _ = in_thread(lambda: caller.call(RegisterDataset("train", SPEC)))
    agent.serve(agent.next_call())
    thread.join(60)
    thread, said = in_thread(lambda: caller.call(LeaseShard("train")))
    lease = agent.next_call()
    interrupt.set()
    channel.wake()
    thread.join(60)
    assert isinstance(said[0], Interrupted)
    agent.serve(lease)
    agent.serve(agent.next_call())
    assert agent.service.status()[0].doing == 0
    interrupt.clear()
    thread, said = in_thread(lambda: caller.call(LeaseShard("train")))
    agent.serve(agent.next_call())
    thread.join(60)
    assert isinstance(said[0], ShardLeased), "it comes again"


def test_an_answer_that_was_there_before_the_interruption_is_not_lost(
    agent: Agent, channel: AgentChannel
) -> None:
    late: list[bytes] = []

    def check() -> None:
        agent.give(Answer(number=agent.next_call().number, body=b"here"))
        while channel._answers[1] is None:
            channel._answered.wait(10)
        raise Interrupted

    def on_late(body: bytes) -> bytes:
        late.append(body)
        return b"thanks"

    with pytest.raises(Interrupted):
        channel.call("shards", b"?", check, on_late)
    assert late == [b"here"]
    assert agent.next_call().body == b"thanks"


def test_a_refusal_and_a_lost_agent(agent: Agent, channel: AgentChannel, tmp_path: Path) -> None:
    thread, said = in_thread(lambda: channel.call("shards", b"?"))
    agent.give(Answer(number=agent.next_call().number, error="no such thing"))
    thread.join(60)
    assert isinstance(said[0], JobError)
    assert str(said[0]) == "no such thing"
    (tmp_path / "other").mkdir()
    other = Agent(tmp_path / "other")
    lost = other.connect()
    thread, said = in_thread(lambda: lost.call("shards", b"?"))
    other.next_call()
    other.close()
    thread.join(60)
    assert isinstance(said[0], MasterUnreachable)


def test_a_call_that_is_too_long_is_refused_with_its_size_and_the_next_one_is_not(
    agent: Agent, channel: AgentChannel
) -> None:
    """Ending the channel over it would tell the script that its agent is gone."""
    with pytest.raises(JobError, match=r"a call of 5\S* ?M\S* to 'shards': 4\S* ?M\S* is the most"):
        channel.call("shards", bytes(5 << 20))
    thread, said = in_thread(lambda: channel.call("shards", b"?"))
    agent.give(Answer(number=agent.next_call().number, body=b"here"))
    thread.join(60)
    assert said == [b"here"]


def test_last_words_of_any_length_arrive(agent: Agent, channel: AgentChannel) -> None:
    words = "Traceback: " + "x" * (5 << 20)
    channel.fail(words)
    assert agent.failures.get(timeout=60) == words


def test_a_worker_that_hears_much_beats_all_the_same(agent: Agent) -> None:
    """A beat is what tells that it makes progress."""
    beats: queue.Queue[float] = queue.Queue()
    channel = agent.connect(on_beat=lambda: beats.put(1.0), beat_s=0.2)
    agent.talk(channel, until=lambda: beats.qsize() >= 2)


def test_a_worker_with_many_open_files_hears_its_agent(agent: Agent) -> None:
    """Such as memory-mapped shards: the socket's own descriptor comes after all of them."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        channel = agent.connect()
    finally:
        for file in files:
            os.close(file)
    assert channel._socket.fileno() > 1023
    thread, said = in_thread(lambda: channel.call("shards", b"?"))
    agent.give(Answer(number=agent.next_call().number, body=b"heard"))
    thread.join(60)
    assert said == [b"heard"]


@pytest.mark.real
def test_an_error_in_the_thread_that_listens_ends_the_process(tmp_path: Path) -> None:
    """Else it would train on, or wait, deaf to what its agent says."""
    script = """
import sys, threading
from stoker.train.channel import AgentChannel

def on_order(order):
    raise OSError("too many open files")

AgentChannel(sys.argv[1], "w").start(on_order, lambda: None)
threading.Event().wait()
"""
    path, codec = str(tmp_path / "agent.sock"), FrameCodec[FromWorker](FromWorker)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(60)
        worker = subprocess.Popen([sys.executable, "-c", script, path], stderr=subprocess.PIPE, text=True)
        try:
            connection, _ = listener.accept()
            with connection:
                assert isinstance(codec.receive(connection), Hello)
                codec.send(connection, Order(generation=1))
                failure = codec.receive(connection)
                _, words = worker.communicate(timeout=60)
        finally:
            worker.kill()
            worker.communicate()
    assert worker.returncode == 1
    assert words.rstrip().endswith("OSError: too many open files")
    assert isinstance(failure, Failure)
    assert "on_order" in failure.message


def test_a_forked_process_may_not_speak_for_its_worker(
    channel: AgentChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigError, match="cannot speak for it"):
        channel.call("shards", b"?")


def test_who_has_said_nothing_is_let_go_as_well(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(60)
        silent.connect(str(agent.path))
        agent.connect()  # by then the one before is accepted
        agent.close()
        assert silent.recv(1) == b""
