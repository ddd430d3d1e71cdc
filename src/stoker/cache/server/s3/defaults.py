"""What clients ask of buckets and objects on their way, which a cache has no settings for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from stoker.cache.server.engine import Engine
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.buckets import OWNER
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.errors import no_such_key
from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.settings import bucket_setting, check_acl_as_it_is, object_setting
from stoker.cache.server.s3.xml import BODY_BYTES_MAX, document, element
from stoker.cache.store.attributes import headers_of
from stoker.cache.store.known import Known
from stoker.errors import ObjectNotFound
from stoker.wire.http import etag_of


class Defaults:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {
            ops.GetBucketSetting: self._of_bucket,
            ops.GetObjectSetting: self._of_object,
            ops.GetObjectAttributes: self._attributes,
            ops.PutBucketAcl: self._put_acl,
            ops.PutObjectAcl: self._put_acl,
        }

    async def _of_bucket(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.GetBucketSetting)
        await call.take_no_body()
        call.bucket(self._engine, operation.bucket)
        call.reply_xml(bucket_setting(operation.setting, OWNER))

    async def _of_object(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.GetObjectSetting)
        await call.take_no_body()
        await self._known(call, operation)
        call.reply_xml(object_setting(operation.setting, OWNER))

    async def _attributes(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.GetObjectAttributes)
        await call.take_no_body()
        known = await self._known(call, operation)
        said: dict[str, str | int] = {
            "ETag": quoted_etag(etag_of(known.version))[1:-1],
            "StorageClass": "STANDARD",
            "ObjectSize": known.size_bytes,
        }
        parts = [element(name, value) for name, value in said.items() if name in operation.wanted]
        dates = [one for one in headers_of(known.attributes) if one[0] == "Last-Modified"]
        call.reply_xml(document("GetObjectAttributesResponse", *parts), dates)

    async def _put_acl(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.PutAcl)
        await call.document(BODY_BYTES_MAX)
        if operation.key:
            await self._known(call, operation)
        else:
            call.bucket(self._engine, operation.bucket)
        check_acl_as_it_is(operation.canned)
        call.reply(200)

    async def _known(self, call: Call, operation: ops.Operation) -> Known:
        bucket = call.bucket(self._engine, operation.bucket)
        try:
            return await self._engine.locate(bucket, operation.key, call.hops)
        except ObjectNotFound as error:
            raise no_such_key(operation.key) from error
