"""The face of a server for blobs: GET, HEAD, PUT and DELETE of /blob/BUCKET/KEY, as pfio's HTTP cache has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import DELETE, READ, WRITE
from stoker.cache.blobs.keys import BlobName, parse_target
from stoker.cache.server.allowed import check_may_do_all
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.blobs.council import Council
from stoker.cache.server.blobs.handing import Handing
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.blobs.reading import BlobReading
from stoker.cache.server.blobs.writing import BlobWriting
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.heads import range_of, start_object
from stoker.cache.server.port import Answer, Request, WrongMethod, hops_of
from stoker.cache.store.known import Known
from stoker.errors import AccessDenied, ConfigError, ObjectChanged, ObjectNotFound
from stoker.wire.cache_api import MSGPACK
from stoker.wire.http import etag_of

BLOB_QUESTIONS = b"/-/blobs/"
_VERBS = {"GET": READ, "HEAD": READ, "PUT": WRITE, "DELETE": DELETE}
Serve = Callable[[Bucket, str, Request, Answer], Awaitable[None]]


class BlobFace:
    """Of one server."""

    def __init__(
        self,
        engine: Engine,
        buckets: Mapping[str, BlobBucket],
        holding: Holding,
        council: Council,
        reading: BlobReading,
        writing: BlobWriting,
        handing: Handing,
    ) -> None:
        self._engine = engine
        self._buckets = buckets
        self._holding = holding
        self._council = council
        self._reading = reading
        self._writing = writing
        self._handing = handing

    async def answer_peer(self, request: Request, answer: Answer) -> None:
        """What another server of the fleet asks. Raises AccessDenied, ObjectNotFound, ConfigError."""
        check_may_do_all(request.principal)
        try:
            said = await self._council.answer(
                request.target.removeprefix(BLOB_QUESTIONS).decode(), request.body
            )
        except ValueError as error:
            raise ConfigError(f"this is no question about blobs: {error}") from error
        body = msgspec.msgpack.encode(said)
        answer.start(200, [("Content-Type", MSGPACK)], len(body))
        answer.data(body)
        answer.finish()

    async def answer(self, request: Request, answer: Answer, serve: Serve) -> None:
        """`serve` answers with an object of a bucket that is read through. Raises what the back has answers for."""
        name = parse_target(request.target)
        bucket = self._bucket(request.principal, name.bucket)
        check_allowed(request, name)
        match request.method:
            case "GET" | "HEAD":
                await self._read(bucket, name, request, answer, serve)
            case "PUT" | "DELETE":
                await self._write(bucket, name, request, answer)
            case _:
                raise WrongMethod(request.method, tuple(_VERBS))

    def _bucket(self, principal: Principal, name: str) -> BlobBucket:
        """Raises AccessDenied, ObjectNotFound."""
        if not principal.knows(name):
            raise AccessDenied(f"{principal.name} may do nothing in the bucket {name!r}")
        found = self._buckets.get(name)
        if found is None:
            raise ObjectNotFound(f"no bucket {name!r} of blobs")
        return found

    async def _read(
        self, bucket: BlobBucket, name: BlobName, request: Request, answer: Answer, serve: Serve
    ) -> None:
        try:
            if hops_of(request) or not await self._handing.read(bucket, name, request, answer):
                await self._send(bucket, name, request, answer)
        except ObjectNotFound:
            source = None if answer.has_started or hops_of(request) else bucket.source_of(name.key)
            objects = None if source is None else self._engine.buckets.get(source[0])
            if source is None or objects is None or not request.principal.may_read(objects.name, source[1]):
                raise
            await serve(objects, source[1], request, answer)

    async def _send(self, bucket: BlobBucket, name: BlobName, request: Request, answer: Answer) -> None:
        try:
            known = await self._reading.find(bucket, name)
        except ObjectNotFound:
            bucket.misses += 1
            raise
        etag = etag_of(known.version)
        wanted = request.header(b"if-match")
        if wanted not in (None, "*", etag):
            raise ObjectChanged(f"{name.key!r} in {bucket.name!r} is another version now")
        if request.header(b"if-none-match") == etag:
            answer.start(304, [("ETag", etag)], 0)
            answer.finish()
            return
        part = range_of(request, known, etag)
        if request.method == "HEAD":
            start_object(answer, known, part)
        else:
            await self._holding.send(known, part, answer, lambda: start_object(answer, known, part))
        answer.finish()
        bucket.hits += 1
        bucket.hit_bytes += 0 if request.method == "HEAD" else _size(known, part)

    async def _write(self, bucket: BlobBucket, name: BlobName, request: Request, answer: Answer) -> None:
        size_bytes = 0 if request.parts is None else request.parts.size_bytes
        if size_bytes is None:
            answer.start(411, [], 0)
            answer.finish()
            return
        self._writing.check_size(bucket, size_bytes)
        if not hops_of(request) and await self._handing.write(bucket, name, request, size_bytes, answer):
            return
        if request.method == "DELETE":
            await self._writing.remove(bucket, name.key)
        else:
            await self._writing.put(bucket, name.key, size_bytes, parts_of(request))
        answer.start(204 if request.method == "DELETE" else 201, [], 0)
        answer.finish()


def check_allowed(request: Request, name: BlobName) -> None:
    """Raises AccessDenied."""
    verb = _VERBS.get(request.method)
    who = request.principal
    if verb is not None and not who.rules.allow(verb, name.bucket, name.key):
        raise AccessDenied(f"{who.name} may not {verb} {name.key!r} in the bucket {name.bucket!r}")


async def parts_of(request: Request) -> AsyncIterator[bytes]:
    """The body."""
    if request.parts is not None:
        async for part in request.parts:
            yield part


def _size(known: Known, part: tuple[int, int] | None) -> int:
    start, stop = part or (0, known.size_bytes)
    return stop - start
