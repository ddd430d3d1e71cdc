"""Uploads in parts where the storage has none: the parts lie beside the objects, in files that nobody sees, and are put
together in the end."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec

from stoker.cache.origin.port import Part
from stoker.cache.origin.writing_port import PART_NUMBER_MAX, Attributes, Upload, UploadPart, whole
from stoker.errors import BadParts, NoSuchUpload, ObjectNotFound, OriginError
from stoker.wire.cache_api import ObjectInfo

_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"(\d{5})-([0-9a-f]{32})")
_HEAD = "head"
_HASHED_IN_PLACE_BYTES = 16 * 1024


class Staged(NamedTuple):
    """A file that nobody sees; `written_at` in seconds since 1970."""

    name: str
    size_bytes: int
    written_at: float


class Staging(Protocol):
    """Folders of files that nobody sees. Every method raises OriginError and WriteRefused."""

    async def write(self, folder: str, name: Callable[[], str], parts: AsyncIterable[Part]) -> None:
        """A file as a whole, which outlives this process, or none. `name` is asked for once all parts have come."""
        ...

    def read(self, folder: str, name: str) -> AsyncGenerator[Part, None]:
        """All of a file. Raises ObjectNotFound."""
        ...

    async def files(self, folder: str) -> list[Staged]:
        """What is in a folder, without what is being written; nothing where there is no folder."""
        ...

    async def folders(self) -> list[str]:
        """All folders."""
        ...

    async def remove(self, folder: str) -> None:
        """A folder with what is in it. That there is none is no error."""
        ...


class _Head(msgspec.Struct, frozen=True):
    key: str
    attributes: Attributes
    begun_at: float


Put = Callable[[str, AsyncIterable[Part], int, Attributes, str | None, bool], Awaitable[ObjectInfo]]


class StagedUploads:
    """The part of `WritableOrigin` that is about uploads. `put` is called with key, parts, size in bytes, attributes,
    `if_match` and `if_none_match`; `wall` tells seconds since 1970."""

    def __init__(self, url: str, staging: Staging, put: Put, wall: Callable[[], float]) -> None:
        self._url = url
        self._staging = staging
        self._put = put
        self._wall = wall

    async def begin(self, key: str, attributes: Attributes) -> str:
        """The id of a new upload."""
        upload_id = secrets.token_hex(16)
        head = msgspec.json.encode(_Head(key, attributes, self._wall()))
        await self._staging.write(upload_id, lambda: _HEAD, _one(head))
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, parts: AsyncIterable[Part], size_bytes: int
    ) -> str:
        """The part's entity tag: the MD5 of its content, as S3 has it."""
        check_number(number)
        await self._head(key, upload_id)
        digest = hashlib.md5(usedforsecurity=False)

        async def hashed() -> AsyncGenerator[Part, None]:
            async with aclosing(whole(self._url, key, parts, size_bytes)) as coming:
                async for part in coming:
                    if len(part) > _HASHED_IN_PLACE_BYTES:
                        await asyncio.to_thread(digest.update, part)
                    else:
                        digest.update(part)
                    yield part

        async with aclosing(hashed()) as coming:
            await self._staging.write(upload_id, lambda: f"{number:05d}-{digest.hexdigest()}", coming)
        return f'"{digest.hexdigest()}"'

    async def complete(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        if_match: str | None,
        if_none_match: bool,
    ) -> ObjectInfo:
        """Put the parts together. Raises NoSuchUpload, BadParts."""
        head = await self._head(key, upload_id)
        check_order(parts)
        there = {part.number: part for part in await self._parts(upload_id)}
        names, size_bytes = [], 0
        for number, etag in parts:
            found = there.get(number)
            if found is None or found.etag.strip('"') != etag.strip('"'):
                raise BadParts(f"part {number} of {key!r} is not there with the tag {etag}", "InvalidPart")
            names.append(f"{number:05d}-{found.etag.strip(chr(34))}")
            size_bytes += found.size_bytes

        async def joined() -> AsyncGenerator[Part, None]:
            try:
                for name in names:
                    async with aclosing(self._staging.read(upload_id, name)) as file:
                        async for part in file:
                            yield part
            except ObjectNotFound:
                raise NoSuchUpload(
                    f"upload {upload_id} of {key!r} was ended while it was completed"
                ) from None

        async with aclosing(joined()) as content:
            info = await self._put(key, content, size_bytes, head.attributes, if_match, if_none_match)
        await self._staging.remove(upload_id)
        return info

    async def abort(self, key: str, upload_id: str) -> None:
        """Give up the parts. Raises NoSuchUpload."""
        await self._head(key, upload_id)
        await self._staging.remove(upload_id)

    async def list_parts(self, key: str, upload_id: str, after: int, limit: int) -> list[UploadPart]:
        """By number. Raises NoSuchUpload."""
        await self._head(key, upload_id)
        return [part for part in await self._parts(upload_id) if part.number > after][:limit]

    async def list_uploads(self, prefix: str, after: tuple[str, str] | None, limit: int) -> list[Upload]:
        """By key and id."""
        found = []
        for upload_id in await self._staging.folders():
            head = await self._read_head(upload_id)
            if head is not None and head.key.startswith(prefix):
                found.append(Upload(head.key, upload_id, head.begun_at))
        return sorted(upload for upload in found if after is None or upload[:2] > after)[:limit]

    async def clean_up(self, now: float, age_s: float) -> int:
        """Give up those of which nothing was written for so long."""
        count = 0
        for upload_id in await self._staging.folders():
            files = await self._staging.files(upload_id)
            if max((file.written_at for file in files), default=0.0) < now - age_s:
                await self._staging.remove(upload_id)
                count += 1
        return count

    async def _head(self, key: str, upload_id: str) -> _Head:
        head = await self._read_head(upload_id) if _ID.fullmatch(upload_id) else None
        if head is None or head.key != key:
            raise NoSuchUpload(f"{self._url} has no upload {upload_id[:64]!r} of {key!r}: begin another")
        return head

    async def _read_head(self, upload_id: str) -> _Head | None:
        """None where there is none, also of an upload that was ended meanwhile."""
        if _HEAD not in [file.name for file in await self._staging.files(upload_id)]:
            return None
        try:
            async with aclosing(self._staging.read(upload_id, _HEAD)) as file:
                text = b"".join([part async for part in file])
        except ObjectNotFound:
            return None
        try:
            return msgspec.json.decode(text, type=_Head)
        except ValueError as error:
            raise OriginError(f"what {self._url} has of upload {upload_id} cannot be read: {error}") from None

    async def _parts(self, upload_id: str) -> list[UploadPart]:
        """By number; of those that were put several times the last."""
        found: dict[int, UploadPart] = {}
        for file in sorted(await self._staging.files(upload_id), key=lambda file: file.written_at):
            name = _PART.fullmatch(file.name)
            if name is not None:
                number = int(name[1])
                found[number] = UploadPart(number, f'"{name[2]}"', file.size_bytes, file.written_at)
        return [found[number] for number in sorted(found)]


def check_number(number: int) -> None:
    """Raises BadParts if a part cannot have it."""
    if not 1 <= number <= PART_NUMBER_MAX:
        raise BadParts(f"a part has a number from 1 to {PART_NUMBER_MAX}, not {number}", "InvalidArgument")


def check_order(parts: Sequence[tuple[int, str]]) -> None:
    """Raises BadParts if these cannot be put together."""
    numbers = [number for number, _ in parts]
    if not numbers:
        raise BadParts("an upload has at least one part", "MalformedXML")
    for number in numbers:
        check_number(number)
    if any(second <= first for first, second in pairwise(numbers)):
        raise BadParts(f"parts are named in rising order, not {numbers[:20]}", "InvalidPartOrder")


async def _one(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data
