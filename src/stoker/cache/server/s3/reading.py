"""Objects, and parts of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from stoker.base.ranges import ByteRange, UnsatisfiableRange, parse_http_range
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.objects import Objects
from stoker.cache.server.port import is_refreshing
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.call import Call, Headers
from stoker.cache.server.s3.errors import no_such_key
from stoker.cache.server.s3.headers import Outcome, evaluate
from stoker.cache.store.attributes import headers_of
from stoker.cache.store.known import Known
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError
from stoker.wire.http import etag_of
from stoker.wire.http_dates import parse_http_date

_TRIES = 2


class Reading:
    """Of one engine."""

    def __init__(self, engine: Engine, objects: Objects) -> None:
        self._engine = engine
        self._objects = objects

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {ops.GetObject: self._read, ops.HeadObject: self._read}

    async def _read(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.ReadObject)
        await call.take_no_body()
        bucket = call.bucket(self._engine, operation.bucket)
        for attempt in range(_TRIES):
            try:
                await self._try(call, operation, bucket)
                break
            except ObjectChanged:
                # If it changed before a byte was sent: once more, at the version that is there now.
                if call.answer.has_started or attempt + 1 == _TRIES:
                    raise
            except ObjectNotFound as error:
                raise no_such_key(operation.key) from error

    async def _try(self, call: Call, operation: ops.ReadObject, bucket: Bucket) -> None:
        is_begun = isinstance(operation, ops.GetObject) and operation.conditions.are_none
        known = await self._engine.locate(
            bucket,
            operation.key,
            call.hops,
            is_refreshing=is_refreshing(call.request),
            begins=is_begun and operation.range.replace(" ", "") in ("", "bytes=0-"),
        )
        if not known.attributes:
            known = await self._told(bucket, known, call.hops)
        outcome, why = _evaluated(operation, known)
        if outcome is Outcome.PRECONDITION_FAILED:
            # Who asks may know of a newer version than is known here.
            known = await self._engine.locate(bucket, operation.key, call.hops, is_refreshing=True)
            outcome, why = _evaluated(operation, known)
        if outcome is Outcome.PRECONDITION_FAILED:
            raise S3Refusal(
                "PreconditionFailed",
                "At least one of the pre-conditions you specified did not hold",
                (("Condition", why),),
            )
        headers = _headers(operation, known)
        if outcome is Outcome.NOT_MODIFIED:
            call.reply(304, [(name, value) for name, value in headers if name in ("ETag", "Last-Modified")])
            return
        is_other = call.request.header(b"if-range") not in (None, etag_of(known.version))
        part = None if is_other and not operation.part_number else _part(operation, known)
        size_bytes = known.size_bytes
        status = 200
        if part is not None or operation.part_number:
            status = 206
            start, stop = part or (0, size_bytes)
            if stop > start:
                headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{size_bytes}"))
        length_bytes = size_bytes if part is None else part.size_bytes

        def start_answer() -> None:
            call.start(status, headers, length_bytes)

        if isinstance(operation, ops.HeadObject):
            start_answer()
            call.answer.finish()
            return
        await self._objects.send(bucket, known, part, call.answer, start_answer, call.hops)

    async def _told(self, bucket: Bucket, known: Known, hops: int) -> Known:
        """The same with what the origin says of it besides; as it is, where the origin cannot be asked."""
        try:
            return await self._engine.locate(bucket, known.key, hops, is_refreshing=True)
        except OriginError:
            return known


def _evaluated(operation: ops.ReadObject, known: Known) -> tuple[Outcome, str]:
    return evaluate(operation.conditions, etag_of(known.version), _modified_s(known))


def _modified_s(known: Known) -> float | None:
    said = dict(headers_of(known.attributes)).get("Last-Modified")
    return None if said is None else parse_http_date(said)


def _headers(operation: ops.ReadObject, known: Known) -> Headers:
    headers = [("ETag", etag_of(known.version)), ("Accept-Ranges", "bytes"), *headers_of(known.attributes)]
    instead = {name.lower(): value for name, value in operation.overrides.items()}
    kept = [(name, value) for name, value in headers if name.lower() not in instead]
    return [*kept, *instead.items()]


def _part(operation: ops.ReadObject, known: Known) -> ByteRange | None:
    """Which bytes are wanted; None: all. Raises S3Refusal."""
    if operation.part_number > 1:
        raise S3Refusal(
            "InvalidPartNumber",
            "The requested partnumber is not satisfiable",
            (("PartNumberRequested", str(operation.part_number)), ("ActualPartCount", "1")),
        )
    if not operation.range:
        return None
    try:
        return parse_http_range(operation.range, known.size_bytes)
    except UnsatisfiableRange:
        more = ("ActualObjectSize", str(known.size_bytes)), ("RangeRequested", operation.range)
        raise S3Refusal("InvalidRange", "The requested range is not satisfiable", more) from None
