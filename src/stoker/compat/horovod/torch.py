"""`horovod.torch`: the names that scripts use."""

from __future__ import annotations

import sys
from typing import Any

from stoker.compat.horovod import elastic
from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.compression import Compression
from stoker.compat.horovod.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from stoker.compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from stoker.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from stoker.compat.horovod.handles import poll, synchronize
from stoker.compat.horovod.movements import (
    allgather_async,
    alltoall_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
)
from stoker.compat.horovod.optimizer import DistributedOptimizer
from stoker.compat.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from stoker.compat.horovod.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    reducescatter_async,
)
from stoker.compat.horovod.sync_batch_norm import SyncBatchNorm
from stoker.errors import ConfigError

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt", "Max",
    "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "cross_rank", "cross_size", "elastic",
    "get_process_set_ids_and_ranks", "global_process_set", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set",
    "shutdown", "size", "synchronize",
]  # fmt: skip

_BUILT = frozenset({"gloo_built", "gloo_enabled"})
_NOT_BUILT = frozenset(
    {
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "ccl_built",
        "cuda_built",
        "rocm_built",
        "ddl_built",
        "mlsl_built",
    }
)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Take this process's place. May be called again. `process_sets`: those that are to be used.

    Raises ConfigError for some ranks only: process sets are for that.
    """
    world = horovod_world()
    world.init()
    if comm is not None and list(comm) not in ([], list(range(world.place.size))):
        raise ConfigError(
            f"hvd.init(comm={comm!r:.80}): all {world.place.size} ranks take part here; give collectives "
            "process_set=hvd.add_process_set([…]) for those of some"
        )
    for one in () if process_sets in (None, "dynamic") else process_sets:
        add_process_set(one)


def shutdown() -> None:
    """Give up this process's place."""
    horovod_world().shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return horovod_world().is_initialized


def rank() -> int:
    """This process's number. In an elastic job newcomers have the highest."""
    return horovod_world().place.rank


def size() -> int:
    """How many processes there are."""
    return horovod_world().place.size


def local_rank() -> int:
    """Which of its node's processes this is."""
    return horovod_world().place.local_rank


def local_size() -> int:
    """How many processes this node has."""
    return horovod_world().place.local_size


def cross_rank() -> int:
    """Which of the nodes that have a process of this local rank this is."""
    return horovod_world().place.cross_rank


def cross_size() -> int:
    """How many nodes have a process of this local rank."""
    return horovod_world().place.cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have as many processes."""
    place = horovod_world().place
    return place.local_size * place.cross_size == place.size


def __getattr__(name: str) -> Any:
    if name in _BUILT:
        return lambda *_, **__: True
    if name in _NOT_BUILT:
        return lambda *_, **__: False
    if name == "mpi_ops":
        return sys.modules[__name__]
    if name in ("start_timeline", "stop_timeline"):
        raise ConfigError(
            f"hvd.{name}: there is no timeline of collectives; take torch.profiler, and `stoker job status` for the job"
        )
    raise AttributeError(f"hvd.{name} is not there in Stoker: docs/how-to/horovod.md says what is")
