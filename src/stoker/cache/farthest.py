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

ALIKE_SHARE = 0.9
"""Of which so large a part leaves as of the first, may leave next: others may become better meanwhile."""


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


def latest(
    samples: Sequence[Sample], newcomer_s: float, *, is_forced: bool = False, most: int = 1
) -> list[Leaving]:
    """The segments that leave first for newcomers that are read so many seconds from now, no more than `most`; none if
    what is held is worth more. `is_forced`: the newcomer is read before anything else, so something has to leave.

    `samples` are never empty. Of equals the first leaves.
    """
    if not samples:
        return []
    due_s = np.concatenate([sample.due_s for sample in samples])
    starts = np.cumsum([0, *(len(sample.due_s) for sample in samples[:-1])])
    counts = np.array([len(sample.due_s) for sample in samples])
    is_later = due_s > newcomer_s if newcomer_s < np.inf else np.isinf(due_s)
    after_s = float(np.nextafter(newcomer_s, np.inf))
    ordered = np.sort(due_s)
    for share in SHARES:
        from_s = float(ordered[min(len(ordered) - 1, int(len(ordered) * (1 - share)))])
        shares = np.add.reduceat(is_later & (due_s >= from_s), starts) / counts
        if best := _largest(shares, WORTH_SHARE, most):
            return [_leaving(samples[i], from_s, after_s, float(shares[i])) for i in best]
    if not is_forced:
        return []
    shares = np.add.reduceat(is_later, starts) / counts
    why = "what is read next needs its room"
    if best := _largest(shares, SCATTERED_SHARE, most):
        return [Leaving(samples[i].number, after_s, float(np.median(samples[i].due_s)), why) for i in best]
    first = samples[int(np.argmax(shares))]
    return [Leaving(first.number, -np.inf, float(np.median(first.due_s)), why)]


def _largest(shares: F64, least: float, most: int) -> list[int]:
    """The places of those that are not below the least and about as large as the largest, which is the first."""
    places: list[int] = np.argsort(-shares, kind="stable")[:most].tolist()
    least = max(least, ALIKE_SHARE * float(shares[places[0]]))
    return [place for place in places if shares[place] >= least]


def _leaving(sample: Sample, from_s: float, after_s: float, share: float) -> Leaving:
    lost_s = sample.due_s[sample.due_s >= from_s]
    why = f"{share:.0%} of it is read latest"
    return Leaving(sample.number, max(from_s, after_s), float(np.median(lost_s)), why)
