"""What becomes of leased shards when the loop over them is left before their end."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import NamedTuple, Protocol

from stoker.errors import StokerError
from stoker.train.attempts import attempts, is_broken_world
from stoker.train.member_link import WorldChanged
from stoker.train.shards_exit import exception_leaving
from stoker.train.shards_session import ShardSession

log = logging.getLogger("stoker.train")
LEAVE_WAIT_S = 2.0
"""Seconds that a loop which is left early waits until its shards are handed back."""


class Handed(Protocol):
    """A leased shard."""

    is_open: bool

    @property
    def dataset(self) -> str: ...

    @property
    def number(self) -> int: ...

    def done(self) -> bool: ...

    def fail(self, reason: str) -> bool: ...

    def give_back(self) -> bool: ...


class Departure(NamedTuple):
    """How a loop ended early."""

    failure: str | None
    """The script's exception that ended it."""
    verdict: Future[bool] | None
    """Whether that means that the world has failed."""


def departure(frame: FrameType | None, consumer: int, session: ShardSession) -> Departure:
    """Of a loop that ends now, in `frame`; `consumer` as in `exception_leaving`."""
    failure = None if session.is_interrupted() else exception_leaving(frame, consumer)
    attempt = attempts().under_way if failure is not None else None
    return Departure(failure, attempt.verdict() if attempt is not None else None)


def hand_back(shards: Sequence[Handed], left: Departure, untouched: int = 0) -> None:
    """The loop ended early: its shards go back, as failures where an exception of the script's ended it, but for the
    last `untouched`. Whoever closes a loop must not wait for long, and cannot be told of an error.
    """
    failure, verdict = left
    blamed = len(shards) - untouched if failure is not None else 0

    @functools.cache
    def has_world_failed() -> bool:
        return verdict is not None and is_broken_world(verdict)

    def report(place: int, shard: Handed) -> None:
        if place < blamed and not has_world_failed():
            shard.fail(failure or "")
        else:
            shard.give_back()

    # A verdict comes from this very thread.
    _report(shards, report, waits=verdict is None)


def finish(shards: Sequence[Handed]) -> None:
    """The loop has used these, and nobody asks after them."""
    _report(shards, lambda _, shard: shard.done(), waits=True)


def _report(shards: Sequence[Handed], report: Callable[[int, Handed], object], *, waits: bool) -> None:
    if sys.is_finalizing() or not any(shard.is_open for shard in shards):
        return

    def report_all() -> None:
        for place, shard in enumerate(shards):
            try:
                report(place, shard)
            except WorldChanged:
                continue  # it is said; nobody waits for the answer
            except StokerError as error:
                log.warning("shard %d of %s could not be handed back: %s", shard.number, shard.dataset, error)

    thread = threading.Thread(target=report_all, name="stoker-shard-left", daemon=True)
    thread.start()
    if waits:
        thread.join(LEAVE_WAIT_S)
