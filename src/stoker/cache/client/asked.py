"""What a batch asks for: whole objects of a bucket, or parts of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stoker.errors import StokerError
from stoker.wire.cache_batch import OFFSET_MAX, RANGE, DescriptorsWanted, ReadRequest

Item = bytes | memoryview | StokerError
"""What came of one thing that was asked for."""


class ByteRange(NamedTuple):
    """Bytes `[start, stop)` of an object; with `version`, exactly that version's."""

    key: str
    start: int
    stop: int
    version: str | None = None


class Asked(Protocol):
    """Things in an order, each of which is answered by one item."""

    def __len__(self) -> int: ...

    def key(self, position: int) -> str:
        """The object that the thing at this position is, or is of."""
        ...

    def some(self, positions: Sequence[int]) -> Asked:
        """Those at these positions."""
        ...

    def request(self, bucket: str, descriptors: DescriptorsWanted | None) -> ReadRequest:
        """As the server is asked for all of them. Raises ValueError."""
        ...


class Wholes:
    """Whole objects."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, position: int) -> str:
        return self._keys[position]

    def some(self, positions: Sequence[int]) -> Wholes:
        return Wholes([self._keys[position] for position in positions])

    def request(self, bucket: str, descriptors: DescriptorsWanted | None) -> ReadRequest:
        return ReadRequest(bucket, self._keys, descriptors)


class Parts:
    """Parts of objects."""

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self.ranges = ranges

    def __len__(self) -> int:
        return len(self.ranges)

    def key(self, position: int) -> str:
        return self.ranges[position].key

    def some(self, positions: Sequence[int]) -> Parts:
        return Parts([self.ranges[position] for position in positions])

    def request(self, bucket: str, descriptors: DescriptorsWanted | None) -> ReadRequest:
        """Each version of a key is named once."""
        numbers: dict[tuple[str, str], int] = {}
        packed = []
        pack = RANGE.pack
        for key, start, stop, version in self.ranges:
            if not 0 <= start <= stop:
                check_range(start, stop)
            number = numbers.setdefault((key, version or ""), len(numbers))
            try:
                packed.append(pack(number, start, stop))
            except struct.error:
                packed.append(pack(number, min(start, OFFSET_MAX), min(stop, OFFSET_MAX)))
        versions = [version for _, version in numbers]
        return ReadRequest(
            bucket,
            [key for key, _ in numbers],
            descriptors,
            b"".join(packed),
            versions if any(versions) else [],
        )


def check_range(start: int, stop: int) -> None:
    """Raises ValueError."""
    if not 0 <= start <= stop:
        raise ValueError(f"bytes [{start}, {stop}) are not a range")


def raise_first(items: Sequence[Item | None]) -> None:
    """Raise the first that is an error."""
    for item in items:
        if isinstance(item, StokerError):
            raise item


def cut_at_owners(part: ByteRange, block_size_bytes: int, owner_of: Callable[[int], str]) -> list[ByteRange]:
    """A part cut at those borders of blocks where one block's owner is not the next one's."""
    first, last = part.start // block_size_bytes, max(part.start, part.stop - 1) // block_size_bytes
    pieces: list[ByteRange] = []
    start, owner = part.start, owner_of(first)
    for block in range(first + 1, last + 1):
        following = owner_of(block)
        if following != owner:
            border = block * block_size_bytes
            pieces.append(part._replace(start=start, stop=border))
            start, owner = border, following
    pieces.append(part._replace(start=start))
    return pieces


def joined(items: Sequence[Item], *, views: bool) -> Item:
    """Pieces of one part as one item: an error if one of them is."""
    if len(items) == 1:
        return items[0]
    parts: list[bytes | memoryview] = []
    for item in items:
        if isinstance(item, StokerError):
            return item
        parts.append(item)
    data = b"".join(parts)
    return memoryview(data) if views else data
