"""Before each collective the ranks say what they are about to do.

One that differs is named instead of hanging or mixing up what does not belong together, and one that has joined
(`hvd.join`) learns what to take part in. What is small travels along, so that there is one exchange for both.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stoker.compat.horovod.basics import HorovodWorld, Span
from stoker.compat.horovod.exceptions import HorovodInternalError
from stoker.errors import ConfigError
from stoker.train.failures import is_collective_failure

KINDS = (
    *("join", "allreduce", "gradients", "barrier", "allgather", "broadcast", "alltoall", "reducescatter"),
    *("broadcast_object", "allgather_object"),
)
OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product", "")
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
DIMENSIONS_MAX = 8
_HEAD_BYTES = 8 * (6 + 1 + DIMENSIONS_MAX + 1)
PAYLOAD_BYTES = 1024 - _HEAD_BYTES
"""What may travel along. The frame is as long on all ranks whatever they are about to do."""
JOINS_WITH = frozenset({"join", "allreduce", "gradients", "barrier"})
"""What ranks may do while others have joined."""
LOOK_INTERVAL_S = 0.001
"""Between two looks of a rank that waits for several at once."""


@dataclass(frozen=True)
class Request:
    """What a rank is about to do. All must say the same, but for `own`."""

    kind: str
    name: str = ""
    """As the script calls it; empty: it does not."""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    """Without what may differ between ranks."""
    op: str = ""
    root: int = -1
    layout: int = 0
    """A number for all else that must be the same."""
    own: int = 0
    """A rank's own number."""
    wraps: str = ""
    """More for people."""

    def numbers(self) -> list[int]:
        """The same in numbers. Raises ConfigError for a tensor that no collective takes."""
        if len(self.shape) > DIMENSIONS_MAX:
            raise ConfigError(
                f"{self.kind}: tensors have at most {DIMENSIONS_MAX} dimensions here, not {len(self.shape)}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"{self.kind}: no collective takes {self.dtype}")
        sizes = [*self.shape, *[0] * (DIMENSIONS_MAX - len(self.shape))]
        dtype = -1 if self.dtype is None else DTYPES.index(self.dtype)
        name = zlib.crc32(self.name.encode())
        head = [KINDS.index(self.kind), dtype, OPS.index(self.op), self.root, name, self.layout]
        return [*head, len(self.shape), *sizes, self.own]

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        of = (
            f" of {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
            if self.dtype is not None
            else ""
        )
        op = f", op={self.op}" if self.op else ""
        root = f", root_rank={self.root}" if self.root >= 0 else ""
        return f"{self.kind}{name}{of}{self.wraps}{op}{root}"


class Agreed(NamedTuple):
    """What all are about to do."""

    request: Request
    """Of those who have not joined; where all have: a join."""
    own: tuple[int, ...]
    """Each rank's own number, by Horovod's rank."""
    joined: tuple[int, ...] = ()
    """Ranks that have joined."""
    payloads: tuple[torch.Tensor, ...] = ()
    """What came along from each, PAYLOAD_BYTES bytes; zeros from those who sent nothing."""


def fits(size_bytes: int) -> bool:
    """Whether so much travels along."""
    return size_bytes <= PAYLOAD_BYTES


def agree(
    world: HorovodWorld,
    span: Span,
    request: Request,
    payload: torch.Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Agreed:
    """Hear what everybody is about to do, and what travels along: bytes, as far as they fit.

    `meanwhile` is called again and again until all have been heard, and may raise.

    Raises ConfigError, on every rank, where they differ.
    """
    asked = _ask(world, span, request.numbers(), payload)
    while meanwhile is not None and asked.work is not None and not asked.work.is_completed():
        meanwhile()
        time.sleep(LOOK_INTERVAL_S)
    return _agreed(world, asked, request)


class Absent:
    """What a rank that has joined says in its process sets: who uses one of them hears that this one never will.

    A join is of all ranks, so that in a set nobody stands in for it. Horovod stalls there.
    """

    def __init__(self, world: HorovodWorld) -> None:
        self._world = world
        self._request = Request("join")
        self._asked = [_ask(world, span, self._request.numbers(), None) for span in world.own_sets()]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._asked)

    def look(self) -> None:
        """Raises ConfigError, on every rank of a set, where others use it."""
        for asked in self._asked:
            if asked.work is None or asked.work.is_completed():
                _agreed(self._world, asked, self._request)

    def end(self) -> None:
        """All ranks have joined."""
        for asked in self._asked:
            _agreed(self._world, asked, self._request)


def _agreed(world: HorovodWorld, asked: _Asked, request: Request) -> Agreed:
    span = asked.span
    heard, payloads = _heard(asked)
    joined = tuple(rank for rank, one in enumerate(heard) if one[0] == KINDS.index("join"))
    active = [rank for rank in range(span.size) if rank not in joined]
    own = tuple(one[-1] for one in heard)
    if not active:
        return Agreed(request, own, joined)
    first = heard[active[0]]
    if any(heard[rank][:-1] != first[:-1] for rank in active):
        raise ConfigError(f"ranks are not in the same collective: {_described(world, span, request)}")
    common = request if request.kind != "join" else _request_of(first)
    if joined and span.group is not None:
        raise ConfigError(
            f"ranks {[span.ranks[one] for one in joined]} have joined (hvd.join), which is of all ranks, while others "
            f"are at {common} of the process set {list(span.ranks)}: use no set with a rank that has joined until "
            "hvd.join() has returned"
        )
    if joined and (common.kind not in JOINS_WITH or common.op not in ("", "Sum", "Average")):
        raise ConfigError(
            f"ranks {list(joined)} have joined (hvd.join) while others are at {common}: then only barriers and "
            "allreduce with Sum or Average are possible"
        )
    return Agreed(common, own, joined, payloads)


@contextlib.contextmanager
def told_as_horovod() -> Iterator[None]:
    """Errors of collectives that a lost peer has caused are HorovodInternalError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        if is_collective_failure(error):
            raise HorovodInternalError(f"a collective failed: {error}") from error
        raise


class _Asked(NamedTuple):
    """Ranks that are being heard."""

    span: Span
    everybody: torch.Tensor
    """What each says, as it comes."""
    work: dist.Work | None
    """None: there is nobody else."""


def _ask(world: HorovodWorld, span: Span, numbers: list[int], payload: torch.Tensor | None) -> _Asked:
    frame = torch.zeros(_HEAD_BYTES + PAYLOAD_BYTES, dtype=torch.uint8, device=world.device)
    frame[:_HEAD_BYTES] = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    if payload is not None and payload.numel():
        frame[_HEAD_BYTES : _HEAD_BYTES + payload.numel()] = payload
    if span.size == 1:
        return _Asked(span, frame.unsqueeze(0), None)
    everybody = frame.new_empty(span.size, len(frame))
    with told_as_horovod():
        work: dist.Work | None = dist.all_gather(
            list(everybody.unbind()), frame, group=span.group, async_op=True
        )
    return _Asked(span, everybody, work)


def _heard(asked: _Asked) -> tuple[list[list[int]], tuple[torch.Tensor, ...]]:
    """What each has said, and what came along, by its number in the span."""
    with told_as_horovod():
        if asked.work is not None:
            asked.work.wait()
        said: list[list[int]] = asked.everybody[:, :_HEAD_BYTES].contiguous().view(torch.int64).tolist()
    payloads = asked.everybody[:, _HEAD_BYTES:].unbind()
    order = asked.span.order
    return [said[one] for one in order], tuple(payloads[one] for one in order)


def _described(world: HorovodWorld, span: Span, request: Request) -> str:
    """What each rank is at, in words."""
    said: list[Any] = [None] * span.size
    with told_as_horovod():
        dist.all_gather_object(said, str(request), group=span.group)
    by_words: dict[str, list[int]] = {}
    for rank, number in zip(span.ranks, span.order, strict=True):
        by_words.setdefault(said[number], []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} in {words}"
        for words, ranks in by_words.items()
    )


def _request_of(numbers: list[int]) -> Request:
    """What others are about to do; names do not come along."""
    kind, dtype, op, root, _, layout, dimensions, *sizes = numbers
    known = Request(KINDS[kind], op=OPS[op], root=root, layout=layout, shape=tuple(sizes[:dimensions]))
    return known if dtype < 0 else replace(known, dtype=DTYPES[dtype])
