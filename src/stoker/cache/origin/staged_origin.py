"""The part of `WritableOrigin` that is the same wherever uploads in parts are staged."""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from typing import Any

from stoker.cache.origin.port import Part
from stoker.cache.origin.staged_uploads import StagedUploads
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    Attributes,
    Upload,
    UploadPart,
    check_writable_key,
    copied,
    deleted,
)
from stoker.errors import StokerError
from stoker.wire.cache_api import ObjectInfo


class StagedOrigin:
    """Mixed into an origin that has `url`, `_put`, `delete`, and `_uploads`."""

    url: str
    _uploads: StagedUploads

    async def put(
        self: Any,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None = None,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        if_match: str | None = None,
        if_none_match: bool = False,
        sha256: str = "",
    ) -> ObjectInfo:
        info: ObjectInfo = await self._put(key, parts, size_bytes, attributes, if_match, if_none_match)
        return info

    async def delete_many(self: Any, keys: Sequence[str]) -> dict[str, StokerError]:
        return await deleted(self, keys)

    async def copy(
        self: Any,
        source_key: str,
        key: str,
        version: str | None = None,
        *,
        attributes: Attributes | None = None,
    ) -> ObjectInfo:
        return await copied(self, source_key, key, version, attributes)

    async def begin_upload(self, key: str, attributes: Attributes = NO_ATTRIBUTES) -> str:
        return await self._uploads.begin(check_writable_key(self.url, key), attributes)

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
        return await self._uploads.put_part(key, upload_id, number, parts, size_bytes)

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
    ) -> ObjectInfo:
        return await self._uploads.complete(key, upload_id, parts, if_match, if_none_match)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._uploads.abort(key, upload_id)

    async def list_parts(
        self, key: str, upload_id: str, after: int = 0, limit: int = 1000
    ) -> list[UploadPart]:
        return await self._uploads.list_parts(key, upload_id, after, limit)

    async def list_uploads(
        self, prefix: str = "", after: tuple[str, str] | None = None, limit: int = 1000
    ) -> list[Upload]:
        return await self._uploads.list_uploads(prefix, after, limit)
