"""Decoded rows that are kept for the next batch, within a limit of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Keeps what was used last, of at most `limit_bytes` in each process; for many threads at once.

    What was added last stays even if it alone is larger: else each of its rows would be decoded anew. A fork begins
    with nothing, as the lock and the items may have been in use. Pickled, only the limit travels.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._in_use = 0
        self._have_left = self._is_told = False
        self._owner = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, name: Hashable) -> T | None:
        """The item, which counts as used now; None if it is not here."""
        self._begin()
        with self._lock:
            if name not in self._items:
                return None
            self._items.move_to_end(name)
            return self._items[name][0]

    def expect(self, in_use: int) -> None:
        """So many items will be used in turn: where not all of them fit, each is wanted again when it has left."""
        self._in_use = in_use

    def put(self, name: Hashable, item: T, size_bytes: int) -> None:
        """Keep an item in place of those that were used longest ago."""
        self._begin()
        with self._lock:
            if name in self._items:
                self.held_bytes -= self._items.pop(name)[1]
            self._items[name] = item, size_bytes
            self.held_bytes += size_bytes
            while self.held_bytes > self.limit_bytes and len(self._items) > 1:
                _, (_, left_bytes) = self._items.popitem(last=False)
                self.held_bytes -= left_bytes
                self._have_left = True

    def is_crowded(self, size_bytes: int) -> bool:
        """True, once, where items have left and as many of this size as are in use do not fit."""
        with self._lock:
            if self._is_told or not self._have_left or self._in_use * size_bytes <= self.limit_bytes:
                return False
            self._is_told = True
            return True

    def __contains__(self, name: Hashable) -> bool:
        self._begin()
        with self._lock:
            return name in self._items

    def __len__(self) -> int:
        self._begin()
        return len(self._items)

    def __reduce__(self) -> tuple[Callable[[int], Held[T]], tuple[int]]:
        return Held, (self.limit_bytes,)

    def _begin(self) -> None:
        if self._owner != os.getpid():
            self._lock = threading.Lock()
            self._items = OrderedDict()
            self.held_bytes = 0
            self._owner = os.getpid()
