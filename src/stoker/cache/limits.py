"""How an origin may be asked: how fast, how often again, when a second time beside, and when not at all. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng

CLOSED, OPEN, PROBING = "closed", "open", "probing"
HEDGE_FROM_SAMPLES = 50
_SAMPLES = 512
_BURST_S = 0.05


@dataclass(frozen=True, slots=True)
class OriginLimits:
    """For one bucket's origin."""

    attempts_max: int = 4
    """Requests for one read, the first one included."""

    retry_first_s: float = 0.1
    retry_limit_s: float = 3.0
    bytes_per_s: float = 0.0
    """Of content, all reads together; 0: no limit."""

    requests_per_s: float = 0.0
    """Of any kind; 0: no limit."""

    hedges: bool = False
    """Ask a second time beside a read that takes longer than 99 of 100 of this origin's did."""

    breaker_failures: int = 8
    """Failures in a row after which the origin is left alone for a while."""

    breaker_first_s: float = 1.0
    breaker_limit_s: float = 30.0


class Pace:
    """Lets so much through each second; who comes too early is told how long to wait, in the order of coming."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def delay_s(self, amount: float, now: float) -> float:
        """Seconds to wait before `amount` may be asked for; it is counted as asked for."""
        if self._rate <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - _BURST_S)
        delay = self._free_at - now
        self._free_at += amount / self._rate
        return max(0.0, delay)

    def is_late(self, now: float) -> bool:
        """Whether more was asked for than may have been by now."""
        return self._rate > 0 and self._free_at > now

    def give_back(self, amount: float) -> None:
        """What was counted was not asked for."""
        if self._rate > 0:
            self._free_at -= amount / self._rate


class Latencies:
    """How long the last requests took that succeeded."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def percentile_s(self, share: float) -> float | None:
        """None while too few are known to tell."""
        if len(self._seconds) < HEDGE_FROM_SAMPLES:
            return None
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Verdict(NamedTuple):
    """Whether to ask, and why (not)."""

    is_allowed: bool
    why: str


class Breaker:
    """Leaves an origin alone that fails again and again.

    closed --failures in a row--> open --time--> probing --success--> closed
                                   ^---failure, twice the time---'
    """

    def __init__(self, limits: OriginLimits) -> None:
        self._limits = limits
        self.state = CLOSED
        self._failures = 0
        self._open_s = 0.0
        self._until = 0.0
        self._why = ""

    def ask(self, now: float) -> Verdict:
        """May a request go out? While probing, one at a time may."""
        if self.state == CLOSED:
            return Verdict(True, "it answers")
        if self.state == OPEN and now >= self._until:
            self.state = PROBING
            return Verdict(True, "to see whether it answers again")
        left_s = max(0.0, self._until - now)
        when = f"in {left_s:.1f} s" if self.state == OPEN else "once one request has come back"
        return Verdict(
            False, f"it failed {self._failures} times in a row (last: {self._why}); asked again {when}"
        )

    def succeeded(self) -> None:
        """An answer came; that there is no such object is one."""
        self.state = CLOSED
        self._failures = 0
        self._open_s = 0.0

    def failed(self, why: str, now: float) -> None:
        self._failures += 1
        self._why = why
        if self.state == OPEN:
            return  # it was asked before that was known
        if self.state == PROBING or self._failures >= self._limits.breaker_failures:
            self._open_s = min(self._limits.breaker_limit_s, self._open_s * 2 or self._limits.breaker_first_s)
            self._until = now + self._open_s
            self.state = OPEN

    def gave_up(self) -> None:
        """A request was cancelled before it came back, and says nothing."""
        if self.state == PROBING:
            self.state = OPEN


def retry_after_s(limits: OriginLimits, attempt: int, rng: Rng) -> float | None:
    """Seconds to wait after attempt number `attempt` (the first is 1) has failed; None: it was the last."""
    if attempt >= limits.attempts_max:
        return None
    return backoff_s(attempt, rng, first_s=limits.retry_first_s, limit_s=limits.retry_limit_s)
