"""Fetches what is going to be read, in the order in which it is, before it is asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from stoker.cache.coming import Stream
from stoker.cache.layout import split
from stoker.cache.prefetch import Prefetch
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.store.known import Known
from stoker.errors import StokerError

STREAMS = 32
"""Fetches at a time: enough for objects of 100 KiB and an answer in 20 ms to fill a line of 1 Gbit/s."""
WINDOW_PARTS = 100
"""What is fetched ahead takes such a part of the room, at most."""
WINDOW_BYTES_MAX = 256 * 1024 * 1024
WINDOW_BYTES_MIN = 1024 * 1024
BLOCKS_AT_ONCE = 4
"""Of one read."""
BLOCKS_MIN = 2
"""So many blocks of a read are fetched wherever it is in the window."""
_WAKE_S = 0.002
_LOOK_SHARE = 0.05
LOOKS_MAX = 4
"""In one turn of the loop."""


class ToRead(NamedTuple):
    """What one announced read is of, and its position; without `stop`, a whole object. `is_owned`: only what this
    server owns of it is read here."""

    position: int
    key: str
    start: int = 0
    stop: int | None = None
    is_owned: bool = False


class Readings(Protocol):
    """The announced reads of all buckets. Names of streams begin with their bucket's."""

    def streams(self) -> Mapping[str, Stream]: ...

    def bucket_of(self, name: str) -> Bucket: ...

    def reads(self, name: str, start: int, stop: int) -> Sequence[ToRead]:
        """Of a stream that is known; those that are done may be left out at the front."""

    def fetched(self, name: str, size_bytes: int) -> None: ...


class Prefetching:
    """Lives on one event loop."""

    def __init__(self, engine: Engine, readings: Readings) -> None:
        self._engine = engine
        self._readings = readings
        limit_bytes = engine.store.room.limit_bytes
        window_bytes = min(WINDOW_BYTES_MAX, max(WINDOW_BYTES_MIN, limit_bytes // WINDOW_PARTS))
        self.core = Prefetch(window_bytes)
        self._queue: deque[tuple[str, int, ToRead]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._waking: asyncio.TimerHandle | None = None
        self._look_s = 0.0

    @property
    def fetching(self) -> int:
        """How many reads are being fetched."""
        return len(self._tasks)

    def wake_soon(self) -> None:
        """There is news. However often there is, looking at it takes no more than a part of the time."""
        if self._waking is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            delay_s = max(_WAKE_S, self._look_s / _LOOK_SHARE)
            self._waking = loop.call_later(delay_s, self._woken)

    def _woken(self) -> None:
        self._waking = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.wake()
        self._look_s = loop.time() - began

    def wake(self) -> None:
        """Begin what may be begun now."""
        streams, looks = self._readings.streams(), 0
        while len(self._tasks) < STREAMS and not self._is_closed:
            if not self._queue:
                if looks == LOOKS_MAX:
                    # Others have their turn: where all is held, this may go on for long.
                    asyncio.get_running_loop().call_soon(self.wake)
                    return
                looks += 1
                if not self._look(streams):
                    return
                continue
            name, plan, read = self._queue.popleft()
            stream = streams.get(name)
            if stream is None or stream.plan != plan or read.position < stream.asked:
                continue
            bucket = self._readings.bucket_of(name)
            task = asyncio.get_running_loop().create_task(self._bring(name, bucket, read))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def close(self) -> None:
        """Begin no more, and leave what is coming."""
        self._is_closed = True
        if self._waking is not None:
            self._waking.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.wake()

    def _look(self, streams: Mapping[str, Stream]) -> bool:
        """Queue what is lacking of the next reads; False if there are none to be looked at."""
        look = self.core.next(streams)
        if look is None:
            return False
        stream, bucket = streams[look.stream], self._readings.bucket_of(look.stream)
        reads = self._readings.reads(look.stream, look.start, look.stop)
        whole = [i for i, read in enumerate(reads) if read.stop is None]
        store, metadata = self._engine.store, self._engine.metadata
        lacking = store.index.lacking(
            bucket.number, [reads[i].key for i in whole], metadata.checked_from_s(bucket)
        )
        wanted = {whole[i] for i in lacking}
        wanted |= {i for i, read in enumerate(reads) if read.stop is not None}
        for i in sorted(wanted):
            self._queue.append((look.stream, stream.plan, reads[i]))
        return True

    async def _bring(self, name: str, bucket: Bucket, read: ToRead) -> None:
        """See to it that what is read lies here. What cannot be had now is the reader's to find out."""
        engine = self._engine
        try:
            known = await engine.locate(bucket, read.key, begins=read.start == 0)
            stop = known.size_bytes if read.stop is None else min(read.stop, known.size_bytes)
            blocks = {span.index for span in split(min(read.start, stop), stop, engine.block_size_bytes)}
            if read.is_owned and len(blocks) > 1:
                blocks = {block for block in blocks if engine.owns(known, block)}
            lacking = [block for block in sorted(blocks) if not engine.store.has(known, block)]
            if not lacking:
                return
            is_held = await self._hold(known, lacking[: self._blocks_ahead(name, read, len(lacking))])
        except StokerError:
            return
        self.core.came(max(1, stop - read.start))
        if is_held:
            self._readings.fetched(name, stop - read.start)
        else:
            self.core.bar(name, self._readings.streams())

    def _blocks_ahead(self, name: str, read: ToRead, lacking: int) -> int:
        """How many of the blocks of a read that are lacking are fetched: what its stream's window has room for."""
        if lacking <= BLOCKS_MIN:
            return lacking
        size = self._engine.block_size_bytes
        share_bytes = self.core.share_of(name, read.position, lacking * size, self._readings.streams())
        return max(BLOCKS_MIN, share_bytes // size)

    async def _hold(self, known: Known, blocks: Sequence[int]) -> bool:
        """Fetch blocks, a few at a time. False if some cannot be kept. Raises what the first that fails does."""
        engine = self._engine
        size, lot = engine.block_size_bytes, engine.store.holdings.lot_of(known.bucket, known.key)
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            is_refused = engine.store.room.ask(lot, min(size, known.size_bytes)).is_refused
            if is_refused or engine.store.problem is not None:
                return False
            some = blocks[first : first + BLOCKS_AT_ONCE]
            held = await asyncio.gather(
                *(engine.foresee(known, block) for block in some), return_exceptions=True
            )
            for one in held:
                if isinstance(one, BaseException):
                    raise one
            if not all(held):
                return False
        return True
