"""Which buckets there are, and what is in them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.documents import Documents
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
        self._documents = Documents()

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
        names = [
            (name, bucket.spec.made_ms / 1000)
            for name, bucket in sorted(self._engine.buckets.items())
            if call.principal.knows(name)
        ]
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
        call.reply_xml(await self._document(bucket, operation, call.hops))

    async def _document(self, bucket: Bucket, operation: ops.Listing, hops: int) -> bytes:
        lister, metadata = lister_of(operation), self._engine.metadata
        first, asks = lister.ask, 0
        known = None if first is None else metadata.page_said(bucket, *first)
        document = self._documents.get(operation, known)
        if document is not None:
            return document
        while (ask := lister.ask) is not None:
            asks += 1
            page = await metadata.page(bucket, ask.prefix, ask.after, ask.limit, hops)
            lister.feed(page.objects, page.after is None)
        document = list_document(operation, lister.page(), _described, OWNER)
        # It was made of the page that was known before if that is still known.
        if (
            first is not None
            and known is not None
            and asks == 1
            and metadata.page_said(bucket, *first) is known
        ):
            self._documents.put(operation, known, document)
        return document


def _described(info: ObjectInfo) -> Described:
    return Described(etag_of(info.version)[1:-1], info.modified_s)
