"""A batch of which not all is here: item after item in order, while what the next ones need is fetched."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from stoker._native import Piece
from stoker.cache.layout import block_bounds
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.port import Answer
from stoker.cache.store.known import Known
from stoker.errors import ConfigError, ObjectChanged, StokerError
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_DATA,
    FRAME_ERROR,
    FRAME_LAST,
    FRAME_PLACE,
    INSTANCE_BYTES,
    PLACE,
    PLACE_OBJECT_BYTES_MAX,
    DescriptorsWanted,
    ReadRequest,
)
from stoker.wire.cache_errors import ErrorBody, code_of
from stoker.wire.http import check_key

_WINDOW_ITEMS = 128
_WINDOW_BYTES = 32 * 1024 * 1024
_UNKNOWN_BYTES = 64 * 1024
_AHEAD_BLOCKS = 4
"""Of one item, of which so many may be in memory at a time."""
_PLACE_BLOCKS_MAX = 1024


class Item(NamedTuple):
    """Bytes `[start, stop)` of the object with that number among the request's keys, or to its end."""

    key: int
    start: int
    stop: int


class Reader:
    """What a reader has descriptors of, while its batch is answered."""

    def __init__(self, wanted: DescriptorsWanted, answer: Answer) -> None:
        self.from_bytes = wanted.from_bytes
        self._left = wanted.count_max
        self._answer = answer
        instance, numbers = wanted.held[:INSTANCE_BYTES], wanted.held[INSTANCE_BYTES:]
        is_ours = instance == answer.instance and len(numbers) % 4 == 0
        self._has = set(struct.unpack(f"!{len(numbers) // 4}I", numbers)) if is_ours else set()

    def has(self, piece: Piece) -> bool:
        """Whether it has one of the piece's container; it is passed one, if that can be."""
        if piece.container not in self._has:
            if self._left <= 0 or not self._answer.pass_descriptor(piece):
                return False
            self._left -= 1
            self._has.add(piece.container)
        return True


class _Begun(NamedTuple):
    """Bytes `[start, stop)` of a version, and the first blocks of them, all here or come."""

    known: Known
    start: int
    stop: int
    found: deque[Piece | Ticket]


class _Window:
    """What is fetched ahead, in bytes: a block counts once, for however many items it is."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def add(self, blocks: Iterable[tuple[tuple[int, int], int]]) -> list[tuple[int, int]]:
        """These blocks, of such sizes, are wanted; returns their names, to be taken out again."""
        names = []
        for name, size_bytes in blocks:
            entry = self._blocks.setdefault(name, [0, size_bytes])
            if not entry[0]:
                self.size_bytes += size_bytes
            entry[0] += 1
            names.append(name)
        return names

    def remove(self, names: Sequence[tuple[int, int]]) -> None:
        """They are wanted once less."""
        for name in names:
            entry = self._blocks[name]
            entry[0] -= 1
            if not entry[0]:
                self.size_bytes -= entry[1]
                del self._blocks[name]


class BatchStream:
    """Answers the items of one request."""

    def __init__(
        self, engine: Engine, bucket: Bucket, wanted: ReadRequest, reader: Reader | None, answer: Answer
    ) -> None:
        self._engine = engine
        self._block_bytes = engine.block_size_bytes
        self._bucket = bucket
        self._wanted = wanted
        self._reader = reader
        self._answer = answer
        self._window = _Window()
        # Of keys that were asked about: what holds for one item of a key holds for its others.
        self._said: dict[int, Known | StokerError] = {}

    async def run(self, items: Sequence[Item]) -> None:
        """Write all frames. Raises ConnectionError if the peer is gone."""
        coming: deque[tuple[asyncio.Task[_Begun], list[tuple[int, int]]]] = deque()
        rest = iter(items)
        try:
            while True:
                while len(coming) < _WINDOW_ITEMS and self._window.size_bytes < _WINDOW_BYTES:
                    item = next(rest, None)
                    if item is None:
                        break
                    names = self._window.add(self._expected(item))
                    coming.append(
                        (asyncio.get_running_loop().create_task(self._begin(item, len(names))), names)
                    )
                if not coming:
                    return
                task, names = coming[0]
                await self._item(task)
                coming.popleft()
                self._window.remove(names)
                await self._answer.drain()
        finally:
            await _leave_begun([task for task, _ in coming])

    def _expected(self, item: Item) -> list[tuple[tuple[int, int], int]]:
        """What fetching an item ahead of its turn will keep in memory, as far as is known."""
        size = self._block_bytes
        said = self._said.get(item.key)
        known = said if isinstance(said, Known) else None
        if known is None:
            known = self._engine.store.find(self._bucket.number, self._wanted.keys[item.key])
        if known is None or known.is_absent:
            index, inside = divmod(item.start, size)
            least = size if index else inside + _UNKNOWN_BYTES
            return [((item.key, index), min(least, size))]
        expected = []
        for index in self._blocks(item.start, min(item.stop, known.size_bytes))[:_AHEAD_BLOCKS]:
            start, stop = block_bounds(known.size_bytes, size, index)
            piece = self._engine.store.held(known, index)
            is_here = piece is not None and piece.is_verified
            expected.append(((item.key, index), 0 if is_here else stop - start))
        return expected

    def _blocks(self, start: int, stop: int) -> range:
        """The numbers of the blocks that have bytes `[start, stop)`."""
        return range(start // self._block_bytes, -(-stop // self._block_bytes)) if start < stop else range(0)

    async def _begin(self, item: Item, blocks_max: int) -> _Begun:
        """Look an item up and fetch its first blocks, as many as were counted."""
        key = check_key(self._wanted.keys[item.key])
        if item.stop < item.start:
            raise ConfigError(f"bytes [{item.start}, {item.stop}) of {key!r} are not a range")
        for attempt in (1, 2):
            known = await self._locate(item)
            start, stop = min(item.start, known.size_bytes), min(item.stop, known.size_bytes)
            found: deque[Piece | Ticket] = deque()
            try:
                for index in self._blocks(start, stop)[: min(blocks_max, self._ahead())]:
                    found.append(await self._engine.block(known, index))
                for one in found:
                    if isinstance(one, Ticket):
                        await one.whole()
            except ObjectChanged:
                _leave(found)
                if attempt == 2 or self._version(item):
                    raise
                self._said.pop(item.key, None)
            except BaseException:
                _leave(found)
                raise
            else:
                return _Begun(known, start, stop, found)
        raise AssertionError("unreachable")

    def _version(self, item: Item) -> str:
        """What is wanted; empty: whatever is there."""
        return self._wanted.versions[item.key] if self._wanted.versions else ""

    async def _locate(self, item: Item) -> Known:
        """The version of an item. Raises ObjectNotFound, ObjectChanged, OriginError."""
        said = self._said.get(item.key)
        if said is None:
            begins = item.start < min(item.stop, self._block_bytes)
            try:
                said = await self._ask(self._wanted.keys[item.key], self._version(item), begins=begins)
            except StokerError as error:
                said = error
            self._said[item.key] = said
        if isinstance(said, StokerError):
            raise said.with_traceback(None)
        return said

    async def _ask(self, key: str, version: str, *, begins: bool) -> Known:
        known = await self._engine.locate(self._bucket, key, begins=begins)
        if version and known.version != version:
            # Who asks knows another version, perhaps a newer one: what is known here may be stale.
            known = await self._engine.locate(self._bucket, key, is_refreshing=True)
        if version and known.version != version:
            raise ObjectChanged(f"{key!r} in {self._bucket.name!r} is another version now")
        return known

    def _ahead(self) -> int:
        return 1 if self._engine.is_short_of_memory else _AHEAD_BLOCKS

    async def _item(self, task: asyncio.Task[_Begun]) -> None:
        """Write one item's frames."""
        try:
            begun = await task
            try:
                await self._send(begun)
            finally:
                _leave(begun.found)
        except StokerError as error:
            body = msgspec.msgpack.encode(ErrorBody(code_of(error), str(error)))
            self._answer.data(FRAME.pack(FRAME_ERROR, len(body)) + body)

    async def _send(self, begun: _Begun) -> None:
        known, start, stop, found = begun
        if start == stop:
            self._answer.data(FRAME.pack(FRAME_LAST, 0))
            self._bucket.count(0, is_hit=True)
            return
        is_hit = not any(isinstance(one, Ticket) for one in found)
        if self._reader is not None and self._place(known, start, stop, self._reader):
            self._bucket.count(stop - start, is_hit=is_hit)
            self._bucket.local_hits += is_hit
            return
        blocks = self._blocks(start, stop)
        asked = blocks[len(found) :]
        for index in blocks:
            while asked and len(found) < self._ahead():
                found.append(await self._engine.block(known, asked[0]))
                asked = asked[1:]
            is_hit = is_hit and not isinstance(found[0], Ticket)
            kind = FRAME_LAST if index == blocks[-1] else FRAME_DATA
            first = index * self._block_bytes
            part = max(start - first, 0), min(stop - first, self._block_bytes)
            await self._block(known, index, part, found[0], kind)
            found.popleft()
            await self._answer.drain()
        self._bucket.count(stop - start, is_hit=is_hit)

    def _place(self, known: Known, start: int, stop: int, reader: Reader) -> bool:
        """Name the place of an item in place of sending it; False if it is short, or not all held in one file."""
        size_bytes = stop - start
        blocks = self._blocks(start, stop)
        if size_bytes < reader.from_bytes or known.size_bytes > PLACE_OBJECT_BYTES_MAX:
            return False
        if len(blocks) > _PLACE_BLOCKS_MAX:
            return False
        store = self._engine.store
        pieces = [store.held(known, index) for index in blocks]
        first = pieces[0]
        if first is None or not all(
            piece is not None and piece.is_verified and piece.container == first.container for piece in pieces
        ):
            return False
        if not reader.has(first):
            return False
        if first.block is not None:
            store.large_files.hand_out(first.container)
        offset = first.offset + start - blocks[0] * self._block_bytes
        body = PLACE.pack(size_bytes, first.container, offset)
        self._answer.data(FRAME.pack(FRAME_PLACE, len(body)) + body)
        return True

    async def _block(
        self, known: Known, index: int, part: tuple[int, int], found: Piece | Ticket, kind: int
    ) -> None:
        """Write one frame, once all of the block is there: what fails later could not be told any more."""
        start, stop = part
        frame = FRAME.pack(kind, stop - start)
        ticket = found if isinstance(found, Ticket) else None
        while True:
            if ticket is not None:
                try:
                    await ticket.whole()
                finally:
                    ticket.leave()
                self._answer.landing(ticket.landing, start, stop, frame)
                return
            piece = self._engine.store.held(known, index)
            if piece is not None and piece.is_verified and self._answer.piece(piece, start, stop, frame):
                return
            ticket = self._engine.fetch(known, index)


def _leave(found: Iterable[Piece | Ticket]) -> None:
    """Nothing is wanted of these any more."""
    for one in found:
        if isinstance(one, Ticket):
            one.leave()


async def _leave_begun(tasks: Sequence[asyncio.Task[_Begun]]) -> None:
    """Nothing is wanted any more of what these tasks look for."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            _leave(result.found)
