"""The back: misses, metadata, administration and errors."""

from __future__ import annotations

import msgspec

from stoker.base.ranges import UnsatisfiableRange
from stoker.cache.auth.principals import UNPROVEN
from stoker.cache.blobs.keys import PREFIX as BLOBS
from stoker.cache.server.admin import Admin
from stoker.cache.server.allowed import check_may_read
from stoker.cache.server.batch import BatchReader
from stoker.cache.server.blobs.face import BLOB_QUESTIONS, BlobFace
from stoker.cache.server.blobs.holding import NoRoom
from stoker.cache.server.buckets import Bucket, check_origin
from stoker.cache.server.doorkeeper import Doorkeeper
from stoker.cache.server.engine import Engine
from stoker.cache.server.heads import range_of, start_object
from stoker.cache.server.inquiry import current_id, speaks
from stoker.cache.server.links import Links
from stoker.cache.server.object_writes import LengthRequired, ObjectWrites
from stoker.cache.server.objects import Objects
from stoker.cache.server.observing import FOR_ALL
from stoker.cache.server.port import Answer, Request, WrongMethod, hops_of, is_refreshing, origin_of
from stoker.cache.server.s3.face import S3Face
from stoker.cache.server.watch import S3
from stoker.cache.server.whole_files import WHOLE, WholeFiles
from stoker.errors import (
    NotAuthenticated,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    StokerError,
    WireError,
)
from stoker.wire.cache_api import JSON, OWN_PREFIX
from stoker.wire.cache_errors import ERROR_CODES, ErrorBody, code_of
from stoker.wire.http import etag_of, split_target, version_of

OWN_BODY_BYTES_MAX = 16 * 1024 * 1024
"""Of a request to one of Stoker's own routes; the front holds to the same."""


class CacheBack:
    """Answers for one engine."""

    def __init__(
        self,
        engine: Engine,
        admin: Admin,
        objects: Objects,
        s3: S3Face,
        blobs: BlobFace,
        doorkeeper: Doorkeeper,
        links: Links,
    ) -> None:
        self._engine = engine
        self._admin = admin
        self._batch = BatchReader(engine)
        self._whole = WholeFiles(engine)
        self._objects = objects
        self._s3 = s3
        self._doorkeeper = doorkeeper
        self._blobs = blobs
        self._links = links
        self._writes = ObjectWrites(engine, doorkeeper.access, s3.writing)

    async def stop(self) -> None:
        """Give up what nobody waits for."""
        await self._whole.stop()

    async def answer(self, request: Request, answer: Answer) -> None:
        try:
            if self._links.is_for(request):
                opened, sealed = self._links.opened(request, answer)
                request.principal = opened.principal  # for who counts and writes down
                await self._object(opened, sealed)
                return
            await self._identify(request, answer)
            if request.target.startswith(OWN_PREFIX.encode()):
                await self._own(request, answer)
            elif request.target.startswith(BLOBS) and not self._s3.is_virtual(request):
                await self._blobs.answer(request, answer, self.serve)
            elif (head := self._s3.head_of(request)) is not None:
                speaks(S3)
                await self._s3.answer(request, head, answer)
            else:
                await self._object(request, answer)
        except UnsatisfiableRange as error:
            # What there is, RFC 9110, section 15.5.17.
            self._error(answer, "range", str(error), ("Content-Range", f"bytes */{error.size_bytes}"))
        except WrongMethod as error:
            self._error(answer, "method", str(error), ("Allow", error.allowed))
        except LengthRequired as error:
            self._error(answer, "length", str(error))
        except NoRoom as error:
            self._error(answer, "no_room", str(error))
        except (StokerError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if answer.has_started:
                raise ConnectionAbortedError(str(error)) from error
            code = code_of(error) if isinstance(error, StokerError) else "bad_request"
            self._error(answer, code, str(error))

    async def _identify(self, request: Request, answer: Answer) -> None:
        """Whose a bearer token or a certificate is that the front does not know. Raises NotAuthenticated,
        EnvironmentProblem."""
        if request.principal is not UNPROVEN or request.target.partition(b"?")[0] in FOR_ALL:
            return
        scheme, _, token = (request.header(b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and self._doorkeeper.has_reviewers:
            request.principal = await self._doorkeeper.identify(token.strip())
        elif not scheme and request.certificate and not self._s3.is_signed(request):
            request.principal = self._doorkeeper.identify_certificate(request.certificate)
        else:
            return
        answer.charge(request.principal)

    async def _own(self, request: Request, answer: Answer) -> None:
        if request.parts is not None:
            # It was not known who asks when the head came, so that the body was left where it was.
            if request.principal is UNPROVEN:
                raise NotAuthenticated("it is not known who asks")
            try:
                request.body = await request.parts.all(OWN_BODY_BYTES_MAX)
            except WireError as error:
                raise ObjectTooLarge(str(error)) from error
        if request.target == b"/-/read":
            if request.method != "POST":
                raise WrongMethod(request.method, ("POST",))
            await self._batch.answer(request, answer)
        elif request.target.startswith(WHOLE):
            await self._whole.answer(request, answer)
        elif request.target.startswith(BLOB_QUESTIONS):
            await self._blobs.answer_peer(request, answer)
        else:
            await self._admin.answer(request, answer)

    async def _object(self, request: Request, answer: Answer) -> None:
        if request.method not in ("GET", "HEAD"):
            await self._writes.answer(request, answer)
            return
        name, key, _ = split_target(request.target)
        check_may_read(request.principal, name, [key])
        bucket = self._engine.bucket(name)
        check_origin(bucket, origin_of(request))
        if not key:
            raise ObjectNotFound(f"no object is named; ask for /{name}/KEY")
        await self.serve(bucket, key, request, answer)

    async def serve(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> None:
        """Answer with an object. Raises what fetching it raises."""
        for _ in range(2):
            # If the object changed before a byte was sent: once more, at the version that is there now.
            if await self._try_object(bucket, key, request, answer):
                return
        raise ObjectChanged(f"{key!r} in {bucket.name!r} keeps changing")

    async def _try_object(self, bucket: Bucket, key: str, request: Request, answer: Answer) -> bool:
        """False if the object changed and another try may help."""
        hops = hops_of(request)
        known = await self._engine.locate(
            bucket, key, hops, is_refreshing=is_refreshing(request), begins=_begins(request)
        )
        wanted = request.header(b"if-match")
        if wanted is not None and wanted.strip() != "*" and version_of(wanted) != known.version:
            # Who asks knows another version, perhaps a newer one: what is known here may be stale.
            known = await self._engine.locate(bucket, key, hops, is_refreshing=True)
        if wanted is not None and wanted.strip() != "*" and version_of(wanted) != known.version:
            raise ObjectChanged(f"{key!r} in {bucket.name!r} is another version now")
        etag = etag_of(known.version)
        if request.header(b"if-none-match") == etag:
            answer.start(304, [("ETag", etag)], 0)
            answer.finish()
            return True
        part = range_of(request, known, etag)
        if request.method == "HEAD":
            start_object(answer, known, part)
            answer.finish()
            return True
        try:
            await self._objects.send(
                bucket, known, part, answer, lambda: start_object(answer, known, part), hops
            )
        except ObjectChanged:
            if answer.has_started or wanted is not None:
                raise
            return False
        return True

    def _error(self, answer: Answer, code: str, message: str, *headers: tuple[str, str]) -> None:
        body = msgspec.json.encode(ErrorBody(code, message, current_id()))
        answer.start(ERROR_CODES[code].status, [("Content-Type", JSON), *headers], len(body))
        answer.data(body)
        answer.finish()


def _begins(request: Request) -> bool:
    """Whether the first byte of the object is wanted."""
    conditions = request.header(b"if-none-match"), request.header(b"if-match")
    if request.method != "GET" or conditions != (None, None):
        return False
    return (request.header(b"range") or "bytes=0-").replace(" ", "").startswith("bytes=0-")
