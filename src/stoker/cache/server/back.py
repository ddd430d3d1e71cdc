"""The back: misses, ranges, metadata, administration and errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from stoker.base.ranges import ByteRange, UnsatisfiableRange, parse_http_range
from stoker.cache.auth.tokens import Principal
from stoker.cache.layout import BlockSpan, split
from stoker.cache.server.admin import Admin
from stoker.cache.server.batch import BatchReader
from stoker.cache.server.engine import Bucket, Engine, Pointer
from stoker.cache.server.port import Answer, Hit, Request
from stoker.cache.server.serve import send_block
from stoker.cache.store.shelf import HOT_BLOCK_BYTES_MAX, Held
from stoker.errors import AccessDenied, ConfigError, CorruptBlock, ObjectChanged, ObjectNotFound, StokerError
from stoker.wire.cache_api import ERROR_CODES, JSON, OWN_PREFIX, ErrorBody, code_of
from stoker.wire.http import etag_of, response_head, split_target, version_of

LOOK_AHEAD_BLOCKS = 4


class CacheBack:
    """Answers for one engine."""

    def __init__(self, engine: Engine, admin: Admin) -> None:
        self._engine = engine
        self._admin = admin
        self._batch = BatchReader(engine)
        self._shelf = engine.shelf

    def look_up(self, bucket: str, key: str) -> Hit | None:
        found = self._engine.buckets.get(bucket)
        if found is None:
            return None
        pointer = self._engine.fresh(found, key)
        if pointer is None or pointer.size_bytes > self._engine.block_size_bytes:
            return None
        size_bytes = pointer.size_bytes
        if pointer.head is None:
            pointer.head = response_head(
                200, [("Content-Length", str(size_bytes)), *_object_headers(pointer)]
            )
        if size_bytes == 0:
            found.hits += 1
            return Hit(pointer.head, 0, b"", None, None)
        held = self._shelf.find(pointer.first_block)
        if held is None:
            return None
        hit = self._hit(pointer.head, held)
        if hit is not None:
            found.hits += 1
            found.hit_bytes += size_bytes
        return hit

    def pin(self, hit: Hit) -> Callable[[], None]:
        held = hit.held
        if held is None:
            return lambda: None
        self._shelf.pin(held)
        return lambda: self._shelf.unpin(held)

    async def answer(self, request: Request, answer: Answer) -> None:
        try:
            if request.target.startswith(OWN_PREFIX.encode()):
                await self._own(request, answer)
            else:
                await self._object(request, answer)
        except UnsatisfiableRange as error:
            self._error(answer, "range", str(error))
        except (StokerError, msgspec.ValidationError, msgspec.DecodeError) as error:
            if answer.has_started:
                raise ConnectionAbortedError(str(error)) from error
            code = code_of(error) if isinstance(error, StokerError) else "bad_request"
            self._error(answer, code, str(error))

    def _hit(self, head: bytes, held: Held) -> Hit | None:
        try:
            if held.size_bytes <= HOT_BLOCK_BYTES_MAX:
                return Hit(head, held.size_bytes, self._shelf.bytes_of(held), None, None)
            if not held.is_verified:
                return None
            file = self._shelf.file_of(held)
            return None if file is None else Hit(head, held.size_bytes, b"", file, held)
        except CorruptBlock:
            return None

    async def _own(self, request: Request, answer: Answer) -> None:
        if request.target == b"/-/read":
            if request.method != "POST":
                raise _method(request, "POST")
            await self._batch.answer(request, answer)
        else:
            await self._admin.answer(request, answer)

    async def _object(self, request: Request, answer: Answer) -> None:
        name, key, _ = split_target(request.target)
        check_may_read(request.principal, name)
        bucket = self._engine.bucket(name)
        if request.method not in ("GET", "HEAD"):
            raise _method(request, "GET or HEAD")
        if not key:
            raise ObjectNotFound(f"no object is named; ask for /{name}/KEY")
        for _ in range(2):
            # If the object changed before a byte was sent: once more, at the version that is there now.
            if await self._try_object(bucket, key, request, answer):
                return
        raise ObjectChanged(f"{key!r} in {name!r} keeps changing")

    async def _try_object(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> bool:
        """False if the object changed and another try may help."""
        pointer = await self._engine.locate(bucket, key)
        wanted = request.header(b"if-match")
        if wanted is not None and wanted.strip() != "*" and version_of(wanted) != pointer.version:
            raise ObjectChanged(f"{key!r} in {bucket.name!r} is another version now")
        etag = etag_of(pointer.version)
        if request.header(b"if-none-match") == etag:
            answer.start(304, [("ETag", etag)], 0)
            answer.finish()
            return True
        part = _range(request, pointer, etag)
        if request.method == "HEAD":
            _start(answer, pointer, part)
            answer.finish()
            return True
        try:
            await self._stream(bucket, pointer, part, answer)
        except ObjectChanged:
            if answer.has_started or wanted is not None:
                raise
            return False
        return True

    async def _stream(self, bucket: Bucket, pointer: Pointer, part: ByteRange | None, answer: Answer) -> None:
        start, stop = part or (0, pointer.size_bytes)
        spans = deque(split(start, stop, self._engine.block_size_bytes))
        coming: deque[tuple[BlockSpan, asyncio.Task[Held | bytes]]] = deque()
        is_hit = True
        try:
            while spans or coming:
                while spans and len(coming) < LOOK_AHEAD_BLOCKS:
                    span = spans.popleft()
                    task = asyncio.ensure_future(self._engine.block(pointer, span.index))
                    coming.append((span, task))
                span, task = coming[0]
                block = await task
                is_hit = is_hit and isinstance(block, Held)
                if not answer.has_started:
                    _start(answer, pointer, part)
                await send_block(self._engine, pointer, span, block, answer)
                coming.popleft()
                await answer.drain()
        finally:
            for _, task in coming:
                task.cancel()
            await asyncio.gather(*(task for _, task in coming), return_exceptions=True)
        if not answer.has_started:
            _start(answer, pointer, part)
        answer.finish()
        if is_hit:
            bucket.hits += 1
            bucket.hit_bytes += stop - start
        else:
            bucket.misses += 1

    def _error(self, answer: Answer, code: str, message: str) -> None:
        body = msgspec.json.encode(ErrorBody(code, message))
        answer.start(ERROR_CODES[code].status, [("Content-Type", JSON)], len(body))
        answer.data(body)
        answer.finish()


def check_may_read(principal: Principal, bucket: str) -> None:
    """Raises AccessDenied."""
    if not principal.may_read(bucket):
        raise AccessDenied(f"this token may not read the bucket {bucket!r}")


def _method(request: Request, allowed: str) -> ConfigError:
    return ConfigError(f"{request.method} is not possible here: use {allowed}")


def _object_headers(pointer: Pointer) -> list[tuple[str, str]]:
    return [
        ("ETag", etag_of(pointer.version)),
        ("Accept-Ranges", "bytes"),
        ("Content-Type", "application/octet-stream"),
    ]


def _range(request: Request, pointer: Pointer, etag: str) -> ByteRange | None:
    header = request.header(b"range")
    if header is None or request.header(b"if-range") not in (None, etag):
        return None
    return parse_http_range(header, pointer.size_bytes)


def _start(answer: Answer, pointer: Pointer, part: ByteRange | None) -> None:
    headers = _object_headers(pointer)
    if part is None:
        answer.start(200, headers, pointer.size_bytes)
        return
    headers.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{pointer.size_bytes}"))
    answer.start(206, headers, part.size_bytes)
