"""Objects that are written, copied and removed: through, to the origin. Nothing is said to be done before it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from stoker.base.clock import Clock
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.origin.guarded_writes import GuardedWritableOrigin
from stoker.cache.origin.port import Part
from stoker.cache.origin.writing_port import Attributes, attributes_in, told_of
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.inquiry import is_about
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.errors import no_such_bucket, no_such_key, not_implemented, refusal_of
from stoker.cache.server.s3.headers import Conditions, Outcome, evaluate_write, quoted_etag
from stoker.cache.server.s3.results import copied_document, deleted_document
from stoker.cache.server.s3.xml import BODY_BYTES_MAX, DeletedKey, read_delete
from stoker.cache.store.attributes import headers_of
from stoker.errors import ObjectNotFound, StokerError
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http import etag_of
from stoker.wire.http_dates import parse_http_date

PUT_BYTES_MAX = 5 * 1024**3
"""Of one request, as S3 has it; more comes as an upload in parts."""


class Writing:
    """Of one engine."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {
            ops.PutObject: self._put,
            ops.CopyObject: self._copy,
            ops.DeleteObject: self._delete,
            ops.DeleteObjects: self._delete_many,
        }

    async def _put(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.PutObject)
        bucket = call.writable(self._engine, operation.bucket)
        size_bytes = call.announced_bytes()
        if size_bytes is not None and size_bytes > PUT_BYTES_MAX:
            raise S3Refusal(
                "EntityTooLarge", f"One request writes at most {PUT_BYTES_MAX} bytes: upload it in parts"
            )
        if_match, if_none_match = await self.conditions(bucket, operation.key, operation.conditions)
        async with aclosing(call.parts()) as parts:
            info = await call.writes(bucket).put(
                operation.key,
                parts,
                size_bytes,
                attributes=attributes_of(operation.written),
                if_match=if_match,
                if_none_match=if_none_match,
                sha256=call.sha256,
            )
        await self.wrote(bucket, operation.key, info, attributes_of(operation.written))
        call.reply(200, [("ETag", etag_of(info.version)), *call.checksums()])

    async def wrote(self, bucket: Bucket, key: str, info: ObjectInfo, attributes: Attributes | None) -> None:
        """The origin has it: all servers are to know. `attributes`: what it was written with; None: the origin is
        asked. Raises S3Refusal: its bucket was removed meanwhile, and who writes is not to believe that it is there."""
        headers = info.headers
        if headers == ():
            if attributes is None:
                attributes = await _described(bucket, key, info.version)
            headers = told_of(attributes)
        if self._engine.buckets.get(bucket.name) is not bucket:
            raise no_such_bucket(bucket.name)
        said = ObjectInfo(key, info.size_bytes, info.version, info.modified_s, headers)
        await self._engine.metadata.wrote(bucket, key, said)
        if self._engine.buckets.get(bucket.name) is not bucket:
            raise no_such_bucket(bucket.name)

    async def conditions(self, bucket: Bucket, key: str, conditions: Conditions) -> tuple[str | None, bool]:
        """What the origin is to hold to: over which version only, and whether only where there is nothing. Raises
        S3Refusal where a condition does not hold, or the origin cannot hold to it."""
        if conditions.are_none:
            return None, False
        if not bucket.writable_origin.capabilities.has_conditions:
            raise not_implemented("Writing under a condition to this bucket's origin")
        try:
            known = await self._engine.locate(bucket, key, is_refreshing=True)
        except ObjectNotFound:
            if conditions.if_match is not None:
                raise no_such_key(key) from None
            return None, conditions.if_none_match is not None
        outcome, why = evaluate_write(conditions, etag_of(known.version), None)
        if outcome is not Outcome.GO_ON:
            raise failed(why)
        return known.version, False

    async def _copy(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.CopyObject)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        source = call.bucket(self._engine, operation.source.bucket)
        await self.conditions(bucket, operation.key, operation.conditions)
        known = await self.source(source, operation.source.key, operation.source_conditions)
        given = attributes_of(operation.written) if operation.is_replacing else None
        origin = call.writes(bucket)
        if source is bucket:
            info = await origin.copy(known.key, operation.key, known.version, attributes=given)
        else:
            kept = given if given is not None else await _kept(source, known)
            async with aclosing(content(source, known, 0, known.size_bytes)) as parts:
                info = await origin.put(operation.key, parts, known.size_bytes, attributes=kept)
        await self.wrote(bucket, operation.key, info, given)
        etag = quoted_etag(etag_of(info.version))[1:-1]
        call.reply_xml(copied_document("CopyObjectResult", etag, info.modified_s or self._clock.wall(), {}))

    async def source(self, bucket: Bucket, key: str, conditions: Conditions) -> ObjectInfo:
        """What is to be copied, as the origin has it now. Raises S3Refusal."""
        try:
            known = await self._engine.locate(bucket, key, is_refreshing=True)
        except ObjectNotFound:
            raise no_such_key(key) from None
        said = headers_of(known.attributes)
        modified = dict(said).get("Last-Modified")
        modified_s = None if modified is None else parse_http_date(modified)
        outcome, why = evaluate_write(conditions, etag_of(known.version), modified_s)
        if outcome is not Outcome.GO_ON:
            raise failed(why)
        return ObjectInfo(key, known.size_bytes, known.version, modified_s or 0.0, tuple(said))

    async def _delete(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.DeleteObject)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        if not operation.conditions.are_none:
            raise not_implemented("Removing an object under a condition")
        await call.writes(bucket).delete(operation.key)
        await self._engine.metadata.wrote(bucket, operation.key, None)
        call.reply(204)

    async def _delete_many(self, call: Call, operation: ops.Operation) -> None:
        bucket = call.writable(self._engine, operation.bucket)
        asked = read_delete(await call.document(BODY_BYTES_MAX))
        is_about(one.key for one in asked.keys)
        failures: list[tuple[DeletedKey, S3Refusal]] = []
        names: dict[str, DeletedKey] = {}
        for one in asked.keys:
            if not call.principal.may_delete(operation.bucket, one.key):
                failures.append((one, S3Refusal("AccessDenied", "Access Denied")))
            elif one.version_id in ("", "null"):
                names[one.key] = one
            else:
                failures.append((one, S3Refusal("NoSuchVersion", "The specified version does not exist.")))
        errors = await call.writes(bucket).delete_many(list(names)) if names else {}
        removed = []
        for key, one in names.items():
            error = errors.get(key)
            if error is not None:
                failures.append((one, refusal_of(error)))
                continue
            await self._engine.metadata.wrote(bucket, key, None)
            removed.append(one)
        call.reply_xml(deleted_document(removed, failures, asked.is_quiet))


def attributes_of(written: ops.WrittenHeaders) -> Attributes:
    """What is kept with an object."""
    headers = {name: text for name, text in written.headers.items() if name != "content-type"}
    return Attributes(written.headers.get("content-type", ""), dict(written.metadata), headers=headers)


def failed(why: str) -> S3Refusal:
    """The refusal where a condition does not hold."""
    text = "At least one of the pre-conditions you specified did not hold"
    return S3Refusal("PreconditionFailed", text, (("Condition", why),))


async def content(bucket: Bucket, info: ObjectInfo, start: int, stop: int) -> AsyncGenerator[Part, None]:
    """Bytes `[start, stop)` of an object, from its origin."""
    if start == stop:
        return
    async with aclosing(bucket.origin.stream(info.key, start, stop, info.version)) as parts:
        async for part in parts:
            yield part


async def _kept(bucket: Bucket, info: ObjectInfo) -> Attributes:
    """What an object has that is copied to another bucket; as it is known here, where its origin is only read."""
    if not isinstance(bucket.origin, GuardedWritableOrigin):
        return attributes_in({name.lower(): text for name, text in info.headers or ()})
    try:
        return (await bucket.origin.describe(info.key)).attributes
    except StokerError as error:
        raise refusal_of(error) from error


async def _described(bucket: Bucket, key: str, version: str) -> Attributes:
    """What the origin keeps with an object that was just written; nothing, where another one is there by now."""
    try:
        found = await bucket.writable_origin.describe(key)
    except StokerError:
        return Attributes()
    return found.attributes if found.info.version == version else Attributes()
