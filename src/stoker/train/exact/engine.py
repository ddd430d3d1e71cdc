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

from stoker.data.order import share_of
from stoker.data.seeding import seed_everything
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
        self._strides: list[tuple[int, ...]] = []
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
        self._before: list[torch.Tensor] = []
        """What buffers were when the global batch began. Not all that changes them counts their versions."""
        self._is_torn = False
        self.is_reduced = False
        """The gradients of the whole global batch are there."""
        self.micro_batch: MicroBatch | None = None
        """The one under way."""

    @property
    def is_between(self) -> bool:
        """Whether more micro-batches of the global batch are to come on this rank. Raises ConfigError where a loop was
        left before they came."""
        self._check_whole()
        return self.micro_batch is not None and not self.micro_batch.is_last

    def forget(self) -> None:
        """The world is left: whatever was begun is begun anew."""
        self._stack.take()
        self._is_queued, self._begun, self._harvested = False, 0, 0
        self.is_reduced, self.micro_batch, self._is_torn = False, None, False

    def left(self, micro_batch: MicroBatch) -> None:
        """A loop was left with this one."""
        if self.micro_batch is micro_batch:
            self._is_torn = not self._stack.is_empty
            self.micro_batch = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """A micro-batch is about to be made. Raises ConfigError where one before it was left out."""
        self._check_whole()
        if self.micro_batch is not None and self._harvested != (self._begun if self._harvested else 0):
            raise ConfigError(ONE_BACKWARD)
        if micro_batch.is_first:
            self._is_torn = not self._stack.is_empty
            self._check_whole()
            for parameter in self._parameters:
                parameter.grad = None
            self._watch()
            self._check_layout()
            self._begun, self._harvested, self.is_reduced = 0, 0, False
            self._before = [buffer.detach().clone() for buffer in self._current_buffers()]
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

    def _check_whole(self) -> None:
        if self._is_torn:
            raise ConfigError(
                "a loop of exact mode was left within a global batch, after backward(): leave it before that, or after "
                "a commit"
            )

    def _watch(self) -> None:
        """See the gradients of all parameters that have any; a script may freeze some in between."""
        wanted = [p for p in _unique(m.parameters() for m in self._modules) if p.requires_grad]
        strides = [parameter.stride() for parameter in wanted]
        if strides == self._strides and all(map(is_, wanted, self._parameters)):
            return
        self._strides = strides
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._whole, self._free = wanted, None, []
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in wanted]

    def _check_layout(self) -> None:
        """Make room anew where buffers have come, gone or changed their shapes since the last global batch."""
        shapes = [buffer.shape for buffer in self._current_buffers()]
        if self._whole is not None and [place.shape for place in self._whole.buffers] != shapes:
            self._whole, self._free = None, []

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
            # Each part counts for two; who has fewer is not behind the others when all wait for each other.
            self._live.progress += 2 * (micro_batch.virtual_ranks - micro_batch.parts)
            self._reduce(micro_batch)
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def _part(self, micro_batch: MicroBatch) -> Flat | None:
        """The weighted gradients and buffers of a micro-batch; None where it has no records."""
        share = micro_batch.share
        if share.records == 0:
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
        is_first = all(map(_is_empty(micro_batch), range(micro_batch.number)))
        for number, (buffer, place) in enumerate(self._placed_buffers(flat), start=len(self._parameters)):
            flat.marks[number] = not torch.equal(buffer, self._before[number - len(self._parameters)])
            if is_first or buffer.is_floating_point() or buffer.is_complex():
                there.append(buffer)
                places.append(place)
            else:
                place.zero_()
        with torch.no_grad():
            torch._foreach_copy_(places, there)
        flat.scale(share.records / share.batch_records)
        return flat

    def _placed_buffers(self, flat: Flat) -> list[tuple[torch.Tensor, torch.Tensor]]:
        buffers = self._current_buffers()
        if [buffer.shape for buffer in buffers] != [place.shape for place in flat.buffers]:
            raise ConfigError(
                "a buffer has come, gone or changed its shape within a global batch of exact mode: register caches "
                "with persistent=False"
            )
        return list(zip(buffers, flat.buffers, strict=True))

    def _add(self, left: Flat, right: Flat) -> Flat:
        self._free.append(right)
        return left.add(right)

    def _reduce(self, micro_batch: MicroBatch) -> None:
        own = cast("dict[Any, Flat]", self._stack.take())
        whole = self._whole = self._whole or self._new_flat()
        self._exchange.combine(own, whole, _is_empty(micro_batch))
        self._free += own.values()
        marks = whole.marks.tolist()
        with torch.no_grad():
            for parameter, gradient, mark in zip(self._parameters, whole.gradients, marks, strict=False):
                parameter.grad = gradient if mark else None
            changed = marks[len(self._parameters) :]
            for (buffer, summed), mark in zip(self._placed_buffers(whole), changed, strict=True):
                if mark:  # the mean of what nobody has changed would be rounded
                    buffer.copy_(summed)
        seed_everything(micro_batch.batch_seed)  # what is drawn before the commit is the same on every rank
        self.is_reduced = True

    def _new_flat(self) -> Flat:
        return Flat(self._parameters, self._current_buffers(), self._live.virtual_ranks)

    def _current_buffers(self) -> list[torch.Tensor]:
        """But for what modules keep for themselves (`persistent=False`)."""
        return _unique(
            [
                buffer
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            ]
            for top in self._modules
            for module in top.modules()
        )


def _is_empty(micro_batch: MicroBatch) -> Callable[[int], bool]:
    """Whether a virtual rank has no records of this global batch."""
    size, count = micro_batch.share.batch_records, micro_batch.virtual_ranks
    return lambda number: share_of(number, count, 0, size, size).records == 0


def _unique(groups: Iterable[Iterable[torch.Tensor]]) -> list[Any]:
    """Each tensor once, in the order of the modules."""
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        for tensor in group:
            found.setdefault(id(tensor), tensor)
    return list(found.values())
