"""What has left a server's disk, and why; and how long that had not been used. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stoker._native import Piece

ROOM, FORESEEN, LIMIT, AGE, COPIES, OPERATOR, LOST = (
    "room",
    "foreseen",
    "limit",
    "age",
    "copies",
    "operator",
    "lost",
)
"""For newcomers, what was used longest ago; for newcomers, what is announced to be read latest; for a capacity that is
lower than it was; because its bucket keeps it for a time only; because others are to hold it, and do; because an
operator wanted it; because it could not be read, or was not what had been written."""
REASONS = (ROOM, FORESEEN, LIMIT, AGE, COPIES, OPERATOR, LOST)
WINDOW_S = 3600
_SLOT_S = 300


class Departed(NamedTuple):
    """How much has left a bucket for one reason."""

    blocks: int = 0
    size_bytes: int = 0


class Departures:
    """Of one store, by the number of the bucket. Times are the index's, in seconds."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], Departed] = {}
        self._shortest: dict[int, dict[int, int]] = {}

    def left(self, why: str, pieces: Iterable[Piece], now_s: int) -> None:
        """These pieces leave. Those that leave for room say how long what is held can wait to be used again."""
        for piece in pieces:
            self.add(why, piece.bucket, 1, piece.size_bytes)
            if why == ROOM:
                slots = self._shortest.setdefault(piece.bucket, {})
                slot, unused_s = now_s // _SLOT_S, max(0, now_s - piece.used_s)
                slots[slot] = min(unused_s, slots.get(slot, unused_s))

    def add(self, why: str, bucket: int, blocks: int, size_bytes: int) -> None:
        """So much has left a bucket."""
        sums = self._sums.get((bucket, why), Departed())
        self._sums[bucket, why] = Departed(sums.blocks + blocks, sums.size_bytes + size_bytes)

    def of(self, buckets: Sequence[int], why: str) -> Departed:
        """How much has left these buckets for one reason."""
        sums = [self._sums.get((bucket, why), Departed()) for bucket in buckets]
        return Departed(sum(one.blocks for one in sums), sum(one.size_bytes for one in sums))

    def shortest_unused_s(self, buckets: Sequence[int], now_s: int) -> int | None:
        """The shortest time since its last use of all that left these buckets for room in the last hour; None: nothing
        did."""
        from_slot = (now_s - WINDOW_S) // _SLOT_S + 1
        found: list[int] = []
        for bucket in buckets:
            slots = self._shortest.get(bucket, {})
            for slot in [slot for slot in slots if slot < from_slot]:
                del slots[slot]
            found += slots.values()
        return min(found, default=None)
