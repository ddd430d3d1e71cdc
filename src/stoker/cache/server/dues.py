"""What other servers of the fleet have still to be told: that they are to drop what they know under a prefix."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from stoker.cache.server.peers import Peers
from stoker.errors import CacheUnavailable, StokerError

log = logging.getLogger("stoker.cache")
OWED_MAX = 1000
GONE_MAX = 200


class Dues:
    """For one fleet. `lost` hears of members that cannot be reached."""

    def __init__(self, peers: Peers, lost: Callable[[str, CacheUnavailable], None]) -> None:
        self._peers = peers
        self._lost = lost
        self.gone: set[str] = set()
        """Who was a member, and may be one again."""
        self._paying: dict[str, asyncio.Task[None]] = {}
        self._owed: dict[str, dict[tuple[str, str], None]] = {}

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
            task.add_done_callback(_say_why)

    async def close(self) -> None:
        """Tell nobody any more."""
        for task in self._paying.values():
            task.cancel()
        await asyncio.gather(*self._paying.values(), return_exceptions=True)

    def owe(self, names: Iterable[str], bucket: str, prefix: str) -> None:
        """These are to be told."""
        for name in names:
            owed = self._owed.setdefault(name, {})
            owed[bucket, prefix] = None
            if len(owed) > OWED_MAX:
                self._owed[name] = {(bucket, ""): None for bucket, _ in owed}

    async def pay(self, name: str, url: str) -> None:
        """Tell a member what it has missed."""
        for bucket, prefix in list(self._owed.get(name, ())):
            try:
                await self._peers.refresh(url, bucket, prefix, 1)
            except CacheUnavailable as error:
                self._lost(name, error)
                return
            except StokerError as error:
                log.warning("%s does not drop what it knows of %s: %s", name, bucket, error)
            owed = self._owed.get(name, {})
            owed.pop((bucket, prefix), None)
            if not owed:
                self._owed.pop(name, None)

    def missed(self, bucket: str, prefix: str) -> list[str]:
        """Which members have not been told of this yet."""
        owing = self._owed.items()
        return sorted(name for name, owed in owing if (bucket, prefix) in owed and name not in self.gone)


def _say_why(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("a member could not be told what it has missed, by a defect", exc_info=error)
