"""A state goes from the source to a newcomer whole, whatever its tensors' types."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stoker.train.group import ProcessGroup
from stoker.train.transfer import receive_state, send_state
from stoker.wire.job import Member, World

pytestmark = pytest.mark.real
CPU = torch.device("cpu")


def two(store: str) -> World:
    members = tuple(Member(f"w{i}", "n", i, i, 2, 0, copy_state=i == 1) for i in range(2))
    return World(1, members, 0, 0, store)


def state() -> dict[str, Any]:
    """Types that Gloo's own broadcast refuses are among them."""
    types = (torch.float32, torch.int16, torch.uint16, torch.bool, torch.bfloat16, torch.float8_e4m3fn)
    tensors = [torch.tensor([0.0, 1.0, 2.0]).to(dtype) for dtype in types]
    return {
        "tensors": [*tensors, torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t()],
        "step": (3, "x", None),
    }


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
    dist.barrier()
    group.close()


def test_tensors_of_every_type_arrive() -> None:
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
        dist.barrier()
    finally:
        group.close()
        process.kill()
        process.join()
