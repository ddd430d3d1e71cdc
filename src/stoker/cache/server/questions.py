"""In which order questions about a key were begun: an answer that comes late must not overrule a newer one. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Questions(Generic[K]):
    """Knows keys while anybody asks about them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asking: dict[K, int] = {}
        self._answered: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._asking)

    def number(self) -> int:
        """Of a question that is begun now, about whatever it may tell of."""
        return next(self._numbers)

    def begin(self, key: K) -> int:
        """Of a question about a key, which is ended by `end`."""
        self._asking[key] = self._asking.get(key, 0) + 1
        return self.number()

    def end(self, key: K) -> None:
        """One question less."""
        left = self._asking[key] - 1
        if left:
            self._asking[key] = left
        else:
            del self._asking[key]
            self._answered.pop(key, None)

    def is_news(self, key: K, number: int) -> bool:
        """Whether the answer to a question is to be taken in: none that was begun later was answered before."""
        if self._answered.get(key, 0) > number:
            return False
        if key in self._asking:
            self._answered[key] = number
        return True
