"""A small seeded random generator whose stream never changes between versions or machines.

The mixing function is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TypeVar

T = TypeVar("T")
MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Scramble a 64-bit integer: a bijection in which every input bit moves every output bit."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


class Rng:
    """Seeded randomness that is handed to pure code as an argument."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = mix64(seed + GOLDEN_GAMMA)

    def next64(self) -> int:
        """The next 64 random bits."""
        self._state = (self._state + GOLDEN_GAMMA) & MASK64
        return mix64(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A float in [low, high)."""
        return low + (high - low) * ((self.next64() >> 11) / (1 << 53))

    def below(self, bound: int) -> int:
        """An integer in [0, bound). Raises ValueError for a bound under 1."""
        if bound < 1:
            raise ValueError(f"bound must be at least 1, got {bound}")
        return (self.next64() * bound) >> 64

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.uniform() < probability

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffle in place (Fisher and Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]

    def fork(self, label: int) -> Rng:
        """An independent generator that depends on this one's seed state and the label."""
        return Rng(mix64(self._state ^ mix64(label + 1)))
