"""Which blocks make up an object. Pure.

A block is `(bucket, key, version, index)` and never changes; what can change is the pointer from a key to
its version, which is not kept here.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_BLOCK_SIZE_BYTES = 4 * 1024 * 1024


class BlockSpan(NamedTuple):
    """Bytes `[start, stop)` inside block number `index`."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    stop: int


def block_count(size_bytes: int, block_size_bytes: int) -> int:
    """How many blocks an object of this size has. An empty object has none."""
    return -(-size_bytes // block_size_bytes)


def block_bounds(size_bytes: int, block_size_bytes: int, index: int) -> tuple[int, int]:
    """The bytes `[start, stop)` that block `index` holds. Raises ValueError outside the object."""
    start = index * block_size_bytes
    if index < 0 or start >= size_bytes:
        raise ValueError(f"an object of {size_bytes} bytes has no block {index}")
    return start, min(start + block_size_bytes, size_bytes)


def split(start: int, stop: int, block_size_bytes: int) -> list[BlockSpan]:
    """The pieces of blocks that make up bytes `[start, stop)`, in order. Raises ValueError."""
    if start < 0 or stop < start:
        raise ValueError(f"bytes [{start}, {stop}) are not a range")
    spans = []
    while start < stop:
        index, inside = divmod(start, block_size_bytes)
        size = min(block_size_bytes - inside, stop - start)
        spans.append(BlockSpan(index, inside, inside + size))
        start += size
    return spans
