"""The S3 face of a server: who asks, what for, and the answer in S3's words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex

from stoker.base.clock import Clock
from stoker.cache.auth.access import Access
from stoker.cache.auth.principals import UNPROVEN, Principal
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4 import (
    Payload,
    PayloadMode,
    Proof,
    SigningKeys,
    is_signed,
    payload_of,
    verify,
)
from stoker.cache.auth.sigv4_body import Body, body_of
from stoker.cache.auth.sigv4_canonical import Head
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.begun import BegunUploads
from stoker.cache.server.engine import Engine
from stoker.cache.server.inquiry import current_id
from stoker.cache.server.objects import Objects
from stoker.cache.server.port import Answer, Request
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.buckets import Buckets
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.defaults import Defaults
from stoker.cache.server.s3.errors import error_answer, no_such_bucket, not_implemented, refusal_of
from stoker.cache.server.s3.making import Making
from stoker.cache.server.s3.operations import operation_of
from stoker.cache.server.s3.reading import Reading
from stoker.cache.server.s3.rights import check_allowed
from stoker.cache.server.s3.uploads import Uploads
from stoker.cache.server.s3.writing import Writing
from stoker.errors import OriginError, StokerError

_FIELDS_MAX = 256
_FIELDS = frozenset(
    (
        *(
            b"list-type",
            b"delimiter",
            b"encoding-type",
            b"location",
            b"marker",
            b"max-keys",
            b"prefix",
            b"versioning",
        ),
        *(b"delete", b"partNumber", b"uploadId", b"uploads", b"versionId", b"versions", b"x-id"),
    )
)
"""Of queries."""
Handler = Callable[[Call, ops.Operation], Awaitable[None]]


@dataclass(frozen=True)
class S3Settings:
    """`domains`: below which a host's first labels are a bucket's name. `host_id`: of this server, in its answers.
    `buckets_at`: the origin below which clients may make buckets; empty: they may not."""

    domains: Sequence[str] = ()
    host_id: str = ""
    buckets_at: str = ""


class S3Face:
    """Of one engine."""

    def __init__(
        self,
        engine: Engine,
        objects: Objects,
        access: Access,
        clock: Clock,
        settings: S3Settings,
        added: AddedBuckets,
        begun: BegunUploads,
    ) -> None:
        self._access = access
        self._buckets = engine.buckets
        self._clock = clock
        self._settings = settings
        self._keys = SigningKeys()
        buckets, reading = Buckets(engine), Reading(engine, objects)
        self.writing = writing = Writing(engine, clock)
        uploads = Uploads(engine, writing, clock, begun)
        self._handlers: dict[type[ops.Operation], Handler] = {
            **buckets.handlers(),
            **reading.handlers(),
            **Defaults(engine).handlers(),
            **writing.handlers(),
            **uploads.handlers(),
            **Making(engine, added, clock, settings.buckets_at).handlers(),
        }

    def head_of(self, request: Request) -> Head | None:
        """A request of this dialect: it is signed, or says something that only S3 has. None: it is Stoker's own."""
        head = Head(request.method, request.target, request.headers)
        if request.target.count(b"&") > _FIELDS_MAX or is_signed(head):
            return head
        if request.principal is UNPROVEN and not _has_token(request):
            return head
        if self.is_virtual(request) or any(name.startswith(b"x-amz-") for name in request.headers):
            return head
        return head if any(name in _FIELDS for name, _ in head.fields) else None

    async def answer(self, request: Request, head: Head, answer: Answer) -> None:
        """`head`: as `head_of` has it. Raises ConnectionAbortedError if an answer that has begun cannot be ended."""
        request_id = current_id() or token_hex(8).upper()
        try:
            if request.target.count(b"&") > _FIELDS_MAX:
                raise S3Refusal("InvalidURI", f"A query has at most {_FIELDS_MAX} fields here.")
            principal, proof = self._asker(request, head)
            request.principal = principal
            answer.charge(principal)
            operation = operation_of(head, self._settings.domains)
            check_allowed(principal, operation)
            body = _body_of(head, proof, operation)
            call = Call(
                request,
                answer,
                principal,
                body,
                request_id,
                self._settings.host_id,
                needs_user=self._access.writes_need_user,
            )
            await self._do(call, operation)
        except StokerError as error:
            if answer.has_started:
                raise ConnectionAbortedError(str(error)) from error
            self._refuse(request, answer, refusal_of(error), request_id)

    async def _do(self, call: Call, operation: ops.Operation) -> None:
        """Raises S3Refusal, and what else refuses it."""
        handler = self._handlers.get(type(operation))
        if handler is None:
            raise not_implemented(operation.name)
        was_there = operation.bucket in self._buckets
        try:
            await handler(call, operation)
        except OriginError:
            # Its origin is gone with it.
            if was_there and operation.bucket not in self._buckets and not call.answer.has_started:
                raise no_such_bucket(operation.bucket) from None
            raise

    def _refuse(self, request: Request, answer: Answer, refusal: S3Refusal, request_id: str) -> None:
        resource = request.target.partition(b"?")[0].decode("utf-8", "replace")
        said = error_answer(refusal, resource, request_id, self._settings.host_id)
        answer.start(said.status, said.headers, len(said.body))
        answer.data(said.body)
        answer.finish()

    def is_signed(self, request: Request) -> bool:
        """Whether who asks has signed the request, rightly or not."""
        return is_signed(Head(request.method, request.target, request.headers))

    def _asker(self, request: Request, head: Head) -> tuple[Principal, Proof | None]:
        """Who asks, and what was signed. Raises S3Refusal."""
        if is_signed(head):
            proof = verify(head, self._clock.wall(), self._credentials, self._keys)
            return self._access.principal_of_key(proof.access_key_id), proof
        if request.principal is UNPROVEN:
            kind = (request.header(b"content-type") or "").lower()
            if request.method == "POST" and kind.startswith("multipart/form-data"):
                raise not_implemented("An upload by an HTML form (POST Object)")
            raise S3Refusal("AccessDenied", "Access Denied: the request is not signed")
        return request.principal, None

    def _credentials(self, access_key_id: str) -> Credentials | None:
        secret = self._access.secret_of(access_key_id)
        return None if secret is None else Credentials(access_key_id, secret)

    def is_virtual(self, request: Request) -> bool:
        """Whether its host names a bucket."""
        host = (request.header(b"host") or "").lower().partition(":")[0]
        return any(host.endswith(f".{domain}") for domain in self._settings.domains)


def _has_token(request: Request) -> bool:
    """Whether it shows one that S3 knows nothing of, be it wrong."""
    return (request.header(b"authorization") or "").partition(" ")[0].lower() == "bearer"


def _body_of(head: Head, proof: Proof | None, operation: ops.Operation) -> Body:
    """How the body is to be read. Raises S3Refusal."""
    are_its_own = not isinstance(operation, ops.CompleteMultipartUpload)
    if proof is not None:
        return body_of(head.headers, proof.payload, proof.chunks, are_its_own)
    said = head.headers.get(b"x-amz-content-sha256")
    payload = Payload(PayloadMode.UNSIGNED) if said is None else payload_of(said.decode("latin-1"))
    return body_of(head.headers, payload, None, are_its_own)
