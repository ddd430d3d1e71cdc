"""Whether somebody can be reached, as far as those know who have asked there. Pure.

Where questions about two names have failed, and none that was asked later was answered, the next ones need not wait for
the same: who has an older answer goes on with that. Meanwhile one question a second tries whether somebody is there
again. One name that fails for ever, while others do not, keeps nobody but those who ask for it from what is new.
"""

from __future__ import annotations

from collections import OrderedDict

AWAY_S = 10.0
"""So long after the last failure nobody knows any more: who asks then waits."""
TRY_EVERY_S = 1.0
TRIES_MAX = 32
"""That have had no answer yet: each costs somebody a thread or a connection."""
NAMES_MIN = 2
"""So many names that fail, and it is not the names."""
_NAMES_MAX = 8
_NEVER = float("-inf")


class Reach:
    """Of one source. Times are those at which questions were asked, where nothing else is said."""

    def __init__(self) -> None:
        self._answered = _NEVER
        self._failed: OrderedDict[str, float] = OrderedDict()
        self._failed_at = _NEVER
        self._tried_at = _NEVER
        self._trying = 0

    def is_away(self, name: str, now: float) -> bool:
        """Whether the newest questions that have come to an end failed, a moment ago; or that about this name."""
        failing = [one for one, asked_at in self._failed.items() if asked_at > self._answered]
        if len(failing) < NAMES_MIN and name not in failing:
            return False
        return bool(self._trying) or now - self._failed_at <= AWAY_S

    def tries(self, now: float) -> bool:
        """Whether one question more may try it now, for which nobody waits; `tried` when it has come to its end."""
        if now - self._tried_at < TRY_EVERY_S or self._trying >= TRIES_MAX:
            return False
        self._tried_at = now
        self._trying += 1
        return True

    def tried(self) -> None:
        """One that tried it has an answer, or has none."""
        self._trying -= 1

    def answered(self, asked_at: float) -> None:
        """A question has an answer, whatever it is."""
        self._answered = max(self._answered, asked_at)

    def failed(self, name: str, asked_at: float, now: float) -> None:
        """A question has none: `now` nobody waits for it any more. Others that were asked later may have had theirs."""
        self._failed[name] = max(self._failed.pop(name, _NEVER), asked_at)
        if len(self._failed) > _NAMES_MAX:
            self._failed.popitem(last=False)
        self._failed_at = now
