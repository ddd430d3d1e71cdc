"""What other servers of the fleet have still to be told: that they are to drop what they know under a prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from stoker.cache.server.peers import Peers
from stoker.errors import CacheUnavailable, StokerError

log = logging.getLogger("stoker.cache")
OWED_MAX = 1000


class Dues:
    """For one fleet. `lost` hears of members that cannot be reached."""

    def __init__(self, peers: Peers, lost: Callable[[str, CacheUnavailable], None]) -> None:
        self._peers = peers
        self._lost = lost
        self._owed: dict[str, dict[tuple[str, str], None]] = {}

    @property
    def names(self) -> list[str]:
        """Who is still to be told something."""
        return list(self._owed)

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
        """Who has not been told of this yet."""
        return sorted(name for name, owed in self._owed.items() if (bucket, prefix) in owed)
