"""Real processes that make up a static Horovod world over Gloo, and do together what a test asks."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch._C._distributed_c10d import TCPStore

Check = Callable[[], Any]


class Peers:
    """So many processes; each check is a function of a test module, called in all of them at once."""

    def __init__(self, count: int) -> None:
        self._store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def all(self, check: Check) -> list[Any]:
        """What it returned, by rank. Raises AssertionError with the traceback of the first that failed."""
        for pipe in self._pipes:
            pipe.send(check)
        answers = [pipe.recv() for pipe in self._pipes]
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    import stoker.compat.horovod

    torch.set_num_threads(1)
    stoker.compat.horovod.install()
    while (check := pipe.recv()) is not None:
        try:
            pipe.send(("", check()))
        except BaseException:  # noqa: BLE001 - it is told to the test
            pipe.send((traceback.format_exc(), None))
