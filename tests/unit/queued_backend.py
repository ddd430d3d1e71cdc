"""A backend for tests whose collectives only queue, as NCCL's do, in one process: the other rank never comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.train.group import ProcessGroup
from stoker.wire.job import Member, WorldView

QUEUED = "queued"
WAIT_S = 20.0


class QueuedGroup(dist.ProcessGroup):
    """What it is given stands still on its device until the group is aborted, then ends without a word, as kernels do.

    Its abort waits until every group of the process is aborted.
    """

    every: list[QueuedGroup]

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self.issued = 0
        self.aborted = threading.Event()
        self.aborted_by: list[str] = []
        self.every.append(self)

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> QueuedGroup:
        self.issued += 1
        for tensor in tensors:
            tensor.fill_(float("nan"))  # what stands there in the end is anybody's guess
        return self

    def wait(self) -> bool:
        """Of a work: it is queued, that is all."""
        return True

    def wait_for_device(self) -> None:
        assert not self.issued or self.aborted.wait(WAIT_S)

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def abort(self) -> None:
        self.aborted_by.append(threading.current_thread().name)
        self.aborted.set()
        assert all(group.aborted.wait(WAIT_S) for group in self.every)

    def shutdown(self) -> None:
        raise RuntimeError("a group that stands still cannot be shut down")


@contextmanager
def queued_backend() -> Iterator[None]:
    """Make torch know it."""
    if QUEUED not in dist.Backend.backend_list:
        dist.Backend.register_backend(QUEUED, QueuedGroup, devices=["cpu"])
    QueuedGroup.every = []
    yield


def queued_group(address: str | None = "127.0.0.1") -> ProcessGroup:
    """Of a worker whose device has such a backend."""
    group = ProcessGroup(torch.device("cpu"), timeout_s=60, address=address)
    group.backend = QUEUED
    return group


def world(size: int, store: str, generation: int = 1) -> WorldView:
    """This worker is `w0`, its rank 0."""
    members = tuple(Member(f"w{i}", "n", i, i, size, 0, False) for i in range(size))
    return WorldView(generation, size, members, 0, 0, store)
