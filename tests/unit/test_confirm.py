"""Steps whose collectives only queue: one that was aborted neither changes parameters nor counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stoker.data.session import Session
from stoker.settings import worker_settings
from stoker.train import group as group_module
from stoker.train import worlds as worlds_module
from stoker.train.confirm import (
    Confirmation,
    ConfirmedExchange,
    failed_groups,
    issued_collectives,
    wait_for_stream,
)
from stoker.train.failures import is_collective_failure
from stoker.train.group import ProcessGroup
from stoker.train.member_link import MemberLink
from stoker.train.steps import Steps
from stoker.train.worlds import Worlds
from stoker.wire.job import WorkerPhase
from tests.unit.queued_backend import QueuedGroup, queued_backend, queued_group, world

CPU = torch.device("cpu")


class Parts:
    """A worker in a world of two, at work on such a device."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.link = MemberLink("w0", live := Session())
        self.steps = Steps(worker_settings(), live, self.link)
        self.worlds = Worlds(worker_settings(), live, self.link, self.steps, CPU)
        self.worlds._open_group()
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.has_stepped = False
        self.optimizer.register_step_pre_hook(self._step)
        self.state = SimpleNamespace(seal=lambda: None)

    def open(self) -> QueuedGroup:
        self.worlds._open_world(world(2, self.group.endpoint), 0)
        return QueuedGroup.every[-1]

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def commit(self) -> None:
        self.steps.commit(self.state)  # type: ignore[arg-type]

    def _step(self, *_: object) -> None:
        """As a State notes that it does not stand at a commit any more."""
        self.has_stepped = True

    def is_sound(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setattr(group_module, "LEAVE_WAIT_S", 0.1)
    with queued_backend():
        group = queued_group()
        monkeypatch.setattr(worlds_module, "ProcessGroup", lambda *_, **__: group)
        monkeypatch.setattr(
            worlds_module, "wait_for_stream", lambda _: QueuedGroup.every[-1].wait_for_device()
        )
        yield Parts(group)
        group.close()
    _global_optimizer_pre_hooks.clear()


@pytest.mark.parametrize("phase", ["member", "finished"])
def test_what_a_process_that_ends_has_sent_still_arrives_unless_it_failed(
    parts: Parts, phase: WorkerPhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = parts.open()
    parts.backward()
    parts.link.core.phase = phase
    waited: list[bool] = []
    monkeypatch.setattr(worlds_module, "synchronize", lambda _: waited.append(parts.group.is_broken))
    parts.worlds._end()
    assert waited == [phase != "finished"], "a device that may never end is not waited for"
    assert at_work.aborted.is_set()
    assert not dist.is_initialized()


def test_an_optimizer_does_not_step_on_what_an_aborted_collective_left(parts: Parts) -> None:
    """1. a peer dies in an all-reduce, which only stands in the queue here; 2. the step is queued behind; 3. the order
    to leave the world comes, and aborts the all-reduce, which ends."""
    parts.open()
    parts.backward()
    threading.Timer(0.3, parts.group.break_off).start()
    with pytest.raises(dist.DistBackendError, match="the group was broken off") as left:
        parts.optimizer.step()
    assert parts.is_sound()
    assert not parts.has_stepped, "the state stands at a commit, and can be others' source"
    assert is_collective_failure(left.value)


def test_a_step_without_an_optimizer_of_torchs_does_not_count(parts: Parts) -> None:
    parts.open()
    parts.backward()
    threading.Timer(0.3, parts.group.break_off).start()
    with pytest.raises(dist.DistBackendError):
        parts.commit()
    assert parts.link.core.commits == 0


def test_a_group_that_breaks_once_all_has_arrived_costs_no_step(parts: Parts) -> None:
    """Else nobody might be left who stands at a commit."""
    arrived = parts.open()
    parts.model(torch.ones(1, 2)).sum().backward()
    arrived.issued += 1
    arrived.aborted.set()  # as if its peer had come
    parts.optimizer.step()
    parts.group.break_off()
    parts.commit()
    assert parts.link.core.commits == 1
    arrived.issued += 1
    with pytest.raises(dist.DistBackendError):
        parts.commit()


def test_what_an_older_group_has_brought_does_not_speak_for_a_new_one(parts: Parts) -> None:
    """Both count their collectives from their beginning, and a step has the same number of them."""
    arrived = parts.open()
    arrived.aborted.set()  # as if its peer had come
    parts.backward()
    parts.commit()
    parts.group.close()
    parts.open()
    parts.backward()
    parts.group.break_off()
    with pytest.raises(dist.DistBackendError):
        parts.commit()
    assert parts.link.core.commits == 1


def test_nobody_has_to_be_asked_in_a_world_of_one(parts: Parts) -> None:
    parts.group.open(world(1, ""), 0)
    parts.backward()
    parts.optimizer.step()
    parts.commit()
    assert parts.link.core.commits == 1


def test_an_agreement_over_a_group_that_was_broken_off_is_void(parts: Parts) -> None:
    class Garbage:
        rank = 0

        def gather(self, values: object) -> list[list[int]]:
            return [[7 << 40]]

        def broadcast(self, values: object) -> list[int]:
            return [7 << 40]

    group = parts.open()
    exchange = ConfirmedExchange(Garbage(), parts.steps.confirm)
    group.aborted.set()
    assert exchange.gather([1]) == [[7 << 40]]
    group.issued += 1
    parts.group.break_off()
    for agree in (exchange.gather, exchange.broadcast):
        with pytest.raises(dist.DistBackendError):
            agree([1])


def test_a_state_that_was_received_over_an_aborted_group_is_not_taken(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(*_: object) -> dict[str, Any]:
        dist.all_reduce(header := torch.zeros(1))
        raise MemoryError(f"of a header of {header.item()} bytes")

    monkeypatch.setattr(worlds_module, "receive_state", receive)
    parts.open()
    threading.Timer(0.3, parts.group.break_off).start()
    with pytest.raises(dist.DistBackendError):
        parts.worlds._receive(world(2, ""))


class Failing:
    """A group whose backend says how it is."""

    def __init__(self) -> None:
        self.error = ErrorType.SUCCESS

    def _get_backend(self, _: torch.device) -> Failing:
        return self

    def get_error(self) -> ErrorType:
        return self.error

    def _get_sequence_number_for_group(self) -> int:
        return 3


def test_an_error_that_a_backend_met_by_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Failing()
    monkeypatch.setitem(dist.distributed_c10d._world.pg_names, group, "0")  # type: ignore[arg-type]
    assert issued_collectives() == [("0", 3)]
    confirmation = Confirmation(SimpleNamespace(has_peers=True, is_broken=False), CPU, lambda: None)
    confirmation.check()
    group.error = ErrorType.REMOTE_ERROR
    with pytest.raises(dist.DistBackendError, match="group 0 has met REMOTE_ERROR"):
        confirmation.check()


def test_what_the_real_groups_say() -> None:
    """Gloo's counts, says nothing of errors, and has no streams to wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = issued_collectives()
        dist.all_reduce(torch.ones(2))
        assert before is not None
        assert issued_collectives() not in (before, None)
        assert failed_groups(CPU) == []
        wait_for_stream(CPU)
    finally:
        dist.destroy_process_group()
    assert issued_collectives() == []
