"""How a batch is put together, and how it crosses from a loader process to the training process.

In a loader process samples are stacked straight into shared memory, so that a record's bytes are copied once where its
sample is a view of them. What does not lie there yet (batches of a `collate_fn` of one's own) is copied there as it is
pickled. Small tensors, and whatever is no tensor and no array, travel in the message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from stoker.data.loader_arena import ArenaReader, ArenaWriter, Place

Collate = Callable[[list[Any]], Any]
CACHE_LINE_BYTES = 64
SLOT_FROM_BYTES = 16 * 1024
"""Tensors from here on lie in shared memory; shorter ones cost less in the message."""

_reader: ContextVar[ArenaReader] = ContextVar("stoker-loader-reader")


class Collator:
    """Collates as torch's `default_collate` does, with one copy of each array.

    `writer`: where to; None in the training process.
    """

    def __init__(self, writer: BatchWriter | None) -> None:
        self._writer = writer
        self._map = {
            **default_collate_fn_map,
            torch.Tensor: self._tensors,
            np.ndarray: self._arrays,
        }

    def __call__(self, samples: list[Any]) -> Any:
        return collate(samples, collate_fn_map=self._map)

    def _tensors(self, batch: Sequence[torch.Tensor], **options: Any) -> Any:
        first = batch[0]
        if not all(_is_plain(one) and one.dtype == first.dtype for one in batch):
            return default_collate_fn_map[torch.Tensor](batch, **options)
        return torch.stack(list(batch), out=self._room(first.dtype, (len(batch), *first.shape)))

    def _arrays(self, batch: Sequence[Any], **options: Any) -> Any:
        """Not by way of a tensor for each: that takes longer, and warns of arrays that cannot be written."""
        first = batch[0]
        dtype = _tensor_type(first)
        alike = all(
            isinstance(one, np.ndarray) and one.shape == first.shape and one.dtype == first.dtype
            for one in batch
        )
        if dtype is None or not alike:
            return default_collate_fn_map[np.ndarray](batch, **options)
        made = self._room(dtype, (len(batch), *first.shape))
        target = made.numpy()
        for position, one in enumerate(batch):
            target[position] = one
        return made

    def _room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if self._writer is not None:
            placed = self._writer.room(dtype, shape)
            if placed is not None:
                return placed
        return torch.empty(shape, dtype=dtype)


class BatchWriter:
    """The loader process's side: makes messages of batches."""

    def __init__(self, writer: ArenaWriter, mark: Callable[[int], None]) -> None:
        self._arena = writer
        self._mark = mark
        self._placed: dict[int, tuple[Place, torch.Tensor]] = {}
        """By address: tensors of the batch in the making that lie in shared memory."""
        self._sent: set[int] = set()

    def begin(self) -> None:
        """A new batch; slots that the one before took and did not send are free again."""
        self._placed = {}
        self._sent = set()

    def room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A tensor in shared memory; None where it is too small for it, or there is no memory."""
        count = int(np.prod(shape, dtype=np.int64))
        size_bytes = count * dtype.itemsize
        if size_bytes < SLOT_FROM_BYTES:
            return None
        taken = self._arena.take(size_bytes, but={place.slot for place, _ in self._placed.values()})
        if taken is None:
            return None
        place, memory = taken
        made = torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        self._placed[made.data_ptr()] = place, made
        return made

    def message(self, content: Any) -> memoryview:
        """It pickled, all but the contents of large tensors and arrays. Raises what pickling does."""
        buffer = BytesIO()
        _Pickler(buffer, self).dump(content)
        for slot in self._sent:
            self._mark(slot)
        return buffer.getbuffer()

    def place(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """How the other side comes by a tensor; None: as torch does it."""
        if not _is_plain(tensor) or tensor.nbytes < SLOT_FROM_BYTES:
            return None
        known = self._placed.get(tensor.data_ptr())
        if known is None or known[0].slot in self._sent or not _is_same(known[1], tensor):
            is_last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
            order = tensor.permute(0, 2, 3, 1) if is_last else tensor
            made = self.room(tensor.dtype, tuple(order.shape))
            if made is None:
                return None
            made.copy_(order)
            known = self._placed[made.data_ptr()]
            tensor = made.permute(0, 3, 1, 2) if is_last else made
        self._sent.add(known[0].slot)
        size_bytes = tensor.nbytes
        return known[0], size_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Pickler(ForkingPickler):
    def __init__(self, buffer: BytesIO, batch: BatchWriter) -> None:
        super().__init__(buffer, 5)
        self._batch = batch

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor:
            thing = thing.resolve_conj().resolve_neg()  # torch forgets these on the way
            placed = self._batch.place(thing)
            if placed is not None:
                return _tensor_at, placed
            if _is_plain(thing):
                return _tensor_of, (_bytes_of(thing), thing.dtype, tuple(thing.shape))
        elif (
            type(thing) is np.ndarray and _tensor_type(thing) is not None and thing.nbytes >= SLOT_FROM_BYTES
        ):
            placed = self._batch.place(torch.from_numpy(np.require(thing, requirements=["C", "W"])))
            if placed is not None:
                return _array_at, placed
        return NotImplemented


@contextmanager
def reading_from(arena: ArenaReader) -> Iterator[None]:
    """What is unpickled meanwhile lies in this arena."""
    before = _reader.set(arena)
    try:
        yield
    finally:
        _reader.reset(before)


def aligned(batch: Any) -> Any:
    """The batch, with copies of tensors on the host that do not begin at a cache line: kernels may take other ways
    through them, with other roundings."""
    if isinstance(batch, torch.Tensor):
        is_misplaced = _is_plain(batch) and batch.data_ptr() % CACHE_LINE_BYTES != 0
        return batch.clone() if is_misplaced else batch
    if isinstance(batch, dict):
        made = copy.copy(batch)
        made.update({key: aligned(value) for key, value in batch.items()})
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(aligned, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(aligned, batch))
    return batch


def size_of(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch of usual shape."""
    if isinstance(batch, torch.Tensor):
        return int(batch.nbytes) if batch.layout is torch.strided else 0  # a sparse one does not tell
    if isinstance(batch, np.ndarray):
        return int(batch.nbytes)
    if isinstance(batch, bytes):
        return len(batch)
    if isinstance(batch, dict):
        return sum(size_of(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return sum(size_of(value) for value in batch if not isinstance(value, str | int | float))
    return 0


def _tensor_at(
    place: Place, size_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    whole = torch.from_numpy(_reader.get().bytes_of(place, size_bytes)).view(dtype)
    return whole.as_strided(shape, strides)


def _array_at(*placed: Any) -> Any:
    return _tensor_at(*placed).numpy()


def _tensor_of(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors at one address: whether they are the same bytes in the same order."""
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    """An ordinary tensor of values in this process's memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _tensor_type(array: Any) -> torch.dtype | None:
    """Torch's type for an array's; None if it has none, or another byte order."""
    if not array.dtype.isnative:
        return None
    return _TYPES.get(array.dtype.str)


_TYPES = {
    np.dtype(name).str: getattr(torch, name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")
} | {np.dtype("bool").str: torch.bool}
