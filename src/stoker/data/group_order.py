"""An order for records that lie together: groups are read one after the other, a few of them mixed. PURE.

A *group* is a run of records that cost little once one of them was read: a row group of Parquet, a shard. Each epoch
puts the groups into an order, and divides it into *ticks*: at each, one group begins, and each of the `window` groups
that began last gives the same part of its records, drawn at random; so it ends after `window` ticks. The records of a
tick are shuffled. At most `window` groups are in use at any position, one comes and goes at a time, and there are no
borders over which records are not mixed. The first `window` ticks are shuffled as one, and so are the last ones, or an
epoch would begin and end with records of a single group.

As `GlobalOrder`, this can be asked for at any position; its memory is some numbers for each group.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from stoker.data.order import I64, U64, GlobalOrder, scattered, seeds_of
from stoker.errors import ConfigError

WINDOW = 16
"""Groups that are mixed, if nothing else is said."""
_PLACES_AT_ONCE = 1 << 20
"""Parts of groups that are looked through together: some 50 MB."""


class GroupOrder:
    """The order of one epoch. `firsts`: the number of each group's first record, ascending from 0; groups may be
    empty. `window`: how many groups are mixed; with all of them, the order is that of no groups."""

    def __init__(self, firsts: I64, records: int, *, seed: int, epoch: int, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.records = records
        sizes = np.diff(np.append(firsts, records))
        full = np.flatnonzero(sizes)
        chosen = full[GlobalOrder(len(full), seed=seed, epoch=epoch).at(0, len(full))]
        self._seed, self._epoch = seed, epoch
        groups = self._groups = len(chosen)
        self._firsts: I64 = firsts[chosen]
        """Of the groups in the epoch's order; their *places* are their numbers in it."""
        self._sizes: I64 = np.append(sizes[chosen], 0)
        """Of them, and of one beyond the last, which gives nothing."""
        self.window = window = max(1, min(window, groups))
        single = np.arange(window, groups, dtype=np.int64)
        self._ticks = np.concatenate([[0], single, [groups + window - 1]])
        """Slot `i`, whose records are shuffled together, has the ticks from the i-th on to before the next."""
        self._starts: I64 = self._given_before(self._ticks)
        """Positions at which slots begin, and the last one ends."""

    def at(self, start: int, stop: int) -> I64:
        """Record numbers at the positions `[start, stop)`. Raises ValueError outside the epoch."""
        if not 0 <= start <= stop <= self.records:
            raise ValueError(f"positions [{start}, {stop}) are outside an epoch of {self.records} records")
        return self.of(np.arange(start, stop, dtype=np.uint64))

    def of(self, positions: U64) -> I64:
        """Record numbers at any positions of the epoch."""
        places, offsets = self._drawn(positions)
        seeds = seeds_of(self._seed, self._epoch, (2 * places + 1).astype(np.uint64))
        rows = scattered(offsets.astype(np.uint64), self._sizes[places], seeds).astype(np.int64)
        return self._firsts[places] + rows

    def lanes(self, positions: U64) -> I64:
        """Which of the groups in use those records are of: a number below the window, for all records of a group the
        same. A group has that of the one that ended when it began."""
        return self._drawn(positions)[0] % self.window

    def _drawn(self, positions: U64) -> tuple[I64, I64]:
        """Whose record is at each position, and which of the group's it is, in the order in which it gives them."""
        at = positions.astype(np.int64)
        slots: I64 = np.searchsorted(self._starts, at, side="right") - 1
        some = np.unique(slots)
        if len(some) > 1 and len(some) * self.window > _PLACES_AT_ONCE:
            places, offsets = np.empty_like(at), np.empty_like(at)
            for lower in (True, False):
                part = (slots < some[len(some) // 2]) == lower
                places[part], offsets[part] = self._drawn(positions[part])
            return places, offsets
        starts = self._starts[slots]
        sizes = self._starts[slots + 1] - starts
        seeds = seeds_of(self._seed, self._epoch, (2 * slots).astype(np.uint64))
        inside = scattered((at - starts).astype(np.uint64), sizes, seeds).astype(np.int64)
        begins, ends = self._ticks[some][:, None], self._ticks[some + 1][:, None]
        candidates = np.maximum(begins - self.window + 1, 0) + np.arange(self.window)
        candidates = np.minimum(candidates, self._groups)
        low, high = self._given(candidates, begins), self._given(candidates, ends)
        parts = (high - low).cumsum(axis=1) + self._starts[some][:, None]
        found = np.searchsorted(parts.ravel(), starts + inside, side="right")
        offsets = starts + inside - (parts - high).ravel()[found]
        return candidates.ravel()[found], offsets

    def _given(self, places: I64, ticks: I64) -> I64:
        """How many of its records a group has given before a tick."""
        given: I64 = self._sizes[places] * np.clip(ticks - places, 0, self.window) // self.window
        return given

    def _given_before(self, ticks: I64) -> I64:
        """How many records all groups have given."""
        groups = self._groups
        before = np.concatenate([[0], np.cumsum(self._sizes)])
        given: I64 = before[np.clip(ticks - self.window + 1, 0, groups)]
        # And those that have not given all: as many ticks ago as they were begun.
        for ago in range(1, self.window):
            places = ticks - ago
            places = np.where((places >= 0) & (places < groups), places, groups)
            given = given + self._sizes[places] * ago // self.window
        return given


def groups_of(dataset: object) -> npt.NDArray[np.int64]:
    """The number of the first record of each group of a dataset: what its `groups()` says.

    Raises ConfigError where it has none.
    """
    tell = getattr(dataset, "groups", None)
    if tell is None:
        raise ConfigError(
            f"shuffle='groups' needs a dataset that tells which records lie together, and {type(dataset).__name__} "
            "has no groups(): shuffle=True shuffles all records"
        )
    firsts = np.asarray(tell(), np.int64)
    records = len(dataset)  # type: ignore[arg-type]
    is_sound = firsts.ndim == 1 and len(firsts) and firsts[0] == 0 and (np.diff(firsts) >= 0).all()
    if records and not (is_sound and firsts[-1] <= records):
        raise ConfigError(
            f"groups() of {type(dataset).__name__} must give the number of each group's first record, ascending from 0 "
            f"to at most {records}, got {firsts!r}"
        )
    return firsts


def digest_of(dataset: object) -> str:
    """Changes when the groups of a dataset do. Raises ConfigError."""
    return hashlib.sha256(groups_of(dataset).astype("<i8").tobytes()).hexdigest()[:16]
