"""Groups of a backend that can abort, as NCCL can: what is queued ends, and nobody is kept waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stoker.train import group as group_module
from stoker.train.failures import is_collective_failure
from stoker.train.group import ProcessGroup
from tests.unit.queued_backend import QUEUED, WAIT_S, QueuedGroup, queued_backend, queued_group, world


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with queued_backend():
        group = queued_group()
        yield group
        group.close()
    assert not dist.is_initialized()


def store_of_a_peer(group: ProcessGroup) -> dist.Store:
    """A connection of its own: a store that waits keeps every other call on its connection waiting."""
    host, _, port = group.endpoint.rpartition(":")
    return dist.PrefixStore("generation-1", dist.TCPStore(host, int(port), is_master=False))


def test_every_group_is_aborted_and_whoever_breaks_off_does_not_wait(group: ProcessGroup) -> None:
    group.open(world(2, group.endpoint), 0)
    script = dist.new_group([0, 1])
    default, own = QueuedGroup.every
    dist.all_reduce(torch.ones(2), group=script)
    stuck = threading.Thread(target=own.wait_for_device, daemon=True)
    stuck.start()
    hangs = QueuedGroup(dist.HashStore(), 0, 2, timedelta(0))
    own.every = [default, own, hangs]  # so the abort of `own` does not end yet
    group.break_off()
    group.break_off()
    stuck.join(WAIT_S)
    assert not stuck.is_alive()
    assert default.aborted.wait(WAIT_S)
    assert dist.is_initialized(), "the script may be about to use it"
    assert group.is_broken
    hangs.aborted.set()
    group.close()
    assert [len(one.aborted_by) for one in (default, own)] == [2, 2], "once by each of them"
    assert default.aborted_by[0] == own.aborted_by[0] == "stoker-abort"


def test_what_was_broken_off_is_opened_anew(group: ProcessGroup) -> None:
    first = group.endpoint
    group.open(world(2, first), 0)
    group.break_off()
    group.close()
    assert group.endpoint != first
    group.open(world(2, group.endpoint, generation=2), 0)
    assert not group.is_broken
    assert not QueuedGroup.every[-1].aborted.is_set()
    group.break_off()


def test_a_polite_leave_does_not_wait_for_a_rank_that_was_killed_meanwhile(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown may wait for the other ranks of the node, and nothing can end it."""
    monkeypatch.setattr(group_module, "LEAVE_WAIT_S", 0.1)
    peer_comes = threading.Event()
    monkeypatch.setattr(QueuedGroup, "shutdown", lambda _: peer_comes.wait())
    group.open(world(2, group.endpoint), 0)
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert QueuedGroup.every[0].aborted.is_set()


def test_nobody_aborts_before_all_have_what_they_were_sent(group: ProcessGroup) -> None:
    """A network's last pieces are sent after the kernel has ended."""
    group.open(world(2, group.endpoint), 0)
    own = QueuedGroup.every[0]
    peer = store_of_a_peer(group)
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    while peer.add("stoker-leaving", 0) == 0:
        pass
    assert not own.aborted.wait(0.2)
    peer.add("stoker-leaving", 1)
    peer.set("stoker-all-leave", "")
    assert own.aborted.wait(WAIT_S)
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_who_waits_to_leave_is_woken_when_the_world_breaks(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "LEAVE_WAIT_S", 3600.0)
    group.open(world(2, group.endpoint), 0)
    peer = store_of_a_peer(group)
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    while peer.add("stoker-leaving", 0) == 0:
        pass
    group.break_off()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_rank_that_is_still_opening_is_woken(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends hand out what their ranks need to find each other through the store."""

    class Waiting(QueuedGroup):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            waits.set()
            store.get("what rank 1 never says")
            raise AssertionError("it was not woken")

    def break_off() -> None:
        assert waits.wait(WAIT_S)
        group.break_off()

    waits = threading.Event()
    monkeypatch.setitem(dist.Backend._plugins, QUEUED.upper(), dist.Backend._BackendPlugin(Waiting, False))
    breaks = threading.Thread(target=break_off, daemon=True)
    breaks.start()
    with pytest.raises(RuntimeError) as left:
        group.open(world(2, group.endpoint), 0)
    assert is_collective_failure(left.value)
    breaks.join(WAIT_S)


def test_nobody_is_waited_for_in_a_world_of_one(group: ProcessGroup) -> None:
    group.open(world(1, ""), 0)
    group.break_off()
    assert not QueuedGroup.every[0].aborted.is_set()
    assert not group.is_broken
    group.close()
    assert not dist.is_initialized(), "though its shutdown failed"
