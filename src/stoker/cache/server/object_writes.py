"""PUT and DELETE of /BUCKET/KEY by Stoker's own protocol: see `wire/cache_writes.py`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from stoker.cache.auth.access import Access
from stoker.cache.auth.principals import UNPROVEN
from stoker.cache.auth.rules import DELETE, READ, WRITE
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.allowed import check_may
from stoker.cache.server.buckets import Bucket, writes_of
from stoker.cache.server.engine import Engine
from stoker.cache.server.port import Answer, Request, WrongMethod
from stoker.cache.server.s3.headers import conditions_of
from stoker.cache.server.s3.operation_fields import written_headers
from stoker.cache.server.s3.writing import Writing, attributes_of
from stoker.errors import (
    ConfigError,
    NotAuthenticated,
    ObjectNotFound,
    OriginReadOnly,
    PreconditionFailed,
    StokerError,
    WrongBodyLength,
    WrongChecksum,
)
from stoker.wire.cache_api import JSON, MSGPACK, ObjectInfo
from stoker.wire.cache_writes import COPY, OBJECT_METHODS, SHA256, Written, is_sha256
from stoker.wire.http import split_target

_OF_REFUSALS: dict[str, type[StokerError]] = {
    "NoSuchBucket": ObjectNotFound,
    "NoSuchKey": ObjectNotFound,
    "NotImplemented": OriginReadOnly,
    "PreconditionFailed": PreconditionFailed,
}


class LengthRequired(ConfigError):
    """Nothing says how long a body is."""


class ObjectWrites:
    """Of one engine."""

    def __init__(self, engine: Engine, access: Access, writing: Writing) -> None:
        self._engine = engine
        self._access = access
        self._writing = writing

    async def answer(self, request: Request, answer: Answer) -> None:
        """Raises AccessDenied, ObjectNotFound, WriteRefused, PreconditionFailed, OriginError, ConfigError."""
        try:
            name, key, query = split_target(request.target)
            if request.method not in ("PUT", "DELETE"):
                raise WrongMethod(request.method, OBJECT_METHODS)
            if request.principal is UNPROVEN:
                raise NotAuthenticated("it is not known who asks")
            check_may(request.principal, WRITE if request.method == "PUT" else DELETE, name, key)
            bucket = self._engine.bucket(name)
            if not key:
                raise ObjectNotFound(f"no object is named; ask for /{name}/KEY")
            if query:
                raise ConfigError(
                    f"{request.method} of an object takes no query, and this has {min(query)!r}"
                )
            if request.method == "DELETE":
                await self._remove(bucket, key, request, answer)
            elif request.header(COPY.lower().encode()) is not None:
                await self._copy(bucket, key, request, answer)
            else:
                await self._put(bucket, key, request, answer)
        except S3Refusal as refusal:
            raise _OF_REFUSALS.get(refusal.code, ConfigError)(str(refusal)) from refusal

    async def _put(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> None:
        writes = writes_of(bucket, request.principal, needs_user=self._access.writes_need_user)
        size_bytes = _announced_bytes(request)
        sha256 = (request.header(SHA256.lower().encode()) or "").strip().lower()
        if sha256 and not is_sha256(sha256):
            raise ConfigError(f"{SHA256} has 64 hexadecimal digits, not {sha256[:80]!r}")
        attributes = attributes_of(written_headers(request.headers))
        conditions = conditions_of(request.headers)
        if_match, if_none_match = await self._writing.conditions(bucket, key, conditions)
        async with aclosing(_body(request, key, size_bytes, sha256)) as parts:
            info = await writes.put(
                key,
                parts,
                size_bytes,
                attributes=attributes,
                if_match=if_match,
                if_none_match=if_none_match,
                sha256=sha256,
            )
        await self._writing.wrote(bucket, key, info, attributes)
        _reply(request, answer, info)

    async def _copy(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> None:
        _check_no_body(request)
        said = request.header(COPY.lower().encode()) or ""
        name, source, query = split_target(said.encode("latin-1"))
        check_may(request.principal, READ, name, source)
        if name != bucket.name or not source or query:
            raise ConfigError(f"{COPY} names an object of the same bucket: /{bucket.name}/KEY, not {said!r}")
        writes = writes_of(bucket, request.principal, needs_user=self._access.writes_need_user)
        await self._writing.conditions(bucket, key, conditions_of(request.headers))
        known = await self._engine.locate(bucket, source, is_refreshing=True)
        info = await writes.copy(source, key, known.version)
        await self._writing.wrote(bucket, key, info, None)
        _reply(request, answer, info)

    async def _remove(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> None:
        _check_no_body(request)
        if not conditions_of(request.headers).are_none:
            raise OriginReadOnly("objects are not removed under a condition")
        await writes_of(bucket, request.principal, needs_user=self._access.writes_need_user).delete(key)
        await self._engine.metadata.wrote(bucket, key, None)
        answer.start(204, [], 0)
        answer.finish()


def _announced_bytes(request: Request) -> int:
    """Raises LengthRequired."""
    if request.parts is None:
        if request.header(b"content-length") is not None:
            return 0
    elif request.parts.size_bytes is not None:
        return request.parts.size_bytes
    raise LengthRequired("an object is put with a Content-Length")


def _check_no_body(request: Request) -> None:
    if request.parts is not None:
        raise ConfigError("this request has no body")


async def _body(request: Request, key: str, size_bytes: int, sha256: str) -> AsyncGenerator[bytes, None]:
    """It ends only once all of it is what its sender meant. Raises WrongBodyLength, WrongChecksum."""
    made, come_bytes = hashlib.sha256(), 0
    if request.parts is not None:
        async for part in request.parts:
            come_bytes += len(part)
            if sha256:
                made.update(part)
            yield part
    if come_bytes != size_bytes:
        raise WrongBodyLength(f"{size_bytes} bytes were announced for {key!r}, and {come_bytes} came")
    if sha256 and not hmac.compare_digest(made.hexdigest(), sha256):
        raise WrongChecksum(f"what came for {key!r} has the SHA-256 {made.hexdigest()}, and not {sha256}")


def _reply(request: Request, answer: Answer, info: ObjectInfo) -> None:
    said = Written(info.size_bytes, info.version, info.modified_s)
    kind = MSGPACK if request.header(b"accept") == MSGPACK else JSON
    body = msgspec.msgpack.encode(said) if kind == MSGPACK else msgspec.json.encode(said)
    answer.start(200, [("Content-Type", kind)], len(body))
    answer.data(body)
    answer.finish()
