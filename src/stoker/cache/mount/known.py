"""What the daemon knows of paths, for a while and in bounded memory. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from stoker.cache.mount.source_port import Found
from stoker.cache.reach import Reach

_FAILING_S = 10.0


class _Said(NamedTuple):
    """`at`: when it was asked. `is_dropped`: nothing that was said before then counts."""

    found: Found | None
    at: float
    is_dropped: bool = False


class Known:
    """The latest answers about paths, those that were used last longest. `absent_ttl_s`: that there is nothing. What is
    older is kept for when it cannot be asked for anew. `reach`: whether it can."""

    def __init__(self, ttl_s: float, absent_ttl_s: float, count_max: int) -> None:
        self._ttl_s = ttl_s
        self._absent_ttl_s = absent_ttl_s
        self._count_max = count_max
        self._said: OrderedDict[str, _Said] = OrderedDict()
        self._failing: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._dropped_at = float("-inf")
        self.reach = Reach()

    def __len__(self) -> int:
        return len(self._said)

    def get(self, path: str, now: float) -> tuple[bool, Found | None]:
        """Whether it is known, and what there is."""
        said = self._said.get(path)
        if said is None or said.is_dropped:
            return False, None
        if now - said.at > (self._absent_ttl_s if said.found is None else self._ttl_s):
            return False, None
        self._said.move_to_end(path)
        return True, said.found

    def last(self, path: str) -> Found | None:
        """What there was when it could be asked for, however long ago."""
        said = self._said.get(path)
        return None if said is None else said.found

    def contradicts(self, path: str, found: Found) -> bool:
        """Whether something else was said, or done, since that was asked for which says so."""
        said = self._said.get(path)
        if said is None:
            return False
        if said.is_dropped or said.found is None:
            return True
        return (said.found.is_folder, said.found.version) != (found.is_folder, found.version)

    def failed(self, path: str, code: int, now: float) -> None:
        """It could not be found out, for that reason."""
        self._failing[path] = code, now
        self._failing.move_to_end(path)
        if len(self._failing) > self._count_max:
            self._failing.popitem(last=False)

    def failing(self, path: str, now: float) -> int:
        """Why it could not be found out a moment ago, or 0. Who asks now need not wait for the same: many who come for
        one name come one after the other, as each holds it in the kernel."""
        code, at = self._failing.get(path, (0, now))
        if code and now - at > _FAILING_S:
            del self._failing[path]
            return 0
        return code

    def put(self, path: str, found: Found | None, asked_at: float) -> None:
        """It was said to who asked then. What was asked before all was dropped may be what was to be dropped, and what
        was asked before something else was said is older than that."""
        self.reach.answered(asked_at)
        there = self._said.get(path)
        if there is not None and (asked_at < there.at or (there.is_dropped and asked_at == there.at)):
            return
        if self.is_old(asked_at):
            return
        self._failing.pop(path, None)
        self._put(path, _Said(found, asked_at))

    def is_old(self, asked_at: float) -> bool:
        """Whether what was asked then may be what was to be dropped since."""
        return asked_at <= self._dropped_at

    def drop(self, path: str, now: float) -> None:
        """It may not be so any more; nor what is being asked about it."""
        self._failing.pop(path, None)
        self._put(path, _Said(None, now, is_dropped=True))

    def drop_below(self, path: str, now: float) -> None:
        """Nor what is in that folder, and in its folders; nor what is being asked about."""
        self._dropped_at = now
        self._failing.clear()
        if not path:
            self._said.clear()
            return
        self._said.pop(path, None)
        for one in [one for one in self._said if one.startswith(f"{path}/")]:
            del self._said[one]

    def _put(self, path: str, said: _Said) -> None:
        self._said[path] = said
        self._said.move_to_end(path)
        if len(self._said) > self._count_max:
            self._said.popitem(last=False)
