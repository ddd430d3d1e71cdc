"""Buckets as the store knows them: their numbers in the index, and the lots that they are divided into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker._native import Index
from stoker.cache.evict import LRU
from stoker.cache.room import Lot, Room

_LOTS_MAX = 256


class PrefixRule(NamedTuple):
    """What lies under a prefix is counted, or kept, apart. `quota_bytes` 0: no limit of its own."""

    prefix: str
    quota_bytes: int = 0
    is_pinned: bool = False


@dataclass(slots=True)
class KeptBucket:
    """A bucket and its lots: the first for all that no rule is about, then one for each rule."""

    name: str
    number: int
    lots: list[Lot] = field(default_factory=list)
    evict_after_s: float = 0.0

    def lot_of(self, key: str) -> Lot:
        """Whose the key is: the longest prefix that it begins with."""
        best = self.lots[0]
        for lot in self.lots[1:]:
            if key.startswith(lot.prefix) and len(lot.prefix) > len(best.prefix):
                best = lot
        return best

    @property
    def has_rules(self) -> bool:
        return len(self.lots) > 1

    @property
    def ordinary_lots(self) -> frozenset[int]:
        """The numbers of those that are not pinned."""
        return frozenset(lot.number for lot in self.lots if not lot.is_pinned)


class Lots:
    """All buckets of one store. A lot's number is made of its bucket's and its own in it."""

    def __init__(self, index: Index, room: Room) -> None:
        self._index = index
        self._room = room
        self._buckets: dict[int, KeptBucket] = {}
        for name, (number, _) in index.buckets().items():
            self.set_bucket(name, number)

    def __getitem__(self, number: int) -> KeptBucket:
        """Raises KeyError."""
        return self._buckets[number]

    def __contains__(self, number: object) -> bool:
        return number in self._buckets

    def all(self) -> Iterable[KeptBucket]:
        return self._buckets.values()

    def set_bucket(
        self,
        name: str,
        number: int,
        *,
        policy: str = LRU,
        quota_bytes: int = 0,
        evict_after_s: float = 0.0,
        rules: Sequence[PrefixRule] = (),
    ) -> KeptBucket:
        """What a bucket may keep. What is counted in lots of rules that are no more is to be counted in those that the
        bucket has now.

        Raises ValueError where there are too many.
        """
        bucket = self._buckets.setdefault(number, KeptBucket(name, number))
        bucket.evict_after_s = evict_after_s
        first = number * _LOTS_MAX
        known = {lot.prefix: lot.number for lot in bucket.lots if lot.prefix}
        wanted = {rule.prefix: rule for rule in rules}
        used = {number for prefix, number in known.items() if prefix in wanted}
        lots = [Lot(first, name, "", policy)]
        for prefix, rule in wanted.items():
            lot_number = known.get(prefix)
            if lot_number is None:
                lot_number = self._free(first, used)
                if lot_number is None:
                    raise ValueError(
                        f"{name!r} has more than {_LOTS_MAX - 1} prefixes with rules of their own"
                    )
                used.add(lot_number)
            lots.append(Lot(lot_number, name, prefix, policy, rule.quota_bytes, rule.is_pinned))
        # What is being written there, or waits to leave, is counted there until it has ended.
        gone = [Lot(n, name, prefix, policy) for prefix, n in known.items() if n not in used]
        bucket.lots = lots
        for lot in [*lots, *gone]:
            self._room.set_lot(lot)
        self._room.set_quota(name, quota_bytes)
        return bucket

    def _free(self, first: int, used: Collection[int]) -> int | None:
        """A number for a lot of the bucket whose lots begin there: one in which nothing is counted any more."""
        numbers = range(first + 1, first + _LOTS_MAX)
        return next((n for n in numbers if n not in used and not self._room.used_by(n)), None)

    def bucket_of(self, lot: int) -> int:
        """The number of the bucket that a lot is of."""
        return lot // _LOTS_MAX

    def buckets_of(self, lots: Iterable[int]) -> list[int]:
        """The numbers of the buckets that these lots are of."""
        return sorted({self.bucket_of(lot) for lot in lots})
