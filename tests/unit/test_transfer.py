"""A state goes from the source to a newcomer whole, whatever its tensors' types."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stoker.train.accelerator import memory_in_use_bytes, peak_memory_bytes, reset_peak_memory
from stoker.train.group import ProcessGroup
from stoker.train.packing import decode_header, encode_header, pack
from stoker.train.transfer import kinds_at_the_receiver, receive_state, send_state
from stoker.wire.job import Member, WorldView

pytestmark = pytest.mark.real
CPU = torch.device("cpu")


def two(store: str) -> WorldView:
    members = tuple(Member(f"w{i}", "n", i, i, 2, 0, copy_state=i == 1) for i in range(2))
    return WorldView(1, 2, members, 0, 0, store, all_receive=True)


def state() -> dict[str, Any]:
    """Types that Gloo's own broadcast refuses are among them."""
    types = (torch.float32, torch.int16, torch.uint16, torch.bool, torch.bfloat16, torch.float8_e4m3fn)
    tensors = [torch.tensor([0.0, 1.0, 2.0]).to(dtype) for dtype in types]
    return {
        "tensors": [*tensors, torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t()],
        "step": (3, "x", None),
    }


def transposed() -> dict[str, Any]:
    """Tensors of 1 MiB, each of which has to be copied for it to be sent."""
    return {"values": {"tensors": [torch.ones(512, 512).t() for _ in range(64)]}}


def test_tensors_belong_where_the_source_has_them_and_those_of_modules_on_the_host() -> None:
    """`meta` stands for an accelerator."""
    model = torch.nn.Linear(1, 1, device="meta")
    here, there = torch.ones(1), torch.ones(1, device="meta")
    state = {
        "modules": {"model": model.state_dict()},
        "optimizers": {"optimizer": {"state": {0: {"step": here, "exp_avg": there}}}},
        "values": {"mean": there, "counts": [here]},
    }
    tensors: list[torch.Tensor] = []
    header = encode_header(pack(state, tensors), tensors, kinds_at_the_receiver(state))
    _, described = decode_header(header)
    assert [one.kind for one in described] == ["cpu", "cpu", "cpu", "meta", "meta", "cpu"]


def newcomer(pipe: Connection, store: str) -> None:
    group = ProcessGroup(CPU, timeout_s=20, address="127.0.0.1")
    group.open(two(store), 1)
    received = receive_state(two(store), CPU)
    wanted = state()
    same = [
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.double(), b.double())
        for a, b in zip(received["tensors"], wanted["tensors"], strict=True)
    ]
    pipe.send((same, received["step"]))
    receive_state(two(store), CPU)
    dist.barrier()
    group.close()


def test_tensors_of_every_type_arrive_and_are_copied_one_at_a_time() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    group = ProcessGroup(CPU, timeout_s=20, address="127.0.0.1")
    process = context.Process(target=newcomer, args=(theirs, group.endpoint), daemon=True)
    process.start()
    try:
        world = two(group.endpoint)
        group.open(world, 0)
        send_state(world, 0, state(), CPU)
        assert ours.poll(20)
        assert ours.recv() == ([True] * 9, (3, "x", None))
        more = transposed()
        reset_peak_memory(CPU)
        before = memory_in_use_bytes(CPU)
        send_state(world, 0, more, CPU)
        assert peak_memory_bytes(CPU) - before < 32 << 20, "of 64 MiB"
        dist.barrier()
    finally:
        group.close()
        process.kill()
        process.join()


def some(store: str) -> WorldView:
    """Ranks 2 and 3 copy the state of rank 1, rank 0 has it."""
    members = tuple(Member(f"w{i}", "n", i, i, 4, 0, copy_state=i > 1) for i in range(4))
    return WorldView(1, 4, members, 1, 0, store, receivers=(2, 3))


def large() -> dict[str, Any]:
    """One of its tensors goes in several pieces of unequal size, one has no bytes at all."""
    return {
        "values": {
            "large": torch.arange(5 << 20),
            "small": torch.tensor(7),
            "none": torch.empty(0),
            "step": 3,
        }
    }


def member_of_some(pipe: Connection, store: str, rank: int) -> None:
    world = some(store)
    group = ProcessGroup(CPU, timeout_s=60, address="127.0.0.1")
    group.open(world, rank)
    if rank == world.source:
        sent_to = []
        send = dist.send
        dist.send = lambda tensor, dst: (sent_to.append(dst), send(tensor, dst=dst))
        send_state(world, rank, large(), CPU)
        pipe.send(set(sent_to))
    elif rank in world.receivers:
        received, wanted = receive_state(world, CPU)["values"], large()["values"]
        pipe.send(all(torch.equal(torch.as_tensor(received[k]), torch.as_tensor(wanted[k])) for k in wanted))
    dist.barrier()
    group.close()


def test_where_some_copy_the_source_sends_once_and_they_pass_it_on() -> None:
    context = multiprocessing.get_context("spawn")
    group = ProcessGroup(CPU, timeout_s=60, address="127.0.0.1")
    pipes = {rank: context.Pipe() for rank in (1, 2, 3)}
    others = [
        context.Process(target=member_of_some, args=(pipes[rank][1], group.endpoint, rank), daemon=True)
        for rank in pipes
    ]
    for process in others:
        process.start()
    try:
        group.open(some(group.endpoint), 0)
        dist.barrier()
        for rank, told in {1: {2}, 2: True, 3: True}.items():
            assert pipes[rank][0].poll(60)
            assert pipes[rank][0].recv() == told, f"rank {rank}"
    finally:
        group.close()
        for process in others:
            process.kill()
            process.join()
