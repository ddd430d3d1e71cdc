"""One script's global batches in exact mode: micro-batch after micro-batch, summed in a fixed order.

Each micro-batch begins with the same buffers, values and random generators whoever computes it. When its backward pass
ends, its gradients and buffers are put aside, weighted by its share of the records; with this rank's last one they are
exchanged, and the gradients of the whole global batch stand in the parameters, where an optimizer and whatever clips
them find them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, cast

import torch

from stoker.data.session import MicroBatch, Session
from stoker.errors import ConfigError
from stoker.train.exact.exchange import Exchange
from stoker.train.exact.flat import Flat
from stoker.train.exact.tree import Stack
from stoker.train.state_buffers import BufferCopies

ONE_BACKWARD = "in exact mode each micro-batch takes one backward(): sum its losses, and leave out none"


class Engine:
    """Of one State. `keep`, `put_back`: put aside what a micro-batch may change beside buffers, and undo it."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        live: Session,
        *,
        keep: Callable[[], None],
        put_back: Callable[[], None],
    ) -> None:
        self._modules = modules
        self._live = live
        self._keep, self._put_back = keep, put_back
        self._parameters: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self._buffers = BufferCopies()
        self._whole: Flat | None = None
        """The sums of the global batch: the gradients that parameters have then are views of it."""
        self._free: list[Flat] = []
        self._exchange = Exchange(live.virtual_ranks)
        self._stack = Stack(live.virtual_ranks)
        self._is_queued = False
        self._begun = 0
        self._harvested = 0
        self.is_reduced = False
        """The gradients of the whole global batch are there."""
        self.micro_batch: MicroBatch | None = None
        """The one under way."""

    @property
    def is_between(self) -> bool:
        """Whether more micro-batches of the global batch are to come on this rank."""
        return self.micro_batch is not None and not self.micro_batch.is_last

    def forget(self) -> None:
        """The world is left: whatever was begun is begun anew."""
        self._stack.take()
        self._is_queued, self._begun, self._harvested = False, 0, 0
        self.is_reduced, self.micro_batch = False, None

    def begin(self, micro_batch: MicroBatch) -> None:
        """A micro-batch is about to be made. Raises ConfigError where one before it was left out."""
        if self._harvested != (self._begun if self._harvested else 0):
            raise ConfigError(ONE_BACKWARD)
        if micro_batch.is_first:
            if not self._stack.is_empty:
                raise ConfigError(
                    "a loop of exact mode was left within a global batch: leave it after a commit"
                )
            for parameter in self._parameters:
                parameter.grad = None
            self._watch()
            self._begun, self._harvested, self.is_reduced = 0, 0, False
            if not micro_batch.is_last:
                self._buffers.renew(self._modules)
                self._keep()
        else:
            self._buffers.put_back()
            self._put_back()
        self._is_queued = False
        self._begun += 1
        self.micro_batch = micro_batch

    def check_complete(self) -> None:
        """Raises ConfigError unless the gradients of a whole global batch are there."""
        if self.micro_batch is not None and not self.is_reduced:
            raise ConfigError(f"an optimizer is to step before the gradients are there: {ONE_BACKWARD}")

    def _watch(self) -> None:
        """See the gradients of all parameters that have any; a script may freeze some in between."""
        wanted = [p for p in _unique(m.parameters() for m in self._modules) if p.requires_grad]
        if len(wanted) == len(self._parameters) and all(map(is_, wanted, self._parameters)):
            return
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._whole, self._free = wanted, None, []
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in wanted]

    def _on_gradient(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._backward_done)

    def _backward_done(self) -> None:
        micro_batch = self.micro_batch
        self._is_queued = False
        if micro_batch is None or self._harvested == self._begun:
            raise ConfigError(ONE_BACKWARD)
        self._harvested += 1
        self._live.progress += 1
        self._stack.push(micro_batch.number, self._part(micro_batch), self._add)
        if micro_batch.is_last:
            self._live.ready_at = time.perf_counter()
            self._reduce()
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def _part(self, micro_batch: MicroBatch) -> Flat | None:
        """The weighted gradients and buffers of a micro-batch; None where it has no records."""
        share = self._live.share
        if share is None or share.records == 0:
            return None
        flat = self._free.pop() if self._free else self._new_flat()
        there: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for number, (parameter, place) in enumerate(zip(self._parameters, flat.gradients, strict=True)):
            gradient = parameter.grad
            flat.marks[number] = gradient is not None
            if gradient is None:
                place.zero_()
                continue
            if gradient.layout != torch.strided:
                raise ConfigError(
                    f"a gradient of shape {tuple(gradient.shape)} is sparse: exact mode sums dense ones, make the "
                    "module with sparse=False"
                )
            there.append(gradient)
            places.append(place)
        is_first = all(map(self._is_empty, range(micro_batch.number)))
        for buffer, place in zip(self._current_buffers(), flat.buffers, strict=True):
            if is_first or buffer.is_floating_point() or buffer.is_complex():
                there.append(buffer)
                places.append(place)
            else:
                place.zero_()
        with torch.no_grad():
            torch._foreach_copy_(places, there)
        flat.scale(share.records / share.batch_records)
        return flat

    def _add(self, left: Flat, right: Flat) -> Flat:
        self._free.append(right)
        return left.add(right)

    def _reduce(self) -> None:
        own = cast("dict[Any, Flat]", self._stack.take())
        whole = self._whole = self._whole or self._new_flat()
        self._exchange.combine(own, whole, self._is_empty)
        self._free += own.values()
        with torch.no_grad():
            for parameter, gradient, mark in zip(
                self._parameters, whole.gradients, whole.marks.tolist(), strict=True
            ):
                parameter.grad = gradient if mark else None
            for buffer, summed in zip(self._current_buffers(), whole.buffers, strict=True):
                buffer.copy_(summed)
        self.is_reduced = True

    def _new_flat(self) -> Flat:
        return Flat(self._parameters, self._current_buffers(), self._live.virtual_ranks)

    def _is_empty(self, number: int) -> bool:
        share = self._live.share
        assert share is not None
        size, count = share.batch_records, self._live.virtual_ranks
        return size * number // count == size * (number + 1) // count

    def _current_buffers(self) -> list[torch.Tensor]:
        return _unique(module.buffers() for module in self._modules)


def _unique(groups: Iterable[Iterable[torch.Tensor]]) -> list[Any]:
    """Each tensor once, in the order of the modules."""
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        for tensor in group:
            found.setdefault(id(tensor), tensor)
    return list(found.values())
