"""Who leaves when room is needed. Pure: a policy orders blocks and says why, it moves nothing.

`lru` gives up what was used longest ago. `uniform` fills once and never replaces, which is right for
shuffled epochs: replacing would evict what is read as soon as what comes in. Buckets with different
policies share one limit: only blocks of `lru` buckets are ever victims, and a `uniform` bucket that meets
a full cache is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

B = TypeVar("B", bound=Hashable)

LRU = "lru"
UNIFORM = "uniform"
POLICIES = (LRU, UNIFORM)


class Verdict(NamedTuple, Generic[B]):
    """Blocks to evict so that the newcomer fits; or, if `refused`, none, and it is not stored."""

    victims: tuple[B, ...]
    refused: bool
    why: str


class Evictor(Generic[B]):
    """The order of eviction over the held blocks of one store."""

    def __init__(self) -> None:
        self._replaceable: OrderedDict[B, int] = OrderedDict()
        self._kept: set[B] = set()

    def __len__(self) -> int:
        return len(self._replaceable) + len(self._kept)

    def on_fill(self, block: B, size_bytes: int, policy: str) -> None:
        """The block is held now and was just used."""
        if policy == LRU:
            self._replaceable[block] = size_bytes
        elif policy == UNIFORM:
            self._kept.add(block)
        else:
            raise ValueError(f"{policy!r} is not an eviction policy; there are {', '.join(POLICIES)}")

    def on_hit(self, block: B) -> None:
        """The block was used."""
        if block in self._replaceable:
            self._replaceable.move_to_end(block)

    def on_gone(self, block: B) -> None:
        """The block is held no more."""
        if self._replaceable.pop(block, None) is None:
            self._kept.discard(block)

    def make_room(
        self, size_bytes: int, free_bytes: int, policy: str, is_pinned: Callable[[B], bool]
    ) -> Verdict[B]:
        """What has to leave so that `size_bytes` fit into a bucket of this policy."""
        if size_bytes <= free_bytes:
            return Verdict((), False, "there is room")
        if policy == UNIFORM:
            return Verdict((), True, "uniform never replaces and the cache is full")
        victims: list[B] = []
        missing = size_bytes - free_bytes
        for block, held_bytes in self._replaceable.items():
            if is_pinned(block):
                continue
            victims.append(block)
            missing -= held_bytes
            if missing <= 0:
                return Verdict(tuple(victims), False, "least recently used")
        return Verdict((), True, "all that may be evicted does not make enough room")
