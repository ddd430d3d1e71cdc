"""Uploads in parts at S3, where they are the storage's own.

A part that is put by us is in memory until the storage has it, and is put again while the storage is busy: an upload of
many GB does not fail for one request of a thousand.
"""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from urllib.parse import unquote

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.cache.origin import s3_xml
from stoker.cache.origin.port import Part
from stoker.cache.origin.s3_calls import S3Calls, fields_of
from stoker.cache.origin.staged_uploads import check_number, check_order
from stoker.cache.origin.writing_port import PART_NUMBER_MAX, Attributes, Upload, UploadPart
from stoker.errors import NoSuchUpload, ObjectTooLarge, OriginBusy, OriginError
from stoker.wire.http import KEY_BYTES_MAX

log = logging.getLogger("stoker.cache")
PART_BYTES = 8 * 1024 * 1024
"""Of a body whose length is not known: so much of it is in memory, and more of one that turns out long."""
_PARTS_OF_A_SIZE = 2000
"""After so many parts they are twice as large: 10000 of them have room for 496 GiB."""
_KNOWN_PART_BYTES = 32 * 1024 * 1024
_TRIES_MAX = 6
_FIRST_PAUSE_S, _PAUSE_S_MAX = 0.5, 8.0
"""Eight seconds in all, on average."""
_ID = re.compile(r"[A-Za-z0-9._~=+-]{1,1024}")
_GIVE_UP_S = 10.0
_PAGE = 1000


class S3Uploads:
    """Below a prefix of a bucket."""

    def __init__(self, calls: S3Calls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix

    async def put(
        self,
        key: str,
        coming: AsyncGenerator[Part, None],
        size_bytes: int | None,
        attributes: Attributes,
        terms: Mapping[str, str],
    ) -> None:
        """A body that has ended well when it ends, as an upload, or as one PUT if it turns out to be short."""
        cutter = _Cutter(coming)
        if size_bytes is not None:
            size = max(_KNOWN_PART_BYTES, -(-size_bytes // PART_NUMBER_MAX))
            async with self.begun(key, attributes, terms) as upload:
                for first in range(0, size_bytes, size):
                    await upload.put(await cutter.taken(min(size, size_bytes - first)))
            return
        data = await cutter.taken(PART_BYTES)
        if len(data) < PART_BYTES:
            fields = {**fields_of(attributes, self._calls.url), **terms}
            await self._calls.send(self._prefix + key, {}, fields, _one(data), len(data))
            return
        async with self.begun(key, attributes, terms) as upload:
            while data:
                await upload.put(data)
                data = await cutter.taken(PART_BYTES << (len(upload.parts) // _PARTS_OF_A_SIZE))

    @asynccontextmanager
    async def begun(
        self, key: str, attributes: Attributes, terms: Mapping[str, str]
    ) -> AsyncIterator[UploadAtWork]:
        """A new upload, which is completed in the end, or given up if anything fails meanwhile."""
        upload_id = await self.begin(key, attributes)
        upload = UploadAtWork(self, key, upload_id)
        try:
            yield upload
            await self.complete(key, upload_id, upload.parts, terms)
        except BaseException:
            # Whatever becomes of that: why it is given up is better said than that this fails as well.
            giving_up = asyncio.ensure_future(self.abort(key, upload_id))
            await asyncio.wait([giving_up], timeout=_GIVE_UP_S)
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
            raise

    async def begin(self, key: str, attributes: Attributes) -> str:
        """The id of a new upload."""
        fields = fields_of(attributes, self._calls.url)
        answer = await self._calls.call("POST", self._prefix + key, {"uploads": ""}, fields)
        upload_id = s3_xml.parse(answer.body).text("UploadId")
        if not upload_id:
            raise OriginError(f"{self._calls.url} began an upload of {key!r} without an id")
        return upload_id

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        parts: AsyncGenerator[Part, None],
        size_bytes: int,
        sha256: str = "",
    ) -> str:
        """The part's entity tag. The parts have ended well when they end. `sha256`: as `S3Calls.send` has it."""
        check_number(number)
        query = {"partNumber": str(number), "uploadId": self._checked(key, upload_id)}
        answer = await self._calls.send(self._prefix + key, query, {}, parts, size_bytes, sha256)
        return self._tag(key, answer.headers.get("etag", ""))

    async def copy_part(self, key: str, upload_id: str, number: int, fields: Mapping[str, str]) -> str:
        """A part that is another object's, as the header lines say: its entity tag."""
        query = {"partNumber": str(number), "uploadId": self._checked(key, upload_id)}
        answer = await self._calls.call("PUT", self._prefix + key, query, fields)
        return self._tag(key, s3_xml.parse(answer.body).text("ETag"))

    async def complete(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], terms: Mapping[str, str]
    ) -> None:
        """Put the parts together. `terms`: header lines."""
        query = {"uploadId": self._checked(key, upload_id)}
        check_order(parts)
        fields = {"content-type": "application/xml", **terms}
        answer = await self._calls.call("POST", self._prefix + key, query, fields, s3_xml.completion(parts))
        s3_xml.parse(answer.body, "CompleteMultipartUploadResult")

    async def abort(self, key: str, upload_id: str) -> None:
        """Give up the parts."""
        query = {"uploadId": self._checked(key, upload_id)}
        await self._calls.call("DELETE", self._prefix + key, query, {}, may_repeat=True)

    async def list_parts(self, key: str, upload_id: str, after: int, limit: int) -> list[UploadPart]:
        """By number. Some servers list a part that was put again each time: the last one counts."""
        found: dict[int, UploadPart] = {}
        query = {"uploadId": self._checked(key, upload_id)}
        while len(found) < limit:
            query |= {"part-number-marker": str(after), "max-parts": str(_PAGE)}
            answer = await self._calls.call("GET", self._prefix + key, query, {}, may_repeat=True)
            page = s3_xml.parse(answer.body)
            for part in page.all("Part"):
                after = s3_xml.number_of(part.text("PartNumber"))
                written_at = s3_xml.seconds_of(part.text("LastModified"))
                size_bytes = s3_xml.number_of(part.text("Size"))
                before = found.get(after)
                if before is None or before.written_at <= written_at:
                    found[after] = UploadPart(after, part.text("ETag"), size_bytes, written_at)
            if page.text("IsTruncated") != "true" or not page.all("Part"):
                break
        return [found[number] for number in sorted(found)][:limit]

    async def list_uploads(self, prefix: str, after: tuple[str, str] | None, limit: int) -> list[Upload]:
        """By key and id, for which all are asked for: not all servers list them in order."""
        found: list[Upload] = []
        query = {
            "uploads": "",
            "prefix": self._prefix + prefix,
            "encoding-type": "url",
            "max-uploads": str(_PAGE),
        }
        while True:
            page = s3_xml.parse((await self._calls.call("GET", "", query, {}, may_repeat=True)).body)
            decode = unquote if page.text("EncodingType") == "url" else str
            for upload in page.all("Upload"):
                key = decode(upload.text("Key"))
                if key.startswith(self._prefix + prefix):
                    began = s3_xml.seconds_of(upload.text("Initiated"))
                    found.append(Upload(key.removeprefix(self._prefix), upload.text("UploadId"), began))
            if page.text("IsTruncated") != "true" or not page.all("Upload"):
                break
            query |= {
                "key-marker": decode(page.text("NextKeyMarker")),
                "upload-id-marker": page.text("NextUploadIdMarker"),
            }
        return sorted(upload for upload in found if after is None or upload[:2] > after)[:limit]

    def _checked(self, key: str, upload_id: str) -> str:
        """Raises NoSuchUpload for what is none: an empty one would make another request of it."""
        if not _ID.fullmatch(upload_id) or len(key.encode("utf-8", "replace")) > KEY_BYTES_MAX:
            raise NoSuchUpload(
                f"{self._calls.url} has no upload {upload_id[:64]!r} of {key[:200]!r}: begin another"
            )
        return upload_id

    def _tag(self, key: str, tag: str) -> str:
        if not tag:
            raise OriginError(f"{self._calls.url} told no entity tag of a part of {key!r}")
        return tag


class UploadAtWork:
    """An upload whose parts are put one after the other."""

    def __init__(self, uploads: S3Uploads, key: str, upload_id: str) -> None:
        self._uploads = uploads
        self._key = key
        self._upload_id = upload_id
        self._rng = Rng(zlib.crc32(upload_id.encode()))
        self.parts: list[tuple[int, str]] = []

    async def put(self, data: bytes) -> None:
        """The next part."""
        uploads, key, upload_id, number = self._uploads, self._key, self._upload_id, self._next()
        tag = await self._again(lambda: uploads.put_part(key, upload_id, number, _one(data), len(data)))
        self.parts.append((number, tag))

    async def copy(self, fields: Mapping[str, str]) -> None:
        """The next part, from another object."""
        uploads, key, upload_id, number = self._uploads, self._key, self._upload_id, self._next()
        tag = await self._again(lambda: uploads.copy_part(key, upload_id, number, fields))
        self.parts.append((number, tag))

    async def _again(self, put: Callable[[], Awaitable[str]]) -> str:
        """While the storage is busy. A part that is put twice is there once."""
        for attempt in range(1, _TRIES_MAX):
            try:
                return await put()
            except OriginBusy as error:
                pause_s = backoff_s(attempt, self._rng, first_s=_FIRST_PAUSE_S, limit_s=_PAUSE_S_MAX)
                log.info("a part of %r is put again in %.1f s: %s", self._key, pause_s, error)
                await asyncio.sleep(pause_s)
        return await put()

    def _next(self) -> int:
        if len(self.parts) == PART_NUMBER_MAX:
            raise ObjectTooLarge(
                f"{self._key!r} is too long for an upload of unknown length: announce its length"
            )
        return len(self.parts) + 1


class _Cutter:
    """Takes a body in pieces of given lengths."""

    def __init__(self, coming: AsyncGenerator[Part, None]) -> None:
        self._coming = coming
        self._waiting: Part = b""

    async def take(self, size_bytes: int) -> AsyncGenerator[Part, None]:
        """So many bytes, or what is left."""
        while size_bytes:
            part = self._waiting or await anext(self._coming, b"")
            if not part:
                return
            self._waiting = part[size_bytes:]
            part = part[:size_bytes]
            size_bytes -= len(part)
            yield part

    async def taken(self, size_bytes: int) -> bytes:
        """The same as a whole."""
        async with aclosing(self.take(size_bytes)) as parts:
            return b"".join([part async for part in parts])


async def _one(data: bytes) -> AsyncGenerator[bytes, None]:
    if data:
        yield data
