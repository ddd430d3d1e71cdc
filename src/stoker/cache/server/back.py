"""The back: misses, metadata, administration and errors."""

from __future__ import annotations

import msgspec

from stoker.base.ranges import ByteRange, UnsatisfiableRange, parse_http_range
from stoker.cache.auth.tokens import Principal
from stoker.cache.server.admin import Admin
from stoker.cache.server.batch import BatchReader
from stoker.cache.server.buckets import Bucket, check_origin
from stoker.cache.server.engine import Engine
from stoker.cache.server.objects import Objects
from stoker.cache.server.port import Answer, Request, hops_of, is_refreshing, origin_of
from stoker.cache.server.s3.face import S3Face
from stoker.cache.store.attributes import headers_of
from stoker.cache.store.known import Known
from stoker.errors import AccessDenied, ConfigError, ObjectChanged, ObjectNotFound, StokerError
from stoker.wire.cache_api import ERROR_CODES, JSON, OWN_PREFIX, ErrorBody, code_of
from stoker.wire.http import etag_of, split_target, version_of


class CacheBack:
    """Answers for one engine."""

    def __init__(self, engine: Engine, admin: Admin, objects: Objects, s3: S3Face) -> None:
        self._engine = engine
        self._admin = admin
        self._batch = BatchReader(engine)
        self._objects = objects
        self._s3 = s3

    async def answer(self, request: Request, answer: Answer) -> None:
        try:
            if request.target.startswith(OWN_PREFIX.encode()):
                await self._own(request, answer)
            elif self._s3.is_for(request):
                await self._s3.answer(request, answer)
            else:
                await self._object(request, answer)
        except UnsatisfiableRange as error:
            self._error(answer, "range", str(error))
        except (StokerError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if answer.has_started:
                raise ConnectionAbortedError(str(error)) from error
            code = code_of(error) if isinstance(error, StokerError) else "bad_request"
            self._error(answer, code, str(error))

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
        check_origin(bucket, origin_of(request))
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
        hops = hops_of(request)
        known = await self._engine.locate(
            bucket, key, hops, is_refreshing=is_refreshing(request), begins=_begins(request)
        )
        wanted = request.header(b"if-match")
        if wanted is not None and wanted.strip() != "*" and version_of(wanted) != known.version:
            # Who asks knows another version, perhaps a newer one: what is known here may be stale.
            known = await self._engine.locate(bucket, key, hops, is_refreshing=True)
        if wanted is not None and wanted.strip() != "*" and version_of(wanted) != known.version:
            raise ObjectChanged(f"{key!r} in {bucket.name!r} is another version now")
        etag = etag_of(known.version)
        if request.header(b"if-none-match") == etag:
            answer.start(304, [("ETag", etag)], 0)
            answer.finish()
            return True
        part = _range(request, known, etag)
        if request.method == "HEAD":
            _start(answer, known, part)
            answer.finish()
            return True
        try:
            await self._objects.send(bucket, known, part, answer, lambda: _start(answer, known, part), hops)
        except ObjectChanged:
            if answer.has_started or wanted is not None:
                raise
            return False
        return True

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


def _begins(request: Request) -> bool:
    """Whether the first byte of the object is wanted."""
    conditions = request.header(b"if-none-match"), request.header(b"if-match")
    if request.method != "GET" or conditions != (None, None):
        return False
    return (request.header(b"range") or "bytes=0-").replace(" ", "").startswith("bytes=0-")


def _object_headers(known: Known) -> list[tuple[str, str]]:
    return [("ETag", etag_of(known.version)), ("Accept-Ranges", "bytes"), *headers_of(known.attributes)]


def _range(request: Request, known: Known, etag: str) -> ByteRange | None:
    header = request.header(b"range")
    if header is None or request.header(b"if-range") not in (None, etag):
        return None
    return parse_http_range(header, known.size_bytes)


def _start(answer: Answer, known: Known, part: ByteRange | None) -> None:
    headers = _object_headers(known)
    if part is None:
        answer.start(200, headers, known.size_bytes)
        return
    headers.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{known.size_bytes}"))
    answer.start(206, headers, part.size_bytes)
