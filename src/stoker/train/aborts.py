"""End the collectives of backends that can abort, NCCL and its kin, and take their groups down.

By reading PyTorch 2.13 (`ProcessGroupNCCL::abort`, `distributed_c10d._abort_process_group`): none of it could be run on
such a device.
"""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist


def start_aborting() -> list[threading.Thread]:
    """Abort every group of this process, each in a thread of its own, and return the threads.

    A communicator's abort waits for its kernels, which may be queued behind those of another group that is stuck as
    well: one after the other they would wait for each other. Nor may the caller wait, who has beats to send.

    The groups stay known to torch, unlike after its own `_abort_process_group`: the training thread may be about to use
    one, and the backend's error says more than that there is no such group.
    """
    groups = list(dist.distributed_c10d._world.pg_names)
    threads = [
        threading.Thread(target=_abort, args=(group,), name="stoker-abort", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    return threads


def take_down(aborting: list[threading.Thread]) -> None:
    """Wait for the aborts, and have torch forget the groups that it still knows.

    Raises RuntimeError when a group cannot be aborted within its timeout: then this process must end.
    """
    for thread in aborting:
        thread.join()
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):  # should it matter, `take_down` meets it again
        group.abort()
