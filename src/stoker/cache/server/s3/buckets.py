"""Which buckets there are, and what is in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from stoker.cache.server.engine import Engine
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.listing import lister_of
from stoker.cache.server.s3.listing_xml import Described, Owner, list_document
from stoker.cache.server.s3.results import buckets_document, location_document, versioning_document
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.http import etag_of

OWNER = Owner("stoker", "stoker")
REGION = "us-east-1"
"""S3 says nothing where it is this one, and so do we."""


class Buckets:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {
            ops.ListBuckets: self._list_buckets,
            ops.HeadBucket: self._head,
            ops.GetBucketLocation: self._location,
            ops.GetBucketVersioning: self._versioning,
            ops.ListObjects: self._list,
            ops.ListObjectsV2: self._list,
            ops.ListObjectVersions: self._list,
        }

    async def _list_buckets(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.ListBuckets)
        await call.take_no_body()
        names = [(name, 0.0) for name in sorted(self._engine.buckets) if call.principal.may_read(name)]
        call.reply_xml(buckets_document(operation, names, OWNER, REGION))

    async def _head(self, call: Call, operation: ops.Operation) -> None:
        await call.take_no_body()
        call.bucket(self._engine, operation.bucket)
        call.reply(200, [("x-amz-bucket-region", REGION)])

    async def _location(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.GetBucketLocation)
        await call.take_no_body()
        call.bucket(self._engine, operation.bucket)
        call.reply_xml(location_document(operation, REGION))

    async def _versioning(self, call: Call, operation: ops.Operation) -> None:
        await call.take_no_body()
        call.bucket(self._engine, operation.bucket)
        call.reply_xml(versioning_document())

    async def _list(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.Listing)
        await call.take_no_body()
        bucket = call.bucket(self._engine, operation.bucket)
        lister = lister_of(operation)
        while (ask := lister.ask) is not None:
            page = await self._engine.metadata.page(bucket, ask.prefix, ask.after, ask.limit, call.hops)
            lister.feed(page.objects, page.after is None)
        call.reply_xml(list_document(operation, lister.page(), _described, OWNER))


def _described(info: ObjectInfo) -> Described:
    return Described(quoted_etag(etag_of(info.version))[1:-1], info.modified_s)
