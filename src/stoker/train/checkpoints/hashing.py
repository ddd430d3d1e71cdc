"""Checksums of tensors and of files that are being written."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

from stoker.train.checkpoints.manifest import File
from stoker.train.checkpoints.places import Sink
from stoker.train.transfer import bytes_of

HASH_BYTES = 16 * 1024 * 1024
"""Hashed at a time."""


def hash_of(tensor: torch.Tensor) -> str:
    """Of its elements, in the order of rows."""
    hashed = xxhash.xxh3_128()
    if tensor.numel():
        raw = bytes_of(tensor.detach()).numpy()
        for at in range(0, len(raw), HASH_BYTES):
            hashed.update(raw[at : at + HASH_BYTES].data)
    return hashed.hexdigest()


class HashingSink:
    """What torch wants of a stream, before a place's; it knows what went through."""

    def __init__(self, sink: Sink, wrote: Callable[[int], None]) -> None:
        self._sink = sink
        self._wrote = wrote
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """A whole tensor comes at once."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), HASH_BYTES):
            part = view[at : at + HASH_BYTES]
            self._sink.write(part)
            self._hash.update(part)
            self.size_bytes += len(part)
            self._wrote(len(part))
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        """The place does that."""

    def close(self) -> None:
        """The place does that."""

    def file(self, name: str) -> File:
        return File(name, self.size_bytes, self._hash.hexdigest())
