"""Who has signed a request: AWS Signature Version 4, in the Authorization header or in the query. Pure.

Any region is taken, since clients name whichever they are set to; the service must be `s3`.
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html
"""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.auth.sigv4_canonical import (
    ALGORITHM,
    SIGNATURE_FIELD,
    UNSIGNED,
    Fields,
    Head,
    Scope,
    canonical_request,
    signature_of,
)
from stoker.cache.auth.sigv4_sign import EXPIRES_MAX_S
from stoker.cache.origin.s3_signing import Credentials, signing_key
from stoker.wire.http_dates import format_amz_date, parse_amz_date, parse_http_date

SKEW_MAX_S = 15 * 60
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_QUERY_FIELDS = (
    b"X-Amz-Algorithm", b"X-Amz-Credential", b"X-Amz-Date", b"X-Amz-Expires", b"X-Amz-SignedHeaders", SIGNATURE_FIELD,
)  # fmt: skip
_OPTIONAL_FIELDS = (b"X-Amz-Security-Token", b"X-Amz-Content-Sha256")

CredentialsOf = Callable[[str], Credentials | None]
"""The credentials of an access key id, if there are any."""


class PayloadMode(Enum):
    """What is said of the body: as `x-amz-content-sha256` has it, but for HASH, where that is the body's SHA-256."""

    HASH = "HASH"
    UNSIGNED = UNSIGNED
    SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    SIGNED_CHUNKS_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    UNSIGNED_CHUNKS_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


class Payload(NamedTuple):
    """`sha256`: in hex, with HASH only."""

    mode: PayloadMode
    sha256: str = ""


class ChunkSigning(NamedTuple):
    """With what the chunks of a body are signed, `signature` being what the first one follows on."""

    key: bytes
    scope: Scope
    signature: str

    def __repr__(self) -> str:
        # The key is a secret for as long as its day.
        return f"ChunkSigning(key=…, scope={self.scope}, signature={self.signature})"


class Proof(NamedTuple):
    """Who has signed, and what of the request. `chunks` is for bodies that are signed in chunks."""

    access_key_id: str
    signed_headers: tuple[bytes, ...]
    payload: Payload
    chunks: ChunkSigning
    is_presigned: bool


class SigningKeys:
    """Keys of signatures, derived once a day and region, for credentials that were proved; the least used go."""

    def __init__(self, keys_max: int = 1024) -> None:
        self._keys_max = keys_max
        self._keys: OrderedDict[tuple[Credentials, str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, credentials: Credentials, scope: Scope) -> bytes:
        """The key; derived, if it is not kept."""
        asked = credentials, scope.day, scope.region
        if asked in self._keys:
            self._keys.move_to_end(asked)
            return self._keys[asked]
        return signing_key(credentials.secret_access_key, scope.day, scope.region)

    def keep(self, credentials: Credentials, scope: Scope, key: bytes) -> None:
        """Keep one that a good signature was made with: what strangers send drives nothing out."""
        self._keys[credentials, scope.day, scope.region] = key
        while len(self._keys) > self._keys_max:
            self._keys.popitem(last=False)


class _Signed(NamedTuple):
    """What a request says of its signature."""

    access_key_id: str
    scope: Scope
    signed_headers: tuple[bytes, ...]
    signature: str
    token: str
    payload_hash: str
    is_presigned: bool


def is_signed(head: Head) -> bool:
    """Whether a request wants to be taken for a signed one; else it is anonymous, or shows something else."""
    if head.headers.get(b"authorization", b"").startswith(b"AWS"):
        return True
    names = {name for name, _ in head.fields}
    return bool(names & {*_QUERY_FIELDS, b"AWSAccessKeyId"})


def verify(head: Head, now_s: float, credentials_of: CredentialsOf, keys: SigningKeys) -> Proof:
    """Who has signed this request, now. Raises S3Refusal."""
    fields = head.fields
    is_presigned = any(name in (*_QUERY_FIELDS, b"AWSAccessKeyId") for name, _ in fields)
    if is_presigned and b"authorization" in head.headers:
        raise S3Refusal(
            "InvalidArgument",
            "Only one authentication mechanism is allowed: an Authorization header or a signature in the query",
        )
    signed = _in_query(head, fields, now_s) if is_presigned else _in_header(head, now_s)
    _check_signed_headers(head, signed)
    payload = payload_of(signed.payload_hash)
    credentials = credentials_of(signed.access_key_id)
    if credentials is None:
        raise S3Refusal(
            "InvalidAccessKeyId", "The AWS access key Id you provided does not exist in our records."
        )
    if not hmac.compare_digest(credentials.session_token.encode(), signed.token.encode()):
        raise S3Refusal("InvalidToken", "The provided token is malformed or otherwise not valid.")
    key = keys.get(credentials, signed.scope)
    asked = canonical_request(head, fields, signed.signed_headers, signed.payload_hash)
    if not hmac.compare_digest(signature_of(key, signed.scope, asked).encode(), signed.signature.encode()):
        raise S3Refusal(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided."
            " Check your key and signing method.",
        )
    keys.keep(credentials, signed.scope, key)
    chunks = ChunkSigning(key, signed.scope, signed.signature)
    return Proof(signed.access_key_id, signed.signed_headers, payload, chunks, is_presigned)


def payload_of(said: str) -> Payload:
    """What `x-amz-content-sha256` says. Raises S3Refusal."""
    if _HASH.fullmatch(said.lower()):
        return Payload(PayloadMode.HASH, said.lower())
    if said != PayloadMode.HASH.value and said in {mode.value for mode in PayloadMode}:
        return Payload(PayloadMode(said))
    words = ", ".join(mode.value for mode in PayloadMode if mode is not PayloadMode.HASH)
    raise S3Refusal(
        "InvalidArgument", f"x-amz-content-sha256 must be {words}, or a valid sha256 value, not {said[:80]!r}"
    )


def _in_header(head: Head, now_s: float) -> _Signed:
    said = _text(head.headers.get(b"authorization", b""))
    algorithm, _, rest = said.partition(" ")
    if not said:
        raise S3Refusal("AccessDenied", "Access Denied: the request is not signed")
    if algorithm != ALGORITHM:
        raise S3Refusal(
            "InvalidRequest",
            f"The authorization mechanism you have provided is not supported. Please use {ALGORITHM}.",
        )
    parts: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in parts or name not in ("Credential", "SignedHeaders", "Signature"):
            raise _malformed(f"it cannot be read at {part.strip()[:80]!r}")
        parts[name] = value
    if len(parts) != 3:
        raise _malformed("it must have Credential, SignedHeaders and Signature")
    time_s = _header_time(head.headers)
    scope, access_key_id = _scope(parts["Credential"], format_amz_date(time_s), _malformed)
    if abs(now_s - time_s) > SKEW_MAX_S:
        raise S3Refusal(
            "RequestTimeTooSkewed",
            "The difference between the request time and the server's time is too large.",
            (
                ("RequestTime", scope.time),
                ("ServerTime", format_amz_date(now_s)),
                ("MaxAllowedSkewMilliseconds", str(SKEW_MAX_S * 1000)),
            ),
        )
    payload_hash = head.headers.get(b"x-amz-content-sha256")
    if payload_hash is None:
        raise S3Refusal(
            "MissingSecurityHeader", "Your request is missing a required header: x-amz-content-sha256"
        )
    names = _signed_names(parts["SignedHeaders"], _malformed)
    token = _text(head.headers.get(b"x-amz-security-token", b""))
    return _Signed(access_key_id, scope, names, parts["Signature"], token, _text(payload_hash), False)


def _header_time(headers: Mapping[bytes, bytes]) -> int:
    if b"x-amz-date" in headers:
        time_s = parse_amz_date(_text(headers[b"x-amz-date"]))
    else:
        time_s = parse_http_date(_text(headers.get(b"date", b"")))
    if time_s is None:
        raise S3Refusal("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    return time_s


def _in_query(head: Head, fields: Fields, now_s: float) -> _Signed:
    if any(name == b"AWSAccessKeyId" for name, _ in fields):
        raise S3Refusal(
            "InvalidRequest",
            f"The authorization mechanism you have provided is not supported. Please use {ALGORITHM}.",
        )
    said: dict[bytes, str] = {}
    for name, value in fields:
        if name in _QUERY_FIELDS or name in _OPTIONAL_FIELDS:
            if name in said:
                raise _wrong_query(f"{_text(name)} is there twice")
            said[name] = _text(value)
    missing = [_text(name) for name in _QUERY_FIELDS if not said.get(name)]
    if missing:
        raise _wrong_query(f"it must have {', '.join(missing)} as well")
    if said[b"X-Amz-Algorithm"] != ALGORITHM:
        raise _wrong_query(f"X-Amz-Algorithm only supports {ALGORITHM}")
    time_s = parse_amz_date(said[b"X-Amz-Date"])
    if time_s is None:
        raise _wrong_query("X-Amz-Date must be in the ISO8601 Long Format yyyyMMdd'T'HHmmss'Z'")
    scope, access_key_id = _scope(said[b"X-Amz-Credential"], said[b"X-Amz-Date"], _wrong_query)
    _check_expiry(said[b"X-Amz-Expires"], time_s, now_s)
    names = _signed_names(said[b"X-Amz-SignedHeaders"], _wrong_query)
    payload_hash = said.get(b"X-Amz-Content-Sha256") or _text(
        head.headers.get(b"x-amz-content-sha256", UNSIGNED.encode())
    )
    signature, token = said[SIGNATURE_FIELD], said.get(b"X-Amz-Security-Token", "")
    return _Signed(access_key_id, scope, names, signature, token, payload_hash, True)


def _check_expiry(said: str, time_s: int, now_s: float) -> None:
    digits = said.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise _wrong_query("X-Amz-Expires should be a number")
    if said.startswith("-"):
        raise _wrong_query("X-Amz-Expires must be non-negative")
    expires_s = int(said)
    if expires_s > EXPIRES_MAX_S:
        raise _wrong_query(f"X-Amz-Expires must be less than a week (in seconds); {EXPIRES_MAX_S}")
    if now_s < time_s - SKEW_MAX_S:
        raise S3Refusal("AccessDenied", "Request is not valid yet")
    if now_s > time_s + expires_s:
        more = ("X-Amz-Expires", said), ("ServerTime", format_amz_date(now_s))
        raise S3Refusal("AccessDenied", "Request has expired", more)


def _scope(said: str, time: str, refusal: Callable[[str], S3Refusal]) -> tuple[Scope, str]:
    """The scope in a credential, and whose it is. An access key id may have slashes."""
    parts = said.rsplit("/", 4)
    if len(parts) != 5 or not parts[0]:
        raise refusal('the Credential must be "<YOUR-AKID>/YYYYMMDD/REGION/s3/aws4_request"')
    access_key_id, day, region, service, end = parts
    if day != time[:8]:
        raise refusal(f"the Credential's day {day[:20]!r} is not that of the request, {time[:8]}")
    if _REGION.fullmatch(region) is None:
        raise refusal(f"{region[:80]!r} cannot be a region")
    if service != "s3":
        raise refusal(f"the Credential is for the service {service[:40]!r}; this endpoint belongs to 's3'")
    if end != "aws4_request":
        raise refusal(f"the Credential ends with {end[:40]!r}, not with 'aws4_request'")
    return Scope(time, region), access_key_id


def _signed_names(said: str, refusal: Callable[[str], S3Refusal]) -> tuple[bytes, ...]:
    names = said.split(";")
    if names != sorted(set(names)) or not all(_HEADER_NAME.fullmatch(name) for name in names):
        raise refusal("the signed headers must be names in lower case, sorted, each once")
    return tuple(name.encode() for name in names)


def _check_signed_headers(head: Head, signed: _Signed) -> None:
    names = set(signed.signed_headers)
    sent = {name for name in head.headers if name == b"host" or name.startswith(b"x-amz-")} | {b"host"}
    if unsigned := sent - names:
        listed = ", ".join(sorted(_text(name) for name in unsigned))
        raise S3Refusal(
            "AccessDenied",
            f"There were headers present in the request which were not signed: {listed}",
            (("HeadersNotSigned", listed),),
        )
    if missing := names - head.headers.keys():
        listed = ", ".join(sorted(_text(name) for name in missing))
        raise S3Refusal("SignatureDoesNotMatch", f"Headers were signed that did not come: {listed}")


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _malformed(why: str) -> S3Refusal:
    return S3Refusal("AuthorizationHeaderMalformed", f"The authorization header is malformed; {why}")


def _wrong_query(why: str) -> S3Refusal:
    return S3Refusal("AuthorizationQueryParametersError", f"Error parsing the query's signature: {why}")
