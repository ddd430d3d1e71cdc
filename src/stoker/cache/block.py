r"""Which blocks are resident, and the hard byte limit. Pure.

    absent --reserve--> filling --fill--> held --evict--> absent
                           \--abandon--> absent

A block that is being served is pinned and cannot be evicted. Held plus reserved bytes never exceed the
limit: room is reserved before the first byte is written. A transition outside this table raises with the
history that led there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

B = TypeVar("B", bound=Hashable)

FILLING = "filling"
HELD = "held"
_HISTORY = 64


class IllegalTransition(AssertionError):
    """The shell asked for a move that the table does not have: a defect, never a condition of the world."""


class _Residence:
    __slots__ = ("pins", "size_bytes", "state")

    def __init__(self, size_bytes: int) -> None:
        self.state = FILLING
        self.size_bytes = size_bytes
        self.pins = 0


class Residency(Generic[B]):
    """The blocks of one store. Sizes are what the store charges for a block, in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ValueError(f"the limit must not be negative, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.reserved_bytes = 0
        self._blocks: dict[B, _Residence] = {}
        self._history: deque[tuple[str, B]] = deque(maxlen=_HISTORY)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    @property
    def free_bytes(self) -> int:
        """What may still be reserved without evicting anything."""
        return self.limit_bytes - self.held_bytes - self.reserved_bytes

    def state(self, block: B) -> str | None:
        """`filling`, `held`, or None for absent."""
        residence = self._blocks.get(block)
        return None if residence is None else residence.state

    def is_held(self, block: B) -> bool:
        """Whether all of its bytes are here."""
        residence = self._blocks.get(block)
        return residence is not None and residence.state is HELD

    def is_pinned(self, block: B) -> bool:
        """Whether it is being served."""
        residence = self._blocks.get(block)
        return residence is not None and residence.pins > 0

    def size_bytes(self, block: B) -> int:
        """What it is charged. Raises KeyError if absent."""
        return self._blocks[block].size_bytes

    def reserve(self, block: B, size_bytes: int) -> bool:
        """absent -> filling. False, and no change, if there is not enough room."""
        if block in self._blocks:
            raise self._illegal("reserve", block)
        if size_bytes > self.free_bytes:
            return False
        self._blocks[block] = _Residence(size_bytes)
        self.reserved_bytes += size_bytes
        self._history.append(("reserve", block))
        return True

    def fill(self, block: B) -> None:
        """filling -> held: every byte is stored and verified."""
        residence = self._expect("fill", block, FILLING)
        residence.state = HELD
        self.reserved_bytes -= residence.size_bytes
        self.held_bytes += residence.size_bytes
        self._history.append(("fill", block))

    def abandon(self, block: B) -> None:
        """filling -> absent: the fill failed or was given up."""
        residence = self._expect("abandon", block, FILLING)
        self.reserved_bytes -= residence.size_bytes
        del self._blocks[block]
        self._history.append(("abandon", block))

    def pin(self, block: B) -> None:
        """Keep a held block until the matching `unpin`."""
        self._expect("pin", block, HELD).pins += 1

    def unpin(self, block: B) -> None:
        """One reader less."""
        residence = self._expect("unpin", block, HELD)
        if residence.pins == 0:
            raise self._illegal("unpin", block)
        residence.pins -= 1

    def evict(self, block: B) -> None:
        """held -> absent. Refused while pinned."""
        residence = self._expect("evict", block, HELD)
        if residence.pins:
            raise self._illegal("evict a pinned block", block)
        self.held_bytes -= residence.size_bytes
        del self._blocks[block]
        self._history.append(("evict", block))

    def _expect(self, move: str, block: B, state: str) -> _Residence:
        residence = self._blocks.get(block)
        if residence is None or residence.state is not state:
            raise self._illegal(move, block)
        return residence

    def _illegal(self, move: str, block: B) -> IllegalTransition:
        residence = self._blocks.get(block)
        state = "absent" if residence is None else f"{residence.state}, {residence.pins} pins"
        past = [name for name, other in self._history if other == block]
        return IllegalTransition(f"cannot {move} {block!r}: it is {state}; recent history: {past or 'none'}")
