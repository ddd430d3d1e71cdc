"""Which segment leaves, where it is known when what is in it is read next. Pure.

A segment leaves as a whole, and what of it is read soon is written anew: so it is the one with the largest part of what
is read late, of a few pieces of each that were drawn by chance. What counts as late is at first the latest sixteenth of
all, and more of it where that lies scattered: Belady's rule, as far as it is worth the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
SHARES = (1 / 16, 1 / 4, 1 / 2, 1.0)
"""What counts as late: such a part of all that is held."""
WORTH_SHARE = 0.5
"""A segment of which less leaves is not worth writing the rest anew."""

SCATTERED_SHARE = 0.25
"""The same, where something has to leave."""


class Sample(NamedTuple):
    """When some pieces of a segment are read next, in seconds; infinite, where nobody has said so."""

    number: int
    due_s: F64


class Leaving(NamedTuple):
    """The segment that leaves, from when on pieces of it are lost with it, when the first and most of these are read,
    and why."""

    number: int
    from_s: float
    due_s: float
    why: str

    def is_lost(self, due_s: F64) -> npt.NDArray[np.bool_]:
        """Which of its pieces are not written anew."""
        return due_s >= self.from_s


def latest(samples: Sequence[Sample], newcomer_s: float, *, is_forced: bool = False) -> Leaving | None:
    """The segment that leaves for a newcomer that is read so many seconds from now; None if what is held is worth more.
    `is_forced`: the newcomer is read before anything else, so something has to leave.

    `samples` are never empty. Of equals the first leaves.
    """
    if not samples:
        return None
    due_s = np.concatenate([sample.due_s for sample in samples])
    starts = np.cumsum([0, *(len(sample.due_s) for sample in samples[:-1])])
    counts = np.array([len(sample.due_s) for sample in samples])
    is_later = due_s > newcomer_s if newcomer_s < np.inf else np.isinf(due_s)
    ordered = np.sort(due_s)
    for share in SHARES:
        from_s = ordered[min(len(ordered) - 1, int(len(ordered) * (1 - share)))]
        shares = np.add.reduceat(is_later & (due_s >= from_s), starts) / counts
        best = int(np.argmax(shares))
        if shares[best] >= WORTH_SHARE:
            lost_s = samples[best].due_s[samples[best].due_s >= from_s]
            cut_s = max(float(from_s), float(np.nextafter(newcomer_s, np.inf)))
            why = f"{shares[best]:.0%} of it is read latest"
            return Leaving(samples[best].number, cut_s, float(np.median(lost_s)), why)
    if not is_forced:
        return None
    shares = np.add.reduceat(is_later, starts) / counts
    best = int(np.argmax(shares))
    is_worth_it = shares[best] >= SCATTERED_SHARE
    cut_s = float(np.nextafter(newcomer_s, np.inf)) if is_worth_it else -np.inf
    median_s = float(np.median(samples[best].due_s))
    return Leaving(samples[best].number, cut_s, median_s, "what is read next needs its room")
