"""Exponential backoff with full jitter, as a plain function."""

from __future__ import annotations

from stoker.base.rng import Rng


def backoff_s(attempt: int, rng: Rng, *, first_s: float = 0.1, limit_s: float = 30.0) -> float:
    """Seconds to wait before try number `attempt` (the first retry is 1).

    Full jitter (Brooker, "Exponential backoff and jitter", 2015): uniform in [0, min(limit, first·2^(n-1))].
    """
    if attempt < 1:
        return 0.0
    ceiling = min(limit_s, first_s * 2.0 ** min(attempt - 1, 60))
    return rng.uniform(0.0, ceiling)
