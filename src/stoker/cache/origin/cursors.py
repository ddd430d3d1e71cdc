"""What is left of listings whose next page is probably asked for: a folder is not sorted, and to find its place again
it would be gone through from its beginning, for each page."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT_MAX = 4
KEPT_S = 30.0
"""As old as that may be what the next page says, beyond what a listing takes anyway."""


class Cursors(Generic[T]):
    """The rests of a few listings, each for whoever asks first for the page after a key. Lives on one event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[T, asyncio.TimerHandle]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prefix: str, after: str, rest: T) -> None:
        """What comes after this key."""
        self.take(prefix, after)
        if len(self._kept) == KEPT_MAX:
            self._kept.popitem(last=False)[1][1].cancel()
        timer = asyncio.get_running_loop().call_later(KEPT_S, self.take, prefix, after)
        self._kept[prefix, after] = rest, timer

    def take(self, prefix: str, after: str | None) -> T | None:
        """The rest of such a listing, which is kept no longer; None if there is none."""
        found = None if after is None else self._kept.pop((prefix, after), None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def clear(self) -> None:
        """Keep nothing."""
        for _, timer in self._kept.values():
            timer.cancel()
        self._kept.clear()
