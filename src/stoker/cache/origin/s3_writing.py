"""S3 as an origin that can be written to."""

from __future__ import annotations

import copy
import hashlib
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from stoker.cache.origin import s3_xml
from stoker.cache.origin.content import tag_of_version, version_of_tag
from stoker.cache.origin.http_calls import Answer
from stoker.cache.origin.port import Part, changed
from stoker.cache.origin.s3_calls import S3Place, conditions, fields_of
from stoker.cache.origin.s3_direct import DirectReads
from stoker.cache.origin.s3_opening import opened_s3
from stoker.cache.origin.s3_origin import S3Origin, is_folder, more_than_plain, place_of
from stoker.cache.origin.s3_uploads import S3Uploads
from stoker.cache.origin.users import OriginUser
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    PART_NUMBER_MAX,
    Attributes,
    Capabilities,
    Described,
    Upload,
    UploadPart,
    attributes_in,
    nothing,
    whole,
)
from stoker.errors import (
    BadKey,
    ConfigError,
    ObjectChanged,
    ObjectNotFound,
    OriginError,
    PreconditionFailed,
    StokerError,
    WriteDenied,
)
from stoker.wire.cache_api import ObjectInfo

MIB = 1024 * 1024
PUT_BYTES_MAX = 5 * 1024 * MIB
"""S3's limit for one request."""
_DELETED_AT_ONCE = 1000


def open_writable_s3(url: str, query: Mapping[str, str], environment: Mapping[str, str]) -> WritableS3Origin:
    """Open `s3://bucket/prefix`, as `s3_options` says. Raises ConfigError."""
    opened = opened_s3(url, query, environment)
    name = more_than_plain(opened, environment)
    if name == "secret_access_key":
        raise ConfigError(f"{url} has an access key and no secret: set AWS_SECRET_ACCESS_KEY")
    if name:
        raise ConfigError(
            f"{url} cannot be written to with {name} set: writes go straight to the server; unset it"
        )
    return WritableS3Origin(url, opened.store, opened.options.prefix, opened.direct, place_of(opened))


class WritableS3Origin(S3Origin):
    """A bucket of S3 below a prefix.

    A body of known length is one PUT, or above 5 GiB an upload in parts; one of unknown length is an upload in parts if
    it is longer than PART_BYTES. `put_bytes_max` and `part_bytes` are for tests. A process that is killed leaves such
    an upload behind, which nobody sees: `clean_up`, or a rule of the bucket's, gives it up.
    """

    def __init__(
        self,
        url: str,
        store: Any,
        prefix: str,
        direct: DirectReads | None,
        place: S3Place,
        put_bytes_max: int = PUT_BYTES_MAX,
    ) -> None:
        super().__init__(url, store, prefix, direct, place)
        self.capabilities = Capabilities(
            is_atomic=True,
            has_conditions=True,
            copies_itself=True,
            keeps_content_type=True,
            keeps_metadata=True,
            keeps_owner=False,
            part_bytes_min=5 * MIB,
        )
        self._uploads = S3Uploads(self._calls, self._prefix)
        self._put_bytes_max = put_bytes_max

    def written_as(self, user: OriginUser) -> WritableS3Origin:
        """See `HasUsers`. What is read goes on to be signed by the server's own key."""
        if user.credentials is None:
            raise WriteDenied(f"{self.url} is S3, and who writes has no key there")
        theirs = copy.copy(self)
        theirs._calls = self._calls.signed_as(user.credentials)
        theirs._uploads = S3Uploads(theirs._calls, self._prefix)
        return theirs

    async def describe(self, key: str) -> Described:
        info, headers = await self._told(key)
        return Described(info, attributes_in(headers))

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
        path = self._named_path(key)
        if is_folder(key):
            parts, size_bytes = _nothing_in(self.url, key, parts), 0
        fields = fields_of(attributes, self.url)
        terms = conditions(if_match, if_none_match)
        async with aclosing(whole(self.url, key, parts, size_bytes)) as coming:
            if size_bytes is not None and size_bytes <= self._put_bytes_max:
                answer = await self._calls.send(path, {}, {**fields, **terms}, coming, size_bytes, sha256)
                return self._as_put(key, size_bytes, answer)
            await self._uploads.put(key, coming, size_bytes, attributes, terms)
        return await self.stat(key)

    def _as_put(self, key: str, size_bytes: int, answer: Answer) -> ObjectInfo:
        version = version_of_tag(answer.headers.get("etag", ""))
        if not version:
            raise OriginError(f"{self.url} put {key!r} and told no entity tag")
        return ObjectInfo(key, size_bytes, version, headers=None)

    async def delete(self, key: str) -> None:
        try:
            path = self._named_path(key)
        except BadKey:
            return  # there is no such object
        try:
            await self._calls.call("DELETE", path, {}, {}, may_repeat=True)
        except ObjectNotFound:
            return

    async def delete_many(self, keys: Sequence[str]) -> dict[str, StokerError]:
        errors: dict[str, StokerError] = {}
        together = []
        for key in keys:
            try:
                path = self._named_path(key)
            except BadKey:
                continue  # there is no such object
            if s3_xml.can_say(path):
                together.append(path)
                continue
            try:
                await self.delete(key)
            except StokerError as error:
                errors[key] = error
        for first in range(0, len(together), _DELETED_AT_ONCE):
            await self._delete_together(together[first : first + _DELETED_AT_ONCE], errors)
        return errors

    async def _delete_together(self, paths: list[str], errors: dict[str, StokerError]) -> None:
        question = s3_xml.deletion(paths)
        digest = hashlib.md5(question, usedforsecurity=False).digest()
        fields = {"content-md5": b64encode(digest).decode(), "content-type": "application/xml"}
        answer = await self._calls.call("POST", "", {"delete": ""}, fields, question, may_repeat=True)
        for error in s3_xml.parse(answer.body).all("Error") if answer.body else ():
            path, code = error.text("Key"), error.text("Code")
            status = 403 if code == "AccessDenied" else 500
            if code != "NoSuchKey":
                errors[path.removeprefix(self._prefix)] = self._calls.refusal(
                    path, status, code, error.text("Message")
                )

    async def copy(
        self, source_key: str, key: str, version: str | None = None, *, attributes: Attributes | None = None
    ) -> ObjectInfo:
        path = self._named_path(key)
        if is_folder(key) != is_folder(source_key):
            raise BadKey(f"{source_key[:200]!r} cannot be copied to {key[:200]!r}: one of them is a folder")
        source, kept = await self.describe(source_key)
        if version is not None and source.version != version_of_tag(version):
            raise changed(self.url, source_key, version, source.version)
        if is_folder(key):
            await self.put(key, nothing(), 0, attributes=kept if attributes is None else attributes)
            return await self.stat(key)
        fields = {
            "x-amz-copy-source": quote(f"/{self._calls.bucket}/{self._prefix}{source_key}", safe="/-._~"),
            "x-amz-copy-source-if-match": tag_of_version(source.version),
        }
        try:
            if source.size_bytes > self._put_bytes_max:
                return await self._copy_in_parts(key, source, fields, attributes or kept)
            if attributes is not None:
                fields |= {"x-amz-metadata-directive": "REPLACE", **fields_of(attributes, self.url)}
            elif source_key == key:
                # S3 refuses a copy onto itself that changes nothing.
                fields |= {"x-amz-metadata-directive": "REPLACE", **fields_of(kept, self.url)}
            answer = await self._calls.call("PUT", path, {}, fields)
            s3_xml.parse(answer.body, "CopyObjectResult")
        except PreconditionFailed:
            raise ObjectChanged(f"{source_key!r} in {self.url} changed while it was copied") from None
        return await self.stat(key)

    async def _copy_in_parts(
        self, key: str, source: ObjectInfo, fields: dict[str, str], attributes: Attributes
    ) -> ObjectInfo:
        size = max(self._put_bytes_max // 5, -(-source.size_bytes // PART_NUMBER_MAX))
        async with self._uploads.begun(key, attributes, {}) as upload:
            for first in range(0, source.size_bytes, size):
                last = min(first + size, source.size_bytes) - 1
                await upload.copy(fields | {"x-amz-copy-source-range": f"bytes={first}-{last}"})
        return await self.stat(key)

    async def begin_upload(self, key: str, attributes: Attributes = NO_ATTRIBUTES) -> str:
        if is_folder(self._named_path(key)):
            raise BadKey(f"{key[:200]!r} in {self.url} is a folder, which has no content of its own")
        return await self._uploads.begin(key, attributes)

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
        async with aclosing(whole(self.url, key, parts, size_bytes)) as coming:
            return await self._uploads.put_part(key, upload_id, number, coming, size_bytes, sha256)

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
    ) -> ObjectInfo:
        await self._uploads.complete(key, upload_id, parts, conditions(if_match, if_none_match))
        return await self.stat(key)

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

    async def clean_up(self, now: float, age_s: float) -> int:
        count = 0
        after: tuple[str, str] | None = None
        while found := await self.list_uploads("", after):
            for upload in found:
                if upload.begun_at < now - age_s:
                    await self.abort_upload(upload.key, upload.upload_id)
                    count += 1
            after = found[-1][:2]
        return count


async def _nothing_in(url: str, key: str, parts: AsyncIterable[Part]) -> AsyncGenerator[Part, None]:
    """Parts that must hold nothing. Raises BadKey."""
    async for part in parts:
        if part:
            raise BadKey(f"{key[:200]!r} in {url} is a folder, which has no content of its own")
    for part in ():
        yield part
