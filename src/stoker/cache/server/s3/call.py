"""One request of the S3 dialect while it is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_body import Body
from stoker.cache.auth.tokens import Principal
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.port import Answer, Request, hops_of
from stoker.cache.server.s3.errors import answer_headers, no_such_bucket

Headers = list[tuple[str, str]]


class Call:
    """`body`: how the body is read, and whether it is what its sender meant."""

    def __init__(
        self,
        request: Request,
        answer: Answer,
        principal: Principal,
        body: Body,
        request_id: str,
        host_id: str,
    ) -> None:
        self.request = request
        self.answer = answer
        self.principal = principal
        self.hops = hops_of(request)
        self.verified: list[tuple[str, str]] = []
        """Checksums that the body was verified by, to be said again; once it has come."""
        self._body = body
        self._ids = answer_headers(request_id, host_id)

    def bucket(self, engine: Engine, name: str) -> Bucket:
        """A bucket that may be read. Raises S3Refusal: who may not read it is not told whether it is there."""
        if not self.principal.may_read(name):
            raise S3Refusal("AccessDenied", f"Access Denied: this key may not read the bucket {name!r}")
        found = engine.buckets.get(name)
        if found is None:
            raise no_such_bucket(name)
        return found

    def writable(self, engine: Engine, name: str) -> Bucket:
        """A bucket that may be written to. Raises S3Refusal."""
        bucket = self.bucket(engine, name)
        if not self.principal.may_write(name):
            raise S3Refusal("AccessDenied", f"Access Denied: this key may not write to the bucket {name!r}")
        return bucket

    @property
    def body_bytes(self) -> int | None:
        """Of the data that comes; None: nobody knows."""
        return 0 if self.request.parts is None else self._body.size_bytes

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The data of the body as it comes; it ends only once all of it is what its sender meant. Raises S3Refusal."""
        if self.request.parts is not None:
            async for raw in self.request.parts:
                for part in self._body.feed(raw):
                    yield part
        self.verified = list(self._body.finish().items())

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
