"""What a worker says to its agent while its training loop waits."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stoker.data.session import Session
from stoker.settings import worker_settings
from stoker.train.member_link import MemberLink
from stoker.train.shards_session import ServiceCaller
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Answer, Call, FromWorker, WorkerState
from stoker.wire.meeting import Arrive
from stoker.wire.shards import GetShardStatus, LeaseShard, NoMoreShards, encode

WAIT_S = 60.0
BEATS = 4


class Agent:
    """The agent's end of one worker's socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._codec: FrameCodec[FromWorker] = FrameCodec(FromWorker)
        self._connection: socket.socket | None = None
        self.calls: queue.Queue[Call] = queue.Queue()
        self.states: queue.Queue[WorkerState] = queue.Queue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        self._connection, _ = self._listener.accept()
        while (message := self._codec.receive(self._connection)) is not None:
            if isinstance(message, Call):
                self.calls.put(message)
            elif isinstance(message, WorkerState):
                self.states.put(message)

    def answer(self, call: Call, body: bytes) -> None:
        assert self._connection is not None
        self._codec.send(self._connection, Answer(number=call.number, body=body))

    def beats(self) -> list[int]:
        """The progress that the next beats tell."""
        while not self.states.empty():
            self.states.get()
        return [self.states.get(timeout=WAIT_S).progress for _ in range(BEATS)]

    def comes_to_hear(self, holds: Callable[[list[int]], bool]) -> bool:
        """Whether beats tell of such a progress in the end: those that were on their way tell of another one."""
        until = time.monotonic() + WAIT_S
        while not holds(self.beats()):
            if time.monotonic() > until:
                return False
        return True

    def close(self) -> None:
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._connection.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        listener.settimeout(WAIT_S)
        yield listener


@pytest.fixture
def agent(listener: socket.socket) -> Iterator[Agent]:
    agent = Agent(listener)
    yield agent
    agent.close()


@pytest.fixture
def link(agent: Agent, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> MemberLink:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    link = MemberLink("w", Session())
    link.connect(replace(worker_settings(), worker="w", timeout_s=1.0), listener.getsockname())
    return link


def stands_still(told: list[int]) -> bool:
    return len(set(told)) == 1


def in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []
    thread = threading.Thread(target=lambda: said.append(action()), daemon=True)
    thread.start()
    return thread, said


def test_who_waits_for_a_shard_does_not_stand_still(agent: Agent, link: MemberLink) -> None:
    """A stream may be quiet for hours."""
    caller = ServiceCaller(link.call, link.lease)
    thread, said = in_thread(lambda: caller.call(LeaseShard("clicks")))
    lease = agent.calls.get(timeout=WAIT_S)
    assert agent.comes_to_hear(lambda told: told == [*range(told[0], told[0] + BEATS)])
    agent.answer(lease, encode(NoMoreShards()))
    thread.join(WAIT_S)
    assert said == [NoMoreShards()]
    assert agent.comes_to_hear(stands_still), "but it does once it has its answer"


def test_a_loop_stands_still_though_its_loader_processes_wait_for_a_shard(
    agent: Agent, link: MemberLink
) -> None:
    caller = ServiceCaller(link.call, link.lease, ahead=link.lease_ahead)
    thread, said = in_thread(lambda: caller.call(LeaseShard("clicks"), is_ahead=True))
    lease = agent.calls.get(timeout=WAIT_S)
    assert agent.comes_to_hear(stands_still)
    with link.waiting():
        assert agent.comes_to_hear(lambda told: len(set(told[1:])) == BEATS - 1), "unless it waits for them"
    assert agent.comes_to_hear(stands_still)
    agent.answer(lease, encode(NoMoreShards()))
    thread.join(WAIT_S)
    assert said == [NoMoreShards()]
    with link.waiting():
        assert agent.comes_to_hear(stands_still), "they do not wait for the master"


@pytest.mark.parametrize(
    "wait",
    [
        lambda link: link.call("meeting", msgspec.msgpack.encode(Arrive("barrier", "saved"))),
        lambda link: ServiceCaller(link.call, link.lease).call(GetShardStatus("clicks")),
    ],
)
def test_who_waits_for_others_does(
    wait: Callable[[MemberLink], object], agent: Agent, link: MemberLink
) -> None:
    thread, _ = in_thread(lambda: wait(link))
    call = agent.calls.get(timeout=WAIT_S)
    assert agent.comes_to_hear(stands_still)
    agent.answer(call, encode(NoMoreShards()))
    thread.join(WAIT_S)
    assert not thread.is_alive()
