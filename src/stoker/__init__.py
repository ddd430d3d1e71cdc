"""Stoker keeps accelerators fed and training runs alive.

    import stoker

    ctx = stoker.init()
    data = stoker.Dataset("stoker://bucket/train/", decode=decode)
    loader = stoker.Loader(data, global_batch_size=256, shuffle=True)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state): ...

What needs PyTorch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.data.dataset import Dataset
    from stoker.data.loader import Loader
    from stoker.train.context import Context, init
    from stoker.train.elastic import elastic
    from stoker.train.meeting import barrier, sync
    from stoker.train.shards import shards
    from stoker.train.state import State

__version__ = "0.1.0"
__all__ = [
    "Context",
    "Dataset",
    "Loader",
    "State",
    "StokerError",
    "__version__",
    "barrier",
    "elastic",
    "init",
    "shards",
    "sync",
]

_HOMES = {
    "Context": "stoker.train.context",
    "Dataset": "stoker.data.dataset",
    "Loader": "stoker.data.loader",
    "State": "stoker.train.state",
    "barrier": "stoker.train.meeting",
    "elastic": "stoker.train.elastic",
    "init": "stoker.train.context",
    "shards": "stoker.train.shards",
    "sync": "stoker.train.meeting",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
