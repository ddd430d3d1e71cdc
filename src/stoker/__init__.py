"""Stoker keeps accelerators fed and training runs alive.

    import stoker

    ctx = stoker.init()
    data = stoker.Dataset("stoker://bucket/train/", decode=decode)
    loader = stoker.Loader(data, global_batch_size=256, shuffle=True)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state): ...

    with stoker.open("s3://bucket/table.parquet") as file: ...

What needs PyTorch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stoker.base.version import VERSION
from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.data.dataset import Dataset
    from stoker.data.loader import Loader
    from stoker.data.mounted import AnnouncedSampler
    from stoker.data.reading import open as open
    from stoker.data.reading import prefetch, read, read_many
    from stoker.train.checkpoints.checkpointer import Checkpointer
    from stoker.train.context import Context, init
    from stoker.train.elastic import elastic
    from stoker.train.meeting import barrier, sync
    from stoker.train.sharded import ShardedDataset
    from stoker.train.sharded_model import Sharded
    from stoker.train.shards import shards
    from stoker.train.state import State

__version__ = VERSION
__all__ = [
    "AnnouncedSampler",
    "Checkpointer",
    "Context",
    "Dataset",
    "Loader",
    "Sharded",
    "ShardedDataset",
    "State",
    "StokerError",
    "__version__",
    "barrier",
    "elastic",
    "init",
    "prefetch",
    "read",
    "read_many",
    "shards",
    "sync",
]

_HOMES = {
    "AnnouncedSampler": "stoker.data.mounted",
    "Checkpointer": "stoker.train.checkpoints.checkpointer",
    "Context": "stoker.train.context",
    "Dataset": "stoker.data.dataset",
    "Loader": "stoker.data.loader",
    "Sharded": "stoker.train.sharded_model",
    "ShardedDataset": "stoker.train.sharded",
    "State": "stoker.train.state",
    "barrier": "stoker.train.meeting",
    "elastic": "stoker.train.elastic",
    "init": "stoker.train.context",
    "open": "stoker.data.reading",
    "prefetch": "stoker.data.reading",
    "read": "stoker.data.reading",
    "read_many": "stoker.data.reading",
    "shards": "stoker.train.shards",
    "sync": "stoker.train.meeting",
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return import_module("stoker.aio")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, "aio"})  # `open` is not in __all__: it would hide Python's own
