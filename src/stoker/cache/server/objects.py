"""Sends an object, or a part of it, as its blocks are here or come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from stoker._native import Piece
from stoker.base.ranges import ByteRange
from stoker.cache.layout import BlockSpan, split
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket, leave_all
from stoker.cache.server.port import Answer
from stoker.cache.server.sending import send_block
from stoker.cache.store.known import Known

LOOK_AHEAD_BLOCKS = 4


class Objects:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def send(
        self,
        bucket: Bucket,
        known: Known,
        part: ByteRange | None,
        answer: Answer,
        start: Callable[[], None],
        hops: int,
    ) -> None:
        """The body, and the end of the answer; `start` writes the head, as soon as it is sure that there are bytes.
        Raises what fetching raises: before the head was written, or after."""
        first, stop = part or (0, known.size_bytes)
        spans = deque(split(first, stop, self._engine.block_size_bytes))
        coming: deque[tuple[BlockSpan, asyncio.Task[Piece | Ticket]]] = deque()
        is_hit = True

        def begin() -> None:
            if not answer.has_started:
                start()

        try:
            while spans or coming:
                # A reader that has taken nothing yet may never take anything.
                ahead = LOOK_AHEAD_BLOCKS if answer.has_started else 2
                if self._engine.is_short_of_memory:
                    ahead = 1
                while spans and len(coming) < ahead:
                    span = spans.popleft()
                    block = self._engine.block(known, span.index, hops)
                    coming.append((span, asyncio.ensure_future(block)))
                span, task = coming[0]
                found = await task
                is_hit = is_hit and not isinstance(found, Ticket)
                await send_block(self._engine, known, span, found, answer, begin, hops)
                coming.popleft()
                if isinstance(found, Ticket):
                    found.leave()
                await answer.drain()
        finally:
            await leave_all([task for _, task in coming], lambda found: found)
        begin()
        answer.finish()
        bucket.count(stop - first, is_hit=is_hit)
