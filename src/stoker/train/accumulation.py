"""Gradients that a rank has for itself: of backward passes in DDP's `no_sync`, not yet reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import ConfigError

_Versions = list[tuple[int, int]]
"""Which tensor each parameter's gradient is, and how often that was changed; zeros where there is none."""


class Accumulation:
    """Notices gradients that would be carried from one batch of a loader into the reduction of another.

    All that is reduced is weighted by this rank's share of the newest batch, which is wrong for older ones, and nothing
    is left of them where that share is empty.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[DistributedDataParallel, _Versions] = (
            weakref.WeakKeyDictionary()
        )
        """Gradients as they were before backward passes that reduce nothing; the first since `forget`."""

    def watch(self, wrapped: DistributedDataParallel) -> None:
        """Look at what the script does in `wrapped.no_sync()`."""
        known = weakref.ref(wrapped)  # what a wrapper holds must not hold it: its sockets go with it

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            module = known()
            assert module is not None
            self._note(module)
            with DistributedDataParallel.no_sync(module):
                yield

        wrapped.no_sync = no_sync  # type: ignore[method-assign]
        self._watched.add(wrapped)

    def forget(self) -> None:
        """What was there is reduced, or of no interest any more."""
        self._before.clear()

    def on_batch(self) -> None:
        """A batch is handed out. Raises ConfigError where gradients of one before are not reduced."""
        if any(_has_gradients_since(module, before) for module, before in self._before.items()):
            raise ConfigError(
                "the next batch is asked for while gradients of the one before wait to be reduced (backward() in "
                "no_sync): each batch has its own shares and weights. Make global_batch_size the whole and cut it by "
                "`for piece, weight in state.micro_batches(batch, 8)`; gradients that are not for a step, zero before"
            )
        for module in self._watched:
            if not module.require_backward_grad_sync:  # as a script may set it itself
                self._note(module)

    def _note(self, module: DistributedDataParallel) -> None:
        if module not in self._before:
            self._before[module] = _versions(module)


def _versions(module: torch.nn.Module) -> _Versions:
    return [(id(p.grad), p.grad._version) if p.grad is not None else (0, 0) for p in module.parameters()]


def _has_gradients_since(module: torch.nn.Module, before: _Versions) -> bool:
    """Whether there are any but zeros which were not there before."""
    return any(
        parameter.grad is not None and now != then and _is_any(parameter.grad)
        for parameter, now, then in zip(module.parameters(), _versions(module), before, strict=False)
    )


def _is_any(gradient: torch.Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).any())
