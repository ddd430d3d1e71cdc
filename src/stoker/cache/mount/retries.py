"""When something that ends is started anew: at once, and later and later the sooner it ends again. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Retries:
    """`pauses_s`: before the first, the second start in a row, and so on; the last for all that follow. What lasted
    `lasts_s` begins anew. `at`: when the next start is due; None: none is."""

    def __init__(self, pauses_s: Sequence[float], lasts_s: float) -> None:
        self._pauses_s = pauses_s
        self._lasts_s = lasts_s
        self._ends: list[float] = []
        self.at: float | None = None
        self.failures = 0
        """So many in a row have ended that were never ready."""

    def ended(self, now: float, *, was_ready: bool) -> float:
        """In how many seconds the next one is to be started."""
        self.failures = 0 if was_ready else self.failures + 1
        self._ends = [at for at in self._ends if now - at < self._lasts_s]
        row = max(len(self._ends), self.failures - 1)
        self._ends.append(now)
        pause_s = self._pauses_s[min(row, len(self._pauses_s) - 1)]
        self.at = now + pause_s
        return pause_s

    def takes(self, now: float) -> bool:
        """Whether it is to be started now, by who asks."""
        if self.at is None or now < self.at:
            return False
        self.at = None
        return True
