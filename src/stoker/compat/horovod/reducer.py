"""Reduces the gradients of one optimizer while the backward pass goes on, in buckets, in one order on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from stoker.compat.horovod.agreement import Request, agree, told_as_horovod
from stoker.compat.horovod.basics import HorovodWorld
from stoker.compat.horovod.process_sets import span_of
from stoker.compat.horovod.reductions import Average, Compressor, Op, reduced
from stoker.errors import ConfigError

BUCKET_BYTES = 25 * 1024 * 1024


class How(NamedTuple):
    """How gradients are reduced."""

    compression: Compressor
    op: Op
    predivide: float
    sparse_as_dense: bool
    process_set: Any = None


@dataclass
class _Bucket:
    """Gradients that travel together."""

    parameters: list[torch.nn.Parameter]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    """Those whose gradients are still to come in this step."""


class _Sent(NamedTuple):
    """A bucket under way."""

    bucket: _Bucket
    wire: torch.Tensor
    context: Any
    work: dist.Work | None
    sharers: int
    """How many ranks it is of."""


class Reducer:
    """Of one optimizer."""

    def __init__(
        self, world: HorovodWorld, named: Sequence[tuple[str, torch.nn.Parameter]], passes: int, how: How
    ) -> None:
        self._world, self._how = world, how
        self.passes = passes
        """Backward passes in one step."""
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._passes_left: dict[torch.nn.Parameter, int] = {}
        self._sent: list[_Sent] = []
        self.layout = 0
        self.has_new = False
        """Whether gradients have come since they were reduced last."""
        self.rebuild(named)
        world.hold(self)
        world.know(self)

    def rebuild(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """From now on the gradients of these, as far as they get any."""
        for hook in self._hooks:
            hook.remove()
        self._named = list(named)
        wanted = [parameter for _, parameter in named if parameter.requires_grad]
        self._hooks = [_hooked(p, self._on_gradient) for p in wanted]
        self._buckets = _buckets(wanted)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        described = [(n, tuple(p.shape), str(p.dtype)) for n, p in named if p.requires_grad]
        self.layout = zlib.crc32(str(described).encode())
        self.forget()

    def forget(self) -> None:
        """Drop what is under way: the next step begins anew."""
        self._sent.clear()
        self._passes_left = dict.fromkeys(self._bucket_of, self.passes)
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    @property
    def is_under_way(self) -> bool:
        """Whether gradients have been sent and not been fetched."""
        return bool(self._sent)

    @property
    def _is_stale(self) -> bool:
        """Parameters were frozen or released since."""
        return {p for _, p in self._named if p.requires_grad} != self._bucket_of.keys()

    def synchronize(self) -> None:
        """Reduce what is left and put the results into `grad`. Raises ConfigError, HorovodInternalError."""
        self.has_new = False
        if not self._takes_part:
            return
        if self._is_stale and not self._sent:
            self.rebuild(self._named)
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket)
        sent, self._sent = self._sent, []
        for one in sent:
            self._fetch(one)
        self.forget()
        if self._is_stale:  # what was sent already did not know of these
            late = [p for _, p in self._named if p.requires_grad and p not in self._bucket_of]
            self.rebuild(self._named)
            for bucket in _buckets(late):
                self._send(bucket)
                self._fetch(self._sent.pop())
        self._world.confirm()

    def reduce_zeros(self) -> None:
        """Take part in the others' step without gradients."""
        for bucket in self._buckets:
            size = sum(p.numel() for p in bucket.parameters)
            first = bucket.parameters[0]
            zeros, _ = self._how.compression.compress(first.detach().new_zeros(size))
            work = reduced(self._world.on_wire(zeros), self._how.op, self._world.ready())
            if work is not None:
                with told_as_horovod():
                    work.wait()

    @property
    def _takes_part(self) -> bool:
        """Not where gradients are those of a process set without this rank."""
        return self._how.process_set is None or self._how.process_set.included()

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        self.has_new = True
        if not self._takes_part:
            return
        left = self._passes_left[parameter] = self._passes_left[parameter] - 1
        if left < 0:
            raise ConfigError(
                f"gradients were computed more than backward_passes_per_step={self.passes} times before "
                "optimizer.step(): give hvd.DistributedOptimizer a larger backward_passes_per_step"
            )
        if left:
            return
        self._bucket_of[parameter].missing.discard(parameter)
        while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
            self._send(self._buckets[len(self._sent)])

    def _send(self, bucket: _Bucket) -> None:
        """Begin to reduce a bucket; what has no gradient here may have one elsewhere."""
        span = span_of(self._how.process_set)
        if not self._sent:
            op = self._how.op
            elements = sum(p.numel() for p in self._bucket_of)
            wraps = f" of {len(self._bucket_of)} parameters with {elements} elements"
            agree(self._world, span, Request("gradients", op=op, layout=self.layout, wraps=wraps))
        flat = torch.cat([self._gradient(p).reshape(-1) for p in bucket.parameters])
        if self._how.predivide != 1.0:
            flat.div_(self._how.predivide)
        if span.size == 1:
            self._sent.append(_Sent(bucket, flat, None, None, 1))
            return
        sent, context = self._how.compression.compress(flat)
        wire = self._world.on_wire(sent)
        self._sent.append(_Sent(bucket, wire, context, reduced(wire, self._how.op, span), span.size))

    def _fetch(self, sent: _Sent) -> None:
        whole = sent.wire
        if sent.work is not None:
            with told_as_horovod():
                sent.work.wait()
            whole = self._how.compression.decompress(whole, sent.context)
        scale = self._how.predivide / (sent.sharers if self._how.op == Average else 1)
        if scale != 1.0:
            whole.mul_(scale)
        pieces = torch.split(whole, [p.numel() for p in sent.bucket.parameters])
        for parameter, piece in zip(sent.bucket.parameters, pieces, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(piece.view_as(parameter.grad))

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            if not self._how.sparse_as_dense:
                raise ConfigError(
                    "an embedding has sparse gradients: give hvd.DistributedOptimizer sparse_as_dense=True"
                )
            gradient = parameter.grad = gradient.to_dense()
        return gradient.detach()


def _hooked(parameter: Any, call: Callable[[torch.nn.Parameter], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)
    return handle


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[_Bucket]:
    """Parameters in the order in which gradients usually come, from the last to the first."""
    buckets: list[_Bucket] = []
    last: tuple[torch.dtype, torch.device] | None = None
    used_bytes = 0
    for parameter in reversed(parameters):
        kind, size_bytes = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if kind != last or used_bytes + size_bytes > BUCKET_BYTES:
            buckets.append(_Bucket([]))
            last, used_bytes = kind, 0
        buckets[-1].parameters.append(parameter)
        used_bytes += size_bytes
    for bucket in buckets:
        bucket.missing = set(bucket.parameters)
    return buckets
