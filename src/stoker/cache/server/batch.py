"""POST /-/read: many whole objects in one answer."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from stoker._native import Piece
from stoker.cache.layout import block_bounds, block_count
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket, leave_all
from stoker.cache.server.port import Answer, Request
from stoker.cache.store.known import Known
from stoker.errors import AccessDenied, ConfigError, ObjectChanged, StokerError
from stoker.wire.cache_api import MSGPACK, ErrorBody, code_of
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_DATA,
    FRAME_ERROR,
    FRAME_LAST,
    FRAME_PLACE,
    INSTANCE_BYTES,
    PLACE,
    READ_KEYS_MAX,
    DescriptorsWanted,
    ReadRequest,
)
from stoker.wire.http import check_key

_WINDOW_KEYS = 128
_WINDOW_BYTES = 32 * 1024 * 1024
_UNKNOWN_BYTES = 64 * 1024
_decoder = msgspec.msgpack.Decoder(ReadRequest)

_First = tuple[Known, Piece | Ticket | None]


class _Reader:
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


class BatchReader:
    """Answers batches for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: Request, answer: Answer) -> None:
        """Errors of a key go into its frames; ConfigError, ObjectNotFound, AccessDenied are the batch's."""
        wanted = _decoder.decode(request.body)
        if not request.principal.may_read(wanted.bucket):
            raise AccessDenied(f"this token may not read the bucket {wanted.bucket!r}")
        if len(wanted.keys) > READ_KEYS_MAX:
            raise ConfigError(f"a batch has at most {READ_KEYS_MAX} keys, not {len(wanted.keys)}")
        bucket = self._engine.bucket(wanted.bucket)
        descriptors = wanted.descriptors if request.is_near else None
        hit = answer.batch(wanted.keys, self._engine.metadata.rule(bucket), descriptors)
        if hit is not None:
            bucket.hits += len(wanted.keys)
            bucket.hit_bytes += hit.size_bytes
            bucket.local_hits += hit.places
            for container in hit.large:
                self._engine.store.large_files.hand_out(container)
            return
        answer.start(200, [("Content-Type", MSGPACK)], None)
        reader = None if descriptors is None else _Reader(descriptors, answer)
        await self._stream(bucket, wanted.keys, reader, answer)
        answer.finish()

    async def _stream(self, bucket: Bucket, keys: list[str], reader: _Reader | None, answer: Answer) -> None:
        coming: deque[tuple[str, asyncio.Task[_First], int]] = deque()
        coming_bytes = 0
        rest: Iterator[str] = iter(keys)
        try:
            while True:
                while len(coming) < _WINDOW_KEYS and coming_bytes < _WINDOW_BYTES:
                    key = next(rest, None)
                    if key is None:
                        break
                    size_bytes = self._expected_bytes(bucket, key)
                    task = asyncio.get_running_loop().create_task(self._first(bucket, key))
                    coming.append((key, task, size_bytes))
                    coming_bytes += size_bytes
                if not coming:
                    return
                _, task, size_bytes = coming[0]
                await self._item(bucket, task, reader, answer)
                coming.popleft()
                coming_bytes -= size_bytes
                await answer.drain()
        finally:
            await leave_all([task for _, task, _ in coming], lambda first: first[1])

    def _expected_bytes(self, bucket: Bucket, key: str) -> int:
        """What fetching a key ahead of its turn will keep in memory, as far as is known."""
        known = self._engine.store.find(bucket.number, key)
        size_bytes = _UNKNOWN_BYTES if known is None else known.size_bytes
        return min(size_bytes, self._engine.block_size_bytes)

    async def _first(self, bucket: Bucket, key: str) -> _First:
        """A key's version and, all of it here or come, its first block; an empty object has none."""
        check_key(key)
        for attempt in (1, 2):
            known = await self._engine.locate(bucket, key, begins=True)
            if known.size_bytes == 0:
                return known, None
            found = await self._engine.block(known, 0)
            if isinstance(found, Piece):
                return known, found
            try:
                await found.whole()
            except ObjectChanged:
                found.leave()
                if attempt == 2:
                    raise
            except BaseException:
                found.leave()
                raise
            else:
                return known, found
        raise AssertionError("unreachable")

    async def _item(
        self, bucket: Bucket, task: asyncio.Task[_First], reader: _Reader | None, answer: Answer
    ) -> None:
        """Write one key's frames."""
        try:
            known, found = await task
            if found is None:
                answer.data(FRAME.pack(FRAME_LAST, 0))
                bucket.count(0, is_hit=True)
                return
            if reader is not None and self._place(known, reader, answer):
                bucket.count(known.size_bytes, is_hit=isinstance(found, Piece))
                bucket.local_hits += isinstance(found, Piece)
                return
            is_miss = isinstance(found, Ticket)
            count = block_count(known.size_bytes, self._engine.block_size_bytes)
            for index in range(count):
                if index:
                    found = await self._engine.block(known, index)
                    is_miss = is_miss or isinstance(found, Ticket)
                kind = FRAME_LAST if index == count - 1 else FRAME_DATA
                await self._block(known, index, found, kind, answer)
                await answer.drain()
            bucket.count(known.size_bytes, is_hit=not is_miss)
        except StokerError as error:
            body = msgspec.msgpack.encode(ErrorBody(code_of(error), str(error)))
            answer.data(FRAME.pack(FRAME_ERROR, len(body)) + body)

    def _place(self, known: Known, reader: _Reader, answer: Answer) -> bool:
        """Name the place of an object in place of sending it; False if it is short, or not held in one piece."""
        if known.size_bytes < reader.from_bytes:
            return False
        store = self._engine.store
        piece = store.held(known, 0)
        if piece is None or not piece.is_verified or piece.size_bytes != known.size_bytes:
            return False
        if not reader.has(piece):
            return False
        if piece.block is not None:
            store.large_files.hand_out(piece.container)
        body = PLACE.pack(piece.size_bytes, piece.container, piece.offset)
        answer.data(FRAME.pack(FRAME_PLACE, len(body)) + body)
        return True

    async def _block(
        self, known: Known, index: int, found: Piece | Ticket, kind: int, answer: Answer
    ) -> None:
        """Write one frame, once all of the block is there: what fails later could not be told any more."""
        start, stop = block_bounds(known.size_bytes, self._engine.block_size_bytes, index)
        frame = FRAME.pack(kind, stop - start)
        ticket = found if isinstance(found, Ticket) else None
        while True:
            if ticket is not None:
                try:
                    await ticket.whole()
                finally:
                    ticket.leave()
                answer.landing(ticket.landing, 0, stop - start, frame)
                return
            piece = self._engine.store.held(known, index)
            if piece is not None and piece.is_verified and answer.piece(piece, 0, stop - start, frame):
                return
            ticket = self._engine.fetch(known, index)
