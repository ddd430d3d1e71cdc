"""What becomes of leased shards when the loop over them is left before their end."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Protocol

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

    def fail(self, reason: str) -> bool: ...

    def give_back(self) -> bool: ...


def hand_back(
    shards: Sequence[Handed],
    frame: FrameType | None,
    consumer: int,
    session: ShardSession,
    untouched: int = 0,
) -> None:
    """The loop ended early, in `frame`: its shards go back, as failures where an exception of the script's ended it,
    but for the last `untouched`. Whoever closes a loop must not wait for long, and cannot be told of an error.
    """
    if sys.is_finalizing() or not any(shard.is_open for shard in shards):
        return
    failure = None if session.is_interrupted() else exception_leaving(frame, consumer)
    attempt = attempts().under_way if failure is not None else None
    verdict = attempt.verdict() if attempt is not None else None

    def report() -> None:
        world_broke = verdict is not None and is_broken_world(verdict)
        for place, shard in enumerate(shards):
            try:
                if failure is not None and not world_broke and place < len(shards) - untouched:
                    shard.fail(failure)
                else:
                    shard.give_back()
            except WorldChanged:
                continue  # it is said; nobody waits for the answer
            except StokerError as error:
                log.warning("shard %d of %s could not be handed back: %s", shard.number, shard.dataset, error)

    thread = threading.Thread(target=report, name="stoker-shard-left", daemon=True)
    thread.start()
    if verdict is None:  # else it comes from this very thread
        thread.join(LEAVE_WAIT_S)
