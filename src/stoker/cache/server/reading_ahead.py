"""Fetches what is read next of large files, beside what readers wait for and never before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from stoker.base.clock import Clock
from stoker.cache.ahead import Ahead, Limits, ReadAhead
from stoker.cache.layout import block_count
from stoker.cache.server.fetches import Ticket
from stoker.cache.store.known import Known
from stoker.errors import StokerError

NEARLY = 7 / 8
"""The next block is asked for when so much of the one before is there: so the line is not idle until it comes."""


class _File(NamedTuple):
    bucket: int
    key: str
    tag: int


class ReadingAhead:
    """Lives on one event loop. `limits` says how much there is room for now in the version's bucket, `wants` whether a
    block is to be fetched by this server, and `fetch` begins to."""

    def __init__(
        self,
        limits: Callable[[Known], Limits],
        fetch: Callable[[Known, int], Ticket],
        wants: Callable[[Known, int], bool],
        is_held: Callable[[Known, int], bool],
        block_size_bytes: int,
        clock: Clock,
    ) -> None:
        self._limits = limits
        self._fetch = fetch
        self._wants = wants
        self._is_held = is_held
        self._block_size_bytes = block_size_bytes
        self._clock = clock
        self._core: ReadAhead[_File] = ReadAhead()
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, known: Known, block: int) -> None:
        """A reader asked for a block that is not here yet."""
        count = block_count(known.size_bytes, self._block_size_bytes)
        if count < 2:
            return
        limits = self._limits(known)
        file = _File(known.bucket, known.key, known.tag)
        step = self._core.asked(
            file, block, count, limits, lambda index: self._wants(known, index), self._clock.now()
        )
        self._run(known, file, step)

    async def close(self) -> None:
        """Begin no more, and leave what is coming."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, known: Known, file: _File, step: Ahead) -> None:
        for block in step.blocks:
            task = asyncio.get_running_loop().create_task(self._follow(known, file, block))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, known: Known, file: _File, block: int) -> None:
        """See a block through."""
        ticket = self._fetch(known, block)
        is_counted = True
        try:
            await ticket.more(int(ticket.landing.size_bytes * NEARLY))
            is_counted = False
            step = self._core.came(file, self._limits(known), lambda index: self._wants(known, index))
            self._run(known, file, step)
            await ticket.whole()
            await ticket.landing.settled()
        except StokerError:
            self._core.stop(file)
        finally:
            ticket.leave()
            if is_counted:
                self._core.left(file)
        if not self._is_held(known, block):
            self._core.stop(file)
