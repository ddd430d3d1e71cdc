"""Process groups between real processes: a stopped peer is let go of at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from stoker.train.group import ProcessGroup, is_collective_failure
from stoker.train.sockets import break_connections
from stoker.wire.job import Member, World

pytestmark = pytest.mark.real


def world_of(generation: int, size: int, store: str) -> World:
    members = tuple(Member(f"w{i}", "n", i, i, size, 0, False) for i in range(size))
    return World(generation, members, 0, 0, store)


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
        assert time.monotonic() - began < 10, "not after the timeout of 60 s"
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


def test_a_group_that_waits_for_an_absent_peer_is_broken_at_once() -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    first = group.endpoint
    threading.Timer(0.3, group.break_off).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        group.open(world_of(1, 2, group.endpoint), 0)
    assert time.monotonic() - began < 10
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
    assert time.monotonic() - began < 10
    group.close()


def test_a_store_of_a_job_on_one_machine_listens_on_the_loopback_only() -> None:
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address="127.0.0.1")
    port = int(group.endpoint.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    group.close()


def test_only_gloos_own_connections_are_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, listener.accept()[0]:
            assert break_connections({port + 1}, {ours.getsockname()[1] + 1}) == 0
            assert break_connections(set(), {port}) == 1
            assert ours.recv(1) == b""


def test_errors_of_scripts_are_no_collective_failures() -> None:
    assert not is_collective_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_collective_failure(ValueError("Connection closed by peer"))
    assert is_collective_failure(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
