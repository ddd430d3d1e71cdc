"""One request of the S3 dialect while it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from stoker.cache.auth.principals import Principal
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_body import Body
from stoker.cache.origin.guarded_writes import GuardedWrites
from stoker.cache.server.body import BodyParts
from stoker.cache.server.buckets import Bucket, writes_of
from stoker.cache.server.engine import Engine
from stoker.cache.server.port import Answer, Request, hops_of
from stoker.cache.server.s3.errors import answer_headers, no_such_bucket

Headers = list[tuple[str, str]]
SILENCE_S = 30.0
"""Who sends nothing of a body for so long is answered; the front, which cannot do that, waits for longer."""


class Call:
    """`body`: how the body is read, and whether it is what its sender meant. `needs_user`: who writes must be somebody
    at the origin."""

    def __init__(
        self,
        request: Request,
        answer: Answer,
        principal: Principal,
        body: Body,
        request_id: str,
        host_id: str,
        *,
        needs_user: bool = False,
    ) -> None:
        self.request = request
        self.answer = answer
        self.principal = principal
        self.hops = hops_of(request)
        self.verified: list[tuple[str, str]] = []
        """Checksums that the body was verified by, to be said again; once it has come."""
        self._body = body
        self._needs_user = needs_user
        self._ids = answer_headers(request_id, host_id)

    def bucket(self, engine: Engine, name: str) -> Bucket:
        """Raises S3Refusal."""
        found = engine.buckets.get(name)
        if found is None:
            raise no_such_bucket(name)
        return found

    def writable(self, engine: Engine, name: str) -> Bucket:
        """A bucket that is written through. Raises S3Refusal, OriginReadOnly, WriteDenied."""
        bucket = self.bucket(engine, name)
        self.writes(bucket)
        return bucket

    def writes(self, bucket: Bucket) -> GuardedWrites:
        """What writes there as whom who asks is at its origin, or as the server itself. Raises OriginReadOnly,
        WriteDenied."""
        return writes_of(bucket, self.principal, needs_user=self._needs_user)

    @property
    def sha256(self) -> str:
        """Of the data that comes, as its sender says; empty: nothing is said."""
        return self._body.sha256

    def announced_bytes(self) -> int | None:
        """Of the data that comes; None: nobody knows. Raises S3Refusal where nothing says whether any comes."""
        if self.request.parts is not None:
            return self._body.size_bytes
        if self.request.header(b"content-length") is None:
            raise S3Refusal("MissingContentLength", "You must provide the Content-Length HTTP header.")
        return 0

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The data of the body as it comes; it ends only once all of it is what its sender meant. Raises S3Refusal."""
        coming = self.request.parts
        if coming is not None:
            async for raw in _in_time(coming):
                for part in self._body.feed(raw):
                    yield part
                if self._body.is_done and coming.size_bytes not in (None, coming.received_bytes):
                    # Who has sent it all waits for an answer, and not for us to have more.
                    raise S3Refusal(
                        "IncompleteBody",
                        f"The body ended after {coming.received_bytes} of the {coming.size_bytes} bytes that "
                        "Content-Length says",
                    )
        self.verified = list(self._body.finish().items())

    def checksums(self, *, is_object: bool = True) -> Headers:
        """What is said of the checksums that the body was verified by; `is_object`: it is all of one."""
        kind = [("x-amz-checksum-type", "FULL_OBJECT")] if self.verified and is_object else []
        return [*self.verified, *kind]

    async def take_no_body(self) -> None:
        """See that there is none, and that it was signed as none. Raises S3Refusal."""
        if self.request.parts is not None:
            raise S3Refusal("InvalidRequest", "This request has no body")
        self._body.finish()

    async def document(self, bytes_max: int) -> bytes:
        """A body that is a document. Raises S3Refusal."""
        document = bytearray()
        async for part in self.parts():
            document += part
            if len(document) > bytes_max:
                raise S3Refusal(
                    "MaxMessageLengthExceeded", f"Your request was too big: at most {bytes_max} bytes"
                )
        return bytes(document)

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        """The head of the answer."""
        self.answer.start(status, [*headers, *self._ids], length_bytes)

    def reply(self, status: int, headers: Iterable[tuple[str, str]] = ()) -> None:
        """An answer without a body."""
        self.start(status, headers, 0)
        self.answer.finish()

    def reply_xml(self, document: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A document as the answer."""
        self.start(200, [("Content-Type", "application/xml"), *headers], len(document))
        self.answer.data(document)
        self.answer.finish()


async def _in_time(parts: BodyParts) -> AsyncGenerator[bytes, None]:
    """The same, as they come. Raises S3Refusal where they do not."""
    coming = aiter(parts)
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                part = await anext(coming, None)
        except TimeoutError:
            raise S3Refusal(
                "RequestTimeout",
                f"Nothing came for {SILENCE_S:.0f} s, and {parts.received_bytes} bytes of the body before",
            ) from None
        if part is None:
            return
        yield part
