"""A bucket of another fleet that is written to, by its servers, through to its origin: see `wire/cache_writes.py`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from stoker.cache.origin.fleet_origin import FleetOrigin, OriginAway
from stoker.cache.origin.http_calls import Answer
from stoker.cache.origin.port import Part, changed
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    Attributes,
    Capabilities,
    Described,
    Upload,
    UploadPart,
    attributes_in,
    copied,
    deleted,
    whole,
)
from stoker.errors import (
    AccessDenied,
    NoSuchUpload,
    ObjectChanged,
    ObjectNotFound,
    OriginError,
    OriginReadOnly,
    StokerError,
    WriteDenied,
    WriteRefused,
)
from stoker.wire.cache_api import ObjectInfo
from stoker.wire.cache_errors import failure_of
from stoker.wire.cache_writes import COPY, SHA256, Written
from stoker.wire.http import etag_of, object_target


class WritableFleetOrigin(FleetOrigin):
    """Its servers say who may write, and what its origin can keep. Uploads in parts are for its own S3 clients."""

    capabilities = Capabilities(
        is_atomic=True,
        has_conditions=True,
        copies_itself=True,
        keeps_content_type=True,
        keeps_metadata=False,
        keeps_owner=False,
    )

    async def describe(self, key: str) -> Described:
        info = await self.stat(key)
        return Described(info, attributes_in(dict(info.headers or ())))

    async def put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None = None,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        if_match: str | None = None,
        if_none_match: bool = False,
        sha256: str = "",
    ) -> ObjectInfo:
        if size_bytes is None:
            raise OriginReadOnly(f"{self.url} is told the length of what is written before it comes")
        if attributes.owner is not None:
            raise OriginReadOnly(f"objects in {self.url} cannot be given to an owner: write without one")
        fields = {
            "Content-Length": str(size_bytes),
            **({"Content-Type": attributes.content_type} if attributes.content_type else {}),
            **attributes.headers,
            **({"If-Match": etag_of(if_match)} if if_match is not None else {}),
            **({"If-None-Match": "*"} if if_none_match else {}),
            **({SHA256: sha256} if sha256 else {}),
        }
        async with aclosing(whole(self.url, key, parts, size_bytes)) as coming:
            body = coming if size_bytes else None
            if body is None:
                async for _ in coming:
                    pass  # there is none, which is only certain once it has ended well
            info = self._told(key, await self._write("PUT", key, fields, body))
        self.counters.bytes_written += size_bytes
        return info

    async def delete(self, key: str) -> None:
        await self._write("DELETE", key, {})

    async def delete_many(self, keys: Sequence[str]) -> dict[str, StokerError]:
        return await deleted(self, keys)

    async def copy(
        self, source_key: str, key: str, version: str | None = None, *, attributes: Attributes | None = None
    ) -> ObjectInfo:
        if attributes is not None:
            return await copied(self, source_key, key, version, attributes)
        found = await self.stat(source_key)
        if version is not None and found.version != version:
            raise changed(self.url, source_key, version, found.version)
        fields = {COPY: object_target(self._bucket, self._prefix + source_key), "Content-Length": "0"}
        return self._told(key, await self._write("PUT", key, fields))

    async def begin_upload(self, key: str, attributes: Attributes = NO_ATTRIBUTES) -> str:
        raise OriginReadOnly(f"{self.url} takes uploads in parts from its own S3 clients: begin them there")

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        parts: AsyncIterable[Part],
        size_bytes: int,
        *,
        sha256: str = "",
    ) -> str:
        raise self._no_upload(upload_id)

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
    ) -> ObjectInfo:
        raise self._no_upload(upload_id)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        raise self._no_upload(upload_id)

    async def list_parts(
        self, key: str, upload_id: str, after: int = 0, limit: int = 1000
    ) -> list[UploadPart]:
        raise self._no_upload(upload_id)

    async def list_uploads(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = 1000
    ) -> list[Upload]:
        return []

    async def clean_up(self, now: float, age_s: float) -> int:
        return 0

    def _no_upload(self, upload_id: str) -> NoSuchUpload:
        return NoSuchUpload(f"{self.url} has no upload {upload_id[:80]!r}: none is begun there from here")

    async def _write(
        self, method: str, key: str, fields: Mapping[str, str], body: AsyncIterable[Part] | None = None
    ) -> Answer:
        await self._check_sites()
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        target = object_target(self._bucket, self._prefix + key)
        answer = await self._servers.write(method, target, lines + self._mark(), self._count, body)
        if answer.status in (200, 204):
            return answer
        error = failure_of(answer.status, answer.body)
        if isinstance(error, WriteRefused | ObjectChanged):
            raise error
        if isinstance(error, ObjectNotFound):
            raise ObjectNotFound(f"{self.url}: {error}") from error
        if isinstance(error, AccessDenied):
            raise WriteDenied(f"{self.url} does not let {self._servers.shown} write this: {error}") from error
        raise OriginAway(f"{self.url}: {error}") from error

    def _told(self, key: str, answer: Answer) -> ObjectInfo:
        try:
            written = msgspec.msgpack.decode(answer.body, type=Written)
        except ValueError as error:
            raise OriginError(f"{self.url} answers nonsense: {error}") from error
        return ObjectInfo(key, written.size_bytes, written.version, written.modified_s, None)
