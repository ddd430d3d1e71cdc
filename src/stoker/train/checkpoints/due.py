"""When the next checkpoint is due. PURE."""

from __future__ import annotations


class Due:
    """Every so many commits, every so many seconds, or whichever comes first."""

    def __init__(self, every_s: float | None, every_commits: int | None, now: float) -> None:
        """Seconds count from `now`."""
        self._every_s = every_s
        self._every_commits = every_commits
        self._last = now

    def is_due(self, commits: int, now: float) -> bool:
        """Whether one is due at this commit. Asked once at each commit."""
        by_commits = self._every_commits is not None and commits % self._every_commits == 0
        by_time = self._every_s is not None and now - self._last >= self._every_s
        if by_commits or by_time:
            self._last = now
        return by_commits or by_time
