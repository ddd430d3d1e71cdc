"""What a TorchState holds of each kind, and how it is copied, brought back and made the same everywhere."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from stoker.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
    broadcast_state,
)
from stoker.compat.horovod.sampler import ElasticSampler


class Held:
    """An object with `state_dict()` and `load_state_dict()`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None

    def save(self) -> None:
        self._saved = on_host(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        if self._saved is not None:
            self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def unite(self) -> None:
        """Where each rank knows a part, let all know the whole."""


class HeldModule(Held):
    """A module."""

    def save(self) -> None:
        state = self.value.state_dict()
        saved = OrderedDict(on_host(dict(state), self._saved))
        if hasattr(state, "_metadata"):
            saved._metadata = state._metadata  # type: ignore[attr-defined]
        self._saved = saved

    def restore(self) -> None:
        if self._saved is not None:
            for parameter in self.value.parameters():
                parameter.grad = None
            self.value.load_state_dict(self._saved)  # which copies into what the module has

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict())


class HeldOptimizer(Held):
    """An optimizer."""

    def sync(self) -> None:
        state = self.value.state_dict()
        received = broadcast_state(state, 0)
        if received is not state:
            self.value.load_state_dict(received)


class HeldSampler(Held):
    """A sampler, which is divided anew in each world."""

    def unite(self) -> None:
        done: set[int] = set().union(*allgather_object(self.value.processed_indices))
        if done != self.value.processed_indices:
            self.value.processed_indices = done
        self.value.reset()


def hold(value: Any) -> Held | None:
    """How this is held; None: as a plain value."""
    if isinstance(value, torch.nn.Module):
        return HeldModule(value)
    if isinstance(value, torch.optim.Optimizer):
        return HeldOptimizer(value)
    if isinstance(value, ElasticSampler):
        return HeldSampler(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return Held(value)
    return None


def on_host(value: Any, before: Any = None) -> Any:
    """A copy with all tensors in the host's memory; into the tensors of an older copy where they fit."""
    if isinstance(value, torch.Tensor):
        source = value.detach()
        if isinstance(before, torch.Tensor) and before.shape == source.shape and before.dtype == source.dtype:
            return before.copy_(source)
        return source.to("cpu", copy=True)
    if isinstance(value, dict):
        known = before if isinstance(before, dict) else {}
        return {key: on_host(held, known.get(key)) for key, held in value.items()}
    if type(value) in (list, tuple):
        known_items = before if isinstance(before, (list, tuple)) and len(before) == len(value) else ()
        return type(value)(
            on_host(held, known_items[i] if known_items else None) for i, held in enumerate(value)
        )
    return copy.deepcopy(value)
