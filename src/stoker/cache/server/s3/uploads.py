"""Uploads in parts. They are the origin's: any server of a fleet takes any part, and they outlive all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from stoker.base.clock import Clock
from stoker.cache.auth.checksums import MAKERS, PREFIX
from stoker.cache.auth.composing import PartSum, check_composed
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.origin.guarded_writes import GuardedWrites
from stoker.cache.origin.writing_port import UploadPart
from stoker.cache.server.begun import BegunUploads
from stoker.cache.server.engine import Engine
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.buckets import OWNER
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.headers import quoted_etag
from stoker.cache.server.s3.results import (
    StoredPart,
    StoredUpload,
    completed_document,
    copied_document,
    created_document,
    parts_document,
    uploads_document,
)
from stoker.cache.server.s3.writing import PUT_BYTES_MAX, Writing, attributes_of, content
from stoker.cache.server.s3.xml import BODY_BYTES_MAX, CompletedPart, read_complete
from stoker.errors import EnvironmentProblem
from stoker.wire.http import etag_of

PART_BYTES_MIN = 5 * 1024 * 1024
"""Of all parts but the last, as S3 has it."""
_PARTS_AT_ONCE = 1000
_UPLOADS_MAX = 100_000
"""More are not looked through for one list."""


class Uploads:
    """Of one engine."""

    def __init__(self, engine: Engine, writing: Writing, clock: Clock, begun: BegunUploads) -> None:
        self._engine = engine
        self._begun = begun
        self._clock = clock
        self._writing = writing

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {
            ops.CreateMultipartUpload: self._create,
            ops.UploadPart: self._part,
            ops.UploadPartCopy: self._part_copy,
            ops.CompleteMultipartUpload: self._complete,
            ops.AbortMultipartUpload: self._abort,
            ops.ListParts: self._list_parts,
            ops.ListMultipartUploads: self._list_uploads,
        }

    async def _create(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.CreateMultipartUpload)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        upload_id = await call.writes(bucket).begin_upload(operation.key, attributes_of(operation.written))
        with suppress(EnvironmentProblem):  # it is only who gives it up that is not known then
            await self._begun.begin(operation.bucket, operation.key, upload_id, call.principal)
        call.reply_xml(created_document(operation, upload_id))

    async def _part(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.UploadPart)
        bucket = call.writable(self._engine, operation.bucket)
        size_bytes = call.announced_bytes()
        if size_bytes is None:
            raise S3Refusal("MissingContentLength", "You must provide the Content-Length HTTP header.")
        if size_bytes > PUT_BYTES_MAX:
            raise S3Refusal("EntityTooLarge", f"A part has at most {PUT_BYTES_MAX} bytes")
        async with aclosing(call.parts()) as parts:
            etag = await call.writes(bucket).put_part(
                operation.key,
                operation.upload_id,
                operation.part_number,
                parts,
                size_bytes,
                sha256=call.sha256,
            )
        call.reply(200, [("ETag", quoted_etag(etag)), *call.checksums(is_object=False)])

    async def _part_copy(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.UploadPartCopy)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        source = call.bucket(self._engine, operation.source.bucket)
        known = await self._writing.source(source, operation.source.key, operation.source_conditions)
        start, stop = 0, known.size_bytes
        if operation.source_range is not None:
            start, stop = operation.source_range[0], operation.source_range[1] + 1
        if stop > known.size_bytes:
            raise S3Refusal(
                "InvalidArgument",
                f"Range specified is not valid for source object of size: {known.size_bytes}",
            )
        async with aclosing(content(source, known, start, stop)) as parts:
            etag = await call.writes(bucket).put_part(
                operation.key, operation.upload_id, operation.part_number, parts, stop - start
            )
        call.reply_xml(copied_document("CopyPartResult", quoted_etag(etag)[1:-1], self._clock.wall(), {}))

    async def _complete(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.CompleteMultipartUpload)
        bucket = call.writable(self._engine, operation.bucket)
        asked = read_complete(await call.document(BODY_BYTES_MAX))
        if_match, if_none_match = await self._writing.conditions(bucket, operation.key, operation.conditions)
        parts = [(part.number, part.etag) for part in asked]
        writes = call.writes(bucket)
        sizes = _sizes(asked, await self._came(writes, operation))
        checksums = _checksums(call, asked, sizes)
        info = await writes.complete_upload(
            operation.key, operation.upload_id, parts, if_match=if_match, if_none_match=if_none_match
        )
        self._begun.end(operation.upload_id)
        await self._writing.wrote(bucket, operation.key, info, None)
        location = f"/{operation.bucket}/{operation.key}"
        etag = quoted_etag(etag_of(info.version))[1:-1]
        call.reply_xml(completed_document(operation, location, etag, checksums))

    async def _came(self, writes: GuardedWrites, operation: ops.CompleteMultipartUpload) -> dict[int, int]:
        """Sizes in bytes of the parts that came, by number."""
        came: dict[int, int] = {}
        after = 0
        while found := await self._parts_of(writes, operation, after, _PARTS_AT_ONCE):
            came |= {part.number: part.size_bytes for part in found}
            after = found[-1].number
            if len(found) < _PARTS_AT_ONCE:
                break
        return came

    async def _parts_of(
        self, writes: GuardedWrites, operation: ops.OfUpload, after: int, limit: int
    ) -> list[UploadPart]:
        return await writes.list_parts(operation.key, operation.upload_id, after, limit)

    async def _abort(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.AbortMultipartUpload)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        await call.writes(bucket).abort_upload(operation.key, operation.upload_id)
        self._begun.end(operation.upload_id)
        call.reply(204)

    async def _list_parts(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.ListParts)
        await call.take_no_body()
        bucket = call.writable(self._engine, operation.bucket)
        found = await self._parts_of(
            call.writes(bucket), operation, operation.part_number_marker, operation.max_parts + 1
        )
        parts = [
            StoredPart(one.number, quoted_etag(one.etag)[1:-1], one.size_bytes, one.written_at)
            for one in found
        ]
        call.reply_xml(parts_document(operation, parts, OWNER))

    async def _list_uploads(self, call: Call, operation: ops.Operation) -> None:
        assert isinstance(operation, ops.ListMultipartUploads)
        await call.take_no_body()
        bucket = call.bucket(self._engine, operation.bucket)
        uploads: list[StoredUpload] = []
        after = None
        while len(uploads) < _UPLOADS_MAX:
            found = await bucket.writable_origin.list_uploads(operation.prefix, after, _PARTS_AT_ONCE)
            uploads += [StoredUpload(one.key, one.upload_id, one.begun_at) for one in found]
            if len(found) < _PARTS_AT_ONCE:
                break
            after = found[-1].key, found[-1].upload_id
        call.reply_xml(uploads_document(operation, uploads, OWNER))


def _sizes(asked: Sequence[CompletedPart], came: Mapping[int, int]) -> list[int]:
    """Of the parts, in bytes. Raises S3Refusal where one is missing, or one that is not the last is too small; whether
    it is another one than what is asked for, the origin says: not all list the last one that came with a number."""
    sizes = []
    for part in asked:
        size_bytes = came.get(part.number)
        if size_bytes is None:
            raise S3Refusal(
                "InvalidPart",
                "One or more of the specified parts could not be found. The part might not have been uploaded, or the"
                " specified entity tag might not have matched the part's entity tag.",
                (("PartNumber", str(part.number)), ("ETag", part.etag)),
            )
        sizes.append(size_bytes)
    for part, size_bytes in zip(asked[:-1], sizes, strict=False):
        if size_bytes < PART_BYTES_MIN:
            raise S3Refusal(
                "EntityTooSmall",
                "Your proposed upload is smaller than the minimum allowed size",
                (
                    ("ProposedSize", str(size_bytes)),
                    ("MinSizeAllowed", str(PART_BYTES_MIN)),
                    ("PartNumber", str(part.number)),
                ),
            )
    return sizes


def _checksums(call: Call, asked: Sequence[CompletedPart], sizes: Sequence[int]) -> dict[str, str]:
    """What is said of the object's checksum and is that of its parts, by header. Raises S3Refusal: it is not."""
    said_bytes = call.request.header(b"x-amz-mp-object-size")
    if said_bytes is not None and said_bytes.strip() != str(sum(sizes)):
        raise S3Refusal(
            "InvalidRequest",
            f"The provided 'x-amz-mp-object-size' header does not match what was computed: {sum(sizes)}",
        )
    checksums: dict[str, str] = {}
    for algorithm in MAKERS:
        header = f"{PREFIX}{algorithm}"
        said = call.request.header(header.encode())
        if said is not None:
            sums = [
                PartSum(part.checksums.get(header, ""), size_bytes)
                for part, size_bytes in zip(asked, sizes, strict=True)
            ]
            check_composed(header, said, sums)
            checksums[header] = said
    return checksums
