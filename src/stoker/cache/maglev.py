"""Which members own a name. Pure.

Maglev hashing (Eisenbud et al., NSDI 2016, listing 1), with weights as Envoy has them, and Envoy's hashes and table
size: an Envoy whose endpoints are called as these members are routes to the same ones. Every member of a fleet and
every client comes to the same table, whatever order it heard of the others in. When a member comes or goes, other names
stay where they are but for a few.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

TABLE_SIZE = 65537
"""A prime; the fleet's shares are even within a hundredth of a percent of the table for some hundred members."""
WEIGHT_MAX = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """One cache server. `weight` is its share beside the others'; `zone` is where it stands; empty: nobody knows."""

    name: str
    weight: int = 1
    zone: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a member of a fleet needs a name")
        if not 0 <= self.weight <= WEIGHT_MAX:
            raise ValueError(f"the weight of {self.name} must be 0 to {WEIGHT_MAX}, not {self.weight}")


class Placement:
    """The owners of every name, for these members. One of weight 0 owns nothing: it is leaving."""

    def __init__(self, members: Iterable[Member], table_size: int = TABLE_SIZE) -> None:
        by_name = {member.name: member for member in members}
        self.members: tuple[Member, ...] = tuple(by_name[name] for name in sorted(by_name))
        self._owning = tuple(member for member in self.members if member.weight)
        self._table_size = table_size
        self._table = _fill(self._owning, table_size)
        self._zones = len({member.zone for member in self._owning})

    def owner(self, name: str) -> Member | None:
        """Who owns a name; None in an empty fleet."""
        if not self._owning:
            return None
        return self._owning[self._table[_hash(name) % len(self._table)]]

    def owners(self, name: str, count: int) -> list[Member]:
        """The owner and those who come next, `count` of them if there are so many: other zones first, then others."""
        count = min(count, len(self._owning))
        if count < 1:
            return []
        table, size = self._table, len(self._table)
        start = _hash(name) % size
        order: list[int] = []
        seen: set[int] = set()
        zones: set[str] = set()
        for step in range(size):
            index = table[(start + step) % size]
            if index in seen:
                continue
            seen.add(index)
            order.append(index)
            zones.add(self._owning[index].zone)
            if len(order) >= count and len(zones) >= min(count, self._zones):
                break
        return [self._owning[index] for index in _spread(order, self._owning, count)]

    def table(self) -> tuple[list[str], bytes]:
        """Who owns something, by name, and the numbers of those that own what has each hash, modulo the table's size
        (XXH64; unsigned numbers of two bytes, as this machine has them)."""
        return [member.name for member in self._owning], array("H", self._table).tobytes()

    def without(self, names: Iterable[str]) -> Placement:
        """The placement while these are away: what they own goes where it will go once the fleet has left them out."""
        gone = frozenset(names)
        return Placement([m for m in self.members if m.name not in gone], self._table_size)

    def shares(self) -> dict[str, float]:
        """The part of all names that each member owns."""
        counts = [0] * len(self._owning)
        for index in self._table:
            counts[index] += 1
        owned = {m.name: n / len(self._table) for m, n in zip(self._owning, counts, strict=True)}
        return {member.name: owned.get(member.name, 0.0) for member in self.members}


def block_owner_name(bucket: str, key: str, index: int) -> str:
    """The name by which a block is placed: the first with its key's metadata, others striped over the fleet."""
    return f"{bucket}/{key}" if index == 0 else f"{bucket}/{key}#{index}"


def _hash(name: str) -> int:
    return xxhash.xxh64_intdigest(name.encode("utf-8", "surrogatepass"))


def _fill(members: Sequence[Member], size: int) -> array[int]:
    """Members take turns to take the next free place of their own permutation, as often as their weight says."""
    table = array("i", [-1]) * (size if members else 0)
    heaviest = max((member.weight for member in members), default=0)
    offsets, skips, due = [], [], []
    for member in members:
        name = member.name.encode("utf-8", "surrogatepass")
        offsets.append(xxhash.xxh64_intdigest(name) % size)
        skips.append(xxhash.xxh64_intdigest(name, seed=1) % (size - 1) + 1)
        due.append(0)
    filled, turn = 0, 0
    while filled < len(table):
        turn += 1
        for i, member in enumerate(members):
            if turn * member.weight < due[i]:
                continue
            due[i] += heaviest
            place, skip = offsets[i], skips[i]
            while table[place] >= 0:
                place = (place + skip) % size
            table[place] = i
            offsets[i] = (place + skip) % size
            filled += 1
            if filled == size:
                break
    return table


def _spread(order: Sequence[int], members: Sequence[Member], count: int) -> list[int]:
    """The first of each zone first; all in the order in which they came."""
    zones: set[str] = set()
    first: list[int] = []
    rest: list[int] = []
    for index in order:
        zone = members[index].zone
        (rest if zone in zones else first).append(index)
        zones.add(zone)
    chosen = set((first + rest)[:count])
    return [index for index in order if index in chosen]
