"""Requests of S3 that are not reads, signed and sent, and what their refusals are called."""

from __future__ import annotations

import copy
import hashlib
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import NamedTuple
from urllib.parse import urlsplit

from stoker.cache.origin import s3_xml
from stoker.cache.origin.content import META as _META
from stoker.cache.origin.content import tag_of_version
from stoker.cache.origin.http_calls import Answer, HttpCalls
from stoker.cache.origin.port import OriginCounters, Part, not_found
from stoker.cache.origin.s3_signing import (
    IN_CHUNKS,
    UNSIGNED,
    ChunkSigner,
    Credentials,
    Signer,
    chunked_bytes,
)
from stoker.cache.origin.writing_port import Attributes, pieces
from stoker.errors import (
    BadKey,
    BadParts,
    NoSuchUpload,
    ObjectTooLarge,
    OriginBusy,
    OriginError,
    OriginFull,
    OriginReadOnly,
    PreconditionFailed,
    StokerError,
    WriteDenied,
    WriteRefused,
)

CHUNK_BYTES = 256 * 1024
"""Of a body as it is sent and, where the way there is plain HTTP, signed. What is no longer is signed as a whole."""
_FULL = frozenset(
    ("QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity", "XMinioAdminBucketQuotaExceeded")
)
_PARTS = frozenset(("InvalidPart", "InvalidPartOrder", "EntityTooSmall"))
_BUSY = frozenset(("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"))
_BUSY_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
_CHANGED = frozenset(("PreconditionFailed", "ConditionalRequestConflict"))


class S3Place(NamedTuple):
    """A bucket, and who asks there."""

    endpoint: str
    bucket: str
    region: str
    credentials: Credentials | None


class S3Calls:
    """To one bucket. Raises OriginError, and what a refusal is called."""

    def __init__(self, url: str, place: S3Place, counters: OriginCounters) -> None:
        parts = urlsplit(place.endpoint)
        is_tls = parts.scheme == "https"
        self.url = url
        self.bucket = place.bucket
        self._counters = counters
        self._below = f"{parts.path.rstrip('/')}/{place.bucket}"
        self._host = parts.netloc.rpartition("@")[2]
        self._region = place.region
        self._is_tls = is_tls
        self._signs_as(place.credentials)
        self._signed_as = ""
        context = ssl.create_default_context() if is_tls else None
        self._calls = HttpCalls(url, parts.hostname or "", parts.port or (443 if is_tls else 80), context)

    def _signs_as(self, credentials: Credentials | None) -> None:
        self._signer = Signer(self._host, self._region, credentials)
        self._signs_chunks = self._signer.can_sign and not self._is_tls

    def signed_as(self, credentials: Credentials) -> S3Calls:
        """The same over the same connections, signed by somebody else."""
        theirs = copy.copy(self)
        theirs._signs_as(credentials)
        theirs._signed_as = f" as {credentials.access_key_id}"
        return theirs

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        fields: Mapping[str, str],
        body: bytes = b"",
        *,
        may_repeat: bool = False,
    ) -> Answer:
        """A request with a body that is there. `path`: of the object in the bucket, empty for the bucket itself."""
        self._counters.requests += 1
        lines = {**fields, "content-length": str(len(body))}
        head, _ = self._signer.request(
            method, self._target(path), query, lines, hashlib.sha256(body).hexdigest(), _now()
        )
        answer = await self._calls.call(head + body, is_head=method == "HEAD", may_repeat=may_repeat)
        return self._checked(path, answer)

    async def send(
        self,
        path: str,
        query: Mapping[str, str],
        fields: Mapping[str, str],
        parts: AsyncGenerator[Part, None],
        size_bytes: int,
        sha256: str = "",
    ) -> Answer:
        """A PUT of a body as it comes, which is exactly so long. `sha256`: what it is said to be, which is signed then
        instead of each chunk: S3 refuses another one."""
        async with aclosing(pieces(parts, CHUNK_BYTES)) as coming:
            if size_bytes <= CHUNK_BYTES:
                data = b"".join([piece async for piece in coming])
                answer = await self.call("PUT", path, query, fields, data)
                self._counters.bytes_written += size_bytes
                return answer
            self._counters.requests += 1
            lines = {**fields, "expect": "100-continue", "content-length": str(size_bytes)}
            kind = UNSIGNED
            in_chunks = self._signs_chunks and not sha256
            if self._signs_chunks and sha256:
                kind = sha256
            elif in_chunks:
                kind = IN_CHUNKS
                lines["content-encoding"] = "aws-chunked"
                lines["x-amz-decoded-content-length"] = str(size_bytes)
                lines["content-length"] = str(chunked_bytes(size_bytes, CHUNK_BYTES))
            head, signer = self._signer.request("PUT", self._target(path), query, lines, kind, _now())
            body = self._counted(coming, signer if in_chunks else None)
            return self._checked(path, await self._calls.send(head, body))

    async def _counted(
        self, coming: AsyncGenerator[bytes, None], signer: ChunkSigner | None
    ) -> AsyncGenerator[bytes, None]:
        async for piece in coming:
            yield piece if signer is None else signer.chunk(piece)
            self._counters.bytes_written += len(piece)
        if signer is not None:
            yield signer.chunk(b"")

    def close(self) -> None:
        """End all connections."""
        self._calls.close()

    def _target(self, path: str) -> str:
        return f"{self._below}/{path}" if path else self._below

    def _checked(self, path: str, answer: Answer) -> Answer:
        """Some errors come with a good status, as the head is sent before all is done."""
        is_error = b"<Error" in answer.body[:1000]
        code, message = s3_xml.error_of(answer.body) if is_error else ("", "")
        if is_error or answer.status >= 300:
            raise self.refusal(path, answer.status, code, message)
        return answer

    def refusal(self, path: str, status: int, code: str, message: str) -> StokerError:
        """What an error of S3 is called here."""
        said = f"{self.url}{self._signed_as}: {path!r}: {status} {code} {message[:300]}".rstrip()
        if code == "NoSuchUpload":
            return NoSuchUpload(f"{said}; begin another")
        if code in _PARTS:
            return BadParts(said, code)
        if code in _CHANGED or status == 412:
            return PreconditionFailed(said)
        if code == "NoSuchBucket":
            return OriginError(f"{said}; make the bucket, or name another")
        if status == 404:
            return not_found(self.url, path)
        if code in _FULL or status == 507:
            return OriginFull(said)
        if code == "EntityTooLarge":
            return ObjectTooLarge(said)
        if code == "KeyTooLongError":
            return BadKey(said)
        if status in (401, 403):
            return WriteDenied(f"{said}; look at the keys and at what they may do in the bucket")
        if status in (405, 501):
            return OriginReadOnly(said)
        if code == "MalformedXML":
            return BadParts(said, code)
        return OriginBusy(said) if code in _BUSY or status in _BUSY_STATUS else OriginError(said)


def fields_of(attributes: Attributes, url: str) -> dict[str, str]:
    """Header lines. Raises WriteRefused for what cannot be said in one."""
    if attributes.owner is not None:
        raise OriginReadOnly(f"objects in {url} belong to no user of this machine: write without an owner")
    fields = {f"{_META}{name.lower()}": value for name, value in attributes.metadata.items()}
    fields |= attributes.headers
    if attributes.content_type:
        fields["content-type"] = attributes.content_type
    for name, value in fields.items():
        is_name = (
            name != _META
            and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
            and name.isascii()
        )
        if not is_name or not value.isascii() or not (value.isprintable() or not value):
            raise WriteRefused(f"metadata is ASCII without line ends, not {name[:80]!r}: {value[:80]!r}")
    return fields


def conditions(if_match: str | None, if_none_match: bool) -> dict[str, str]:
    """Header lines."""
    fields = {} if if_match is None else {"if-match": tag_of_version(if_match)}
    return {**fields, "if-none-match": "*"} if if_none_match else fields


def _now() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
