"""`horovod.torch`: the names that scripts use."""

from __future__ import annotations

from typing import Any

from stoker.compat.horovod import elastic
from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.compression import Compression
from stoker.compat.horovod.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allreduce,
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
)
from stoker.compat.horovod.optimizer import DistributedOptimizer
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
    global_process_set,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    reducescatter_async,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt",
    "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "cross_rank", "cross_size", "elastic", "global_process_set", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "poll", "rank", "reducescatter", "reducescatter_async", "shutdown", "size",
    "synchronize",
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
    }
)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Take this process's place. May be called again."""
    del comm, process_sets
    horovod_world().init()


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
    raise AttributeError(f"hvd.{name} is not there in Stoker: docs/how-to/horovod.md says what is")
