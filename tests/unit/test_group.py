"""Process groups between real processes: a stopped peer is let go of at once."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stoker.train.failures import is_collective_failure
from stoker.train.group import ProcessGroup
from stoker.train.sockets import break_connections, listening_addresses, open_sockets
from stoker.wire.job import Member, WorldView

pytestmark = pytest.mark.real


def world_of(generation: int, size: int, store: str) -> WorldView:
    members = tuple(Member(f"w{i}", "n", i, i, size, 0, False) for i in range(size))
    return WorldView(generation, size, members, 0, 0, store)


def peer(pipe: Connection) -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    while True:
        generation, size, rank, store = pipe.recv()
        if generation == 0:
            return
        group.open(world_of(generation, size, store), rank)
        dist.all_reduce(torch.ones(4))
        pipe.send("reduced")
        pipe.recv()
        group.close()
        pipe.send("closed")


def test_a_collective_with_a_stopped_peer_is_broken_at_once_and_the_next_group_works() -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=peer, args=(theirs,), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    try:
        for rank, pipe in enumerate(pipes, 1):
            pipe.send((1, 3, rank, group.endpoint))
        group.open(world_of(1, 3, group.endpoint), 0)
        dist.all_reduce(torch.ones(4))
        assert [pipe.recv() for pipe in pipes] == ["reduced", "reduced"]

        os.kill(processes[1].pid or 0, signal.SIGSTOP)
        threading.Timer(0.3, group.break_off).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError) as failure:
            dist.all_reduce(torch.ones(4))
        assert is_collective_failure(failure.value)
        assert time.monotonic() - began < 40, "not after the timeout of 60 s"
        group.close()

        pipes[0].send("close")
        assert pipes[0].recv() == "closed"
        pipes[0].send((2, 2, 1, group.endpoint))
        group.open(world_of(2, 2, group.endpoint), 0)
        value = torch.ones(4)
        dist.all_reduce(value)
        assert value.tolist() == [2.0] * 4
        assert pipes[0].recv() == "reduced"
    finally:
        group.close()
        for process in processes:
            process.kill()
            process.join()


GROUPS = 4


def peer_in_many_groups(pipe: Connection) -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    group.open(world_of(1, 2, pipe.recv()), 1)
    for one in [dist.new_group([0, 1]) for _ in range(GROUPS)]:
        dist.all_reduce(torch.ones(4), group=one)
    pipe.send("reduced")
    pipe.recv()


@pytest.fixture
def other() -> Iterator[tuple[Connection, int]]:
    """Rank 1 of a world of two, which stays there once it has been in a collective of each group; and its pid."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer_in_many_groups, args=(theirs,), daemon=True)
    process.start()
    yield ours, process.pid or 0
    process.kill()
    process.join()


def test_collectives_of_a_scripts_own_groups_are_broken_at_once(other: tuple[Connection, int]) -> None:
    pipe, pid = other
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    first = group.endpoint
    pipe.send(first)
    group.open(world_of(1, 2, first), 0)
    groups = [dist.new_group([0, 1]) for _ in range(GROUPS)]
    for one in groups:
        dist.all_reduce(torch.ones(4), group=one)
    assert pipe.recv() == "reduced"
    os.kill(pid, signal.SIGSTOP)

    def fail(action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:
            failures.append(error)

    failures: list[RuntimeError] = []
    # Each pair of ranks is joined from one side or the other, so one group would prove half of it.
    actions = [functools.partial(dist.all_reduce, torch.ones(4), group=one) for one in (None, *groups)]
    threads = [threading.Thread(target=fail, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    # The making of a group waits in the store first.
    threading.Timer(0.5, group.break_off).start()
    fail(lambda: dist.new_group([0, 1]))
    for thread in threads:
        thread.join(20)
    assert len(failures) == 1 + len(threads), "not after the timeout of 60 s"
    assert all(is_collective_failure(error) for error in failures)
    group.close()
    assert group.endpoint != first, "a store whose connections were cut is replaced"


def test_groups_without_a_timeout_have_that_of_the_generation() -> None:
    usual = dist.distributed_c10d._get_default_timeout(dist.Backend("gloo"))
    group = ProcessGroup(torch.device("cpu"), timeout_s=17, address=None)
    group.open(world_of(1, 1, ""), 0)
    assert dist.new_group([0])._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
    group.close()
    assert dist.distributed_c10d._get_default_timeout(dist.Backend("gloo")) == usual


def test_a_group_that_waits_for_an_absent_peer_is_broken_at_once() -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    first = group.endpoint
    threading.Timer(0.3, group.break_off).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        group.open(world_of(1, 2, group.endpoint), 0)
    assert time.monotonic() - began < 40
    group.close()
    assert group.endpoint != first, "a store whose connection was cut is replaced"


def test_a_world_that_is_over_before_its_group_is_opened_is_not_waited_for() -> None:
    """1. the worker takes the world; 2. the order to leave it comes, with no connection to break yet; 3. it opens."""
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")

    def check() -> None:
        raise InterruptedError

    group.break_off()
    began = time.monotonic()
    with pytest.raises(InterruptedError):
        group.open(world_of(1, 2, group.endpoint), 0, check)
    assert time.monotonic() - began < 40
    group.close()


def test_a_store_of_a_job_on_one_machine_listens_on_the_loopback_only() -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    port = int(group.endpoint.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=30)
    group.close()


def own_addresses() -> list[str]:
    found = (
        a.address for family in psutil.net_if_addrs().values() for a in family if a.family == socket.AF_INET
    )
    return [address for address in found if not address.startswith("127.")]


@pytest.mark.skipif(not own_addresses(), reason="this host has no address but the loopback's")
def test_a_store_listens_at_its_workers_address_only() -> None:
    (address, *_) = own_addresses()
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address=address)
    host, _, port = group.endpoint.rpartition(":")
    assert host == address
    socket.create_connection((address, int(port)), timeout=30).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=30)
    group.close()


@pytest.mark.parametrize("address", ["203.0.113.7", "no-such-host.invalid"])
def test_a_store_at_an_address_that_only_others_know_listens_on_every_interface(address: str) -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address=address)
    host, _, port = group.endpoint.rpartition(":")
    assert host == address
    socket.create_connection(("127.0.0.1", int(port)), timeout=30).close()
    group.close()


def test_keys_of_generations_before_are_deleted() -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    store = group._own
    assert store is not None
    for key in ("generation-1/gloo/0", "generation-12/gloo/0", "generation-2/gloo/1"):
        store.set(key, "x")
    threading.Timer(0.3, group.break_off).start()
    with pytest.raises(RuntimeError):
        group.open(world_of(2, 2, group.endpoint), 0)
    kept = TCPStore("127.0.0.1", store.port, is_master=False).list_keys()
    assert "generation-2/gloo/1" in kept, "a peer may have come before"
    assert {key.partition("/")[0] for key in kept} == {"generation-2"}
    group.close()


def test_only_gloos_own_connections_are_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, listener.accept()[0]:
            assert break_connections({port + 1}, {ours.getsockname()[1] + 1}) == 0
            assert break_connections(set(), {port}) == 1
            assert ours.recv(1) == b""


@pytest.mark.parametrize(
    ("outlives_exec", "is_reusable", "is_older", "breaks"),
    [(True, True, False, 1), (False, True, False, 0), (True, False, False, 0), (True, True, True, 0)],
)
def test_a_groups_connection_of_unknown_ports_is_told_by_how_it_was_made(
    outlives_exec: bool, is_reusable: bool, is_older: bool, breaks: int
) -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_reusable)
        ours.connect(listener.getsockname())
        ours.set_inheritable(outlives_exec)
        with listener.accept()[0]:
            assert break_connections((), (), before=open_sockets() if is_older else before) == breaks
        assert listener.getsockname() in listening_addresses(before)
        assert listener.getsockname() not in listening_addresses(before, only_gloos=True)


def test_a_group_that_is_garbage_when_a_process_is_forked_does_not_hang_that_process() -> None:
    """A loader process's first collection would take the group down, and wait for threads that it does not have."""

    class Holder:
        pass

    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address=None)
    gc.disable()
    try:
        group.open(world_of(1, 1, ""), 0)
        dist.all_reduce(torch.ones(4))
        holder = Holder()
        holder.group, holder.itself = dist.group.WORLD, holder  # type: ignore[attr-defined]
        group.close()
        del holder
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(30)
        hangs = child.is_alive()
        child.kill()
        child.join()
        assert not hangs
        assert child.exitcode == 0
    finally:
        gc.enable()
