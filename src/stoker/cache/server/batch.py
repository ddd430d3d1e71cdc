"""POST /-/read: many whole objects in one answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import msgspec

from stoker.cache.layout import BlockSpan, block_bounds, block_count
from stoker.cache.server.at_once import AtOnce
from stoker.cache.server.engine import Bucket, Engine, Pointer
from stoker.cache.server.port import Answer, Request
from stoker.cache.server.serve import send_block
from stoker.cache.store.shelf import HOT_BLOCK_BYTES_MAX, Held
from stoker.errors import AccessDenied, ConfigError, CorruptBlock, ObjectChanged, StokerError
from stoker.wire.cache_api import (
    FRAME,
    FRAME_DATA,
    FRAME_ERROR,
    FRAME_LAST,
    MSGPACK,
    READ_KEYS_MAX,
    ErrorBody,
    ReadRequest,
    code_of,
)
from stoker.wire.http import check_key

_WINDOW_KEYS = 128
_WINDOW_BYTES = 32 * 1024 * 1024
_decoder = msgspec.msgpack.Decoder(ReadRequest)

_First = tuple[Pointer, Held | bytes | None]


class BatchReader:
    """Answers batches for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at_once = AtOnce(engine)

    async def answer(self, request: Request, answer: Answer) -> None:
        """Errors of a key go into its frames; ConfigError, ObjectNotFound, AccessDenied are the batch's."""
        wanted = _decoder.decode(request.body)
        if not request.principal.may_read(wanted.bucket):
            raise AccessDenied(f"this token may not read the bucket {wanted.bucket!r}")
        if len(wanted.keys) > READ_KEYS_MAX:
            raise ConfigError(f"a batch has at most {READ_KEYS_MAX} keys, not {len(wanted.keys)}")
        bucket = self._engine.bucket(wanted.bucket)
        may_have_paths = request.is_own_user and self._at_once.folder_frame
        paths_from_bytes = wanted.paths_from_bytes if may_have_paths else None
        if wanted.had_bad_paths and request.is_own_user:
            for key in wanted.keys:
                if (pointer := self._engine.fresh(bucket, key)) is not None:
                    self._engine.shelf.doubt(pointer.first_block)
        if not self._at_once.answer(bucket, wanted.keys, paths_from_bytes, answer):
            answer.start(200, [("Content-Type", MSGPACK)], None)
            await self._stream(bucket, wanted.keys, paths_from_bytes, answer)
        answer.finish()

    async def _stream(
        self, bucket: Bucket, keys: list[str], paths_from_bytes: int | None, answer: Answer
    ) -> None:
        coming: deque[tuple[str, asyncio.Task[_First] | _First, int]] = deque()
        coming_bytes = 0
        rest: Iterator[str] = iter(keys)
        gathered: list[bytes] = [] if paths_from_bytes is None else [self._at_once.folder_frame]
        gathered_bytes = 0
        try:
            while True:
                while len(coming) < _WINDOW_KEYS and coming_bytes < _WINDOW_BYTES:
                    key = next(rest, None)
                    if key is None:
                        break
                    held = self._at_once.held(bucket, key)
                    size_bytes = 0 if held is not None else self._expected_bytes(bucket, key)
                    coming.append((key, held or self._begin(bucket, key), size_bytes))
                    coming_bytes += size_bytes
                if not coming:
                    break
                key, first, size_bytes = coming[0]
                if gathered and (
                    gathered_bytes > 256 * 1024 or (isinstance(first, asyncio.Task) and not first.done())
                ):
                    answer.data(b"".join(gathered))
                    gathered, gathered_bytes = [], 0
                    await answer.drain()
                small = await self._item(bucket, first, paths_from_bytes, answer, gathered)
                coming.popleft()
                coming_bytes -= size_bytes
                gathered_bytes += small
        finally:
            tasks = [first for _, first, _ in coming if isinstance(first, asyncio.Task)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answer.data(b"".join(gathered))

    def _expected_bytes(self, bucket: Bucket, key: str) -> int:
        """What fetching a key ahead of its turn will keep in memory, as far as is known."""
        pointer = bucket.pointers.get(key)
        size_bytes = HOT_BLOCK_BYTES_MAX if pointer is None else pointer.size_bytes
        return min(size_bytes, self._engine.block_size_bytes)

    def _begin(self, bucket: Bucket, key: str) -> asyncio.Task[_First]:
        return asyncio.get_running_loop().create_task(self._first(bucket, key))

    async def _first(self, bucket: Bucket, key: str) -> _First:
        check_key(key)
        for attempt in (1, 2):
            pointer = await self._engine.locate(bucket, key)
            if pointer.size_bytes == 0:
                return pointer, None
            try:
                return pointer, await self._engine.block(pointer, 0)
            except ObjectChanged:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def _item(
        self,
        bucket: Bucket,
        first: asyncio.Task[_First] | _First,
        paths_from_bytes: int | None,
        answer: Answer,
        gathered: list[bytes],
    ) -> int:
        """Write one key's frames, or gather them if they are small; returns the bytes gathered."""
        try:
            pointer, block = await first if isinstance(first, asyncio.Task) else first
            count = block_count(pointer.size_bytes, self._engine.block_size_bytes)
            if count == 1 and isinstance(block, Held) and paths_from_bytes is not None:
                held = self._engine.shelf.find(block.block)
                if held is not None and held.is_verified and held.size_bytes >= paths_from_bytes:
                    frame = self._at_once.path_frame(held)
                    gathered.append(frame)
                    self._count(bucket, False, held.size_bytes)
                    bucket.path_hits += 1
                    return len(frame)
            if count <= 1 and pointer.size_bytes <= HOT_BLOCK_BYTES_MAX:
                data = await self._small(pointer, block)
                gathered += (FRAME.pack(FRAME_LAST, len(data)), data)
                self._count(bucket, isinstance(block, bytes), len(data))
                return len(data)
            if gathered:
                answer.data(b"".join(gathered))
                gathered.clear()
            is_miss = False
            for index in range(count):
                start, stop = block_bounds(pointer.size_bytes, self._engine.block_size_bytes, index)
                if index:
                    block = await self._engine.block(pointer, index)
                assert block is not None
                is_miss = is_miss or isinstance(block, bytes)
                answer.data(FRAME.pack(FRAME_LAST if index == count - 1 else FRAME_DATA, stop - start))
                await send_block(self._engine, pointer, BlockSpan(index, 0, stop - start), block, answer)
                await answer.drain()
            self._count(bucket, is_miss, pointer.size_bytes)
        except StokerError as error:
            body = msgspec.msgpack.encode(ErrorBody(code_of(error), str(error)))
            gathered += (FRAME.pack(FRAME_ERROR, len(body)), body)
        return 0

    async def _small(self, pointer: Pointer, block: Held | bytes | None) -> bytes:
        if block is None:
            return b""
        if isinstance(block, bytes):
            return block
        held = self._engine.shelf.find(block.block)
        try:
            if held is not None:
                return self._engine.shelf.bytes_of(held)
        except CorruptBlock:
            pass
        return await self._engine.fetch(pointer, 0)

    def _count(self, bucket: Bucket, is_miss: bool, size_bytes: int) -> None:
        if is_miss:
            bucket.misses += 1
        else:
            bucket.hits += 1
            bucket.hit_bytes += size_bytes
