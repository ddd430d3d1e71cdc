"""The S3 face of a server: who asks, what for, and the answer in S3's words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex

from stoker.base.clock import Clock
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
from stoker.cache.auth.sigv4_canonical import Head, query_fields
from stoker.cache.auth.tokens import UNPROVEN, Principal, TokenAuth
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.server.engine import Engine
from stoker.cache.server.objects import Objects
from stoker.cache.server.port import Answer, Request
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.buckets import Buckets
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.errors import error_answer, not_implemented, refusal_of
from stoker.cache.server.s3.operations import operation_of
from stoker.cache.server.s3.reading import Reading
from stoker.cache.server.s3.uploads import Uploads
from stoker.cache.server.s3.writing import Writing
from stoker.errors import StokerError

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
    """`domains`: below which a host's first labels are a bucket's name. `host_id`: of this server, in its answers."""

    domains: Sequence[str] = ()
    host_id: str = ""


class S3Face:
    """Of one engine."""

    def __init__(
        self, engine: Engine, objects: Objects, auth: TokenAuth, clock: Clock, settings: S3Settings
    ) -> None:
        self._auth = auth
        self._clock = clock
        self._settings = settings
        self._keys = SigningKeys()
        buckets, reading = Buckets(engine), Reading(engine, objects)
        writing = Writing(engine)
        uploads = Uploads(engine, writing)
        self._handlers: dict[type[ops.Operation], Handler] = {
            **buckets.handlers(),
            **reading.handlers(),
            **writing.handlers(),
            **uploads.handlers(),
        }

    def is_for(self, request: Request) -> bool:
        """Whether a request is of this dialect: if it is signed, or says something that only S3 has. Others are
        Stoker's own."""
        if (
            request.target.count(b"&") > _FIELDS_MAX
            or request.principal is UNPROVEN
            or is_signed(_head_of(request))
            or self._is_virtual(request)
        ):
            return True
        if any(name.startswith(b"x-amz-") for name in request.headers):
            return True
        _, question, query = request.target.partition(b"?")
        return bool(question) and any(name in _FIELDS for name, _ in query_fields(query))

    async def answer(self, request: Request, answer: Answer) -> None:
        """Raises ConnectionAbortedError if an answer that has begun cannot be completed."""
        request_id = token_hex(8).upper()
        try:
            if request.target.count(b"&") > _FIELDS_MAX:
                raise S3Refusal("InvalidURI", f"A query has at most {_FIELDS_MAX} fields here.")
            head = _head_of(request)
            principal, proof = self._asker(request, head)
            operation = operation_of(head, self._settings.domains)
            body = _body_of(head, proof, operation)
            handler = self._handlers.get(type(operation))
            if handler is None:
                raise not_implemented(operation.name)
            call = Call(request, answer, principal, body, request_id, self._settings.host_id)
            await handler(call, operation)
        except StokerError as error:
            if answer.has_started:
                raise ConnectionAbortedError(str(error)) from error
            self._refuse(request, answer, refusal_of(error), request_id)

    def _refuse(self, request: Request, answer: Answer, refusal: S3Refusal, request_id: str) -> None:
        resource = request.target.partition(b"?")[0].decode("utf-8", "replace")
        said = error_answer(refusal, resource, request_id, self._settings.host_id)
        answer.start(said.status, said.headers, len(said.body))
        answer.data(said.body)
        answer.finish()

    def _asker(self, request: Request, head: Head) -> tuple[Principal, Proof | None]:
        """Who asks, and what was signed. Raises S3Refusal."""
        if is_signed(head):
            proof = verify(head, self._clock.wall(), self._credentials, self._keys)
            return self._auth.principal_of_key(proof.access_key_id), proof
        if request.principal is UNPROVEN:
            raise S3Refusal("AccessDenied", "Access Denied: the request is not signed")
        return request.principal, None

    def _credentials(self, access_key_id: str) -> Credentials | None:
        secret = self._auth.secret_of(access_key_id)
        return None if secret is None else Credentials(access_key_id, secret)

    def _is_virtual(self, request: Request) -> bool:
        host = (request.header(b"host") or "").lower().partition(":")[0]
        return any(host.endswith(f".{domain}") for domain in self._settings.domains)


def _head_of(request: Request) -> Head:
    return Head(request.method, request.target, request.headers)


def _body_of(head: Head, proof: Proof | None, operation: ops.Operation) -> Body:
    """How the body is to be read. Raises S3Refusal."""
    are_its_own = not isinstance(operation, ops.CompleteMultipartUpload)
    if proof is not None:
        return body_of(head.headers, proof.payload, proof.chunks, are_its_own)
    said = head.headers.get(b"x-amz-content-sha256")
    payload = Payload(PayloadMode.UNSIGNED) if said is None else payload_of(said.decode("latin-1"))
    return body_of(head.headers, payload, None, are_its_own)
