"""What other servers of the fleet have still to be told: that they are to drop what they know under a prefix."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stoker.cache.server.peers import Peers
from stoker.errors import CacheUnavailable, StokerError

log = logging.getLogger("stoker.cache")
OWED_MAX = 1000
GONE_MAX = 200


class _Due(NamedTuple):
    """The first and the last refresh of a prefix that a member has not heard of, counted over all: what it hears of one
    tells it nothing of the next."""

    first: int
    last: int


class Dues:
    """For one fleet. `lost` hears of members that cannot be reached."""

    def __init__(self, peers: Peers, lost: Callable[[str, CacheUnavailable], None]) -> None:
        self._peers = peers
        self._lost = lost
        self.gone: set[str] = set()
        """Who was a member, and may be one again."""
        self._paying: dict[str, asyncio.Task[None]] = {}
        self._count = 0
        self._owed: dict[str, dict[tuple[str, str], _Due]] = {}

    @property
    def names(self) -> list[str]:
        """Who is still to be told something."""
        return list(self._owed)

    def keep(self, members: Iterable[str], before: Iterable[str]) -> None:
        """These are the members now, who was one `before`. One that is gone may be one again, and must hear what it
        missed; but not any number of them."""
        self.gone = (self.gone | set(before)) - set(members)
        if len(self.gone) > GONE_MAX:
            self.gone = set()
        for name in self._owed.keys() - set(members) - self.gone:
            del self._owed[name]

    def begin(self, name: str, url: str) -> None:
        """Tell a member what it has missed, while others go on."""
        task = self._paying.get(name)
        if task is None or task.done():
            self._paying[name] = task = asyncio.get_running_loop().create_task(self.pay(name, url))
            task.add_done_callback(lambda task: self._has_ended(name, task))

    async def close(self) -> None:
        """Tell nobody any more."""
        for task in self._paying.values():
            task.cancel()
        await asyncio.gather(*self._paying.values(), return_exceptions=True)

    def _has_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._paying.get(name) is task:
            del self._paying[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a member could not be told what it has missed, by a defect", exc_info=error)

    def owe(self, names: Iterable[str], bucket: str, prefix: str) -> int:
        """These are to be told; returns what `missed` is asked with."""
        self._count += 1
        for name in names:
            owed = self._owed.setdefault(name, {})
            before = owed.get((bucket, prefix))
            owed[bucket, prefix] = _Due(self._count if before is None else before.first, self._count)
            if len(owed) > OWED_MAX:
                self._owed[name] = {(bucket, ""): _Due(self._count, self._count) for bucket, _ in owed}
        return self._count

    async def pay(self, name: str, url: str) -> None:
        """Tell a member what it has missed."""
        for (bucket, prefix), asked in list(self._owed.get(name, {}).items()):
            try:
                await self._peers.refresh(url, bucket, prefix, 1)
            except CacheUnavailable as error:
                self._lost(name, error)
                return
            except StokerError as error:
                log.warning("%s does not drop what it knows of %s: %s", name, bucket, error)
            owed = self._owed.get(name, {})
            due = owed.get((bucket, prefix))
            if due is not None and due.last <= asked.last:
                del owed[bucket, prefix]
            elif due is not None:
                owed[bucket, prefix] = _Due(max(due.first, asked.last + 1), due.last)
            if not owed:
                self._owed.pop(name, None)

    def missed(self, bucket: str, prefix: str, number: int) -> list[str]:
        """Which members have not been told yet of what they were owed under that number."""
        dues = {
            name: owed.get((bucket, prefix)) for name, owed in self._owed.items() if name not in self.gone
        }
        return sorted(name for name, due in dues.items() if due is not None and due.first <= number)
