"""What a request signed with AWS Signature Version 4 says, in the one form of which signatures are made, as S3 has it:
the path is encoded once and never normalised. Pure.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
SIGNATURE_FIELD = b"X-Amz-Signature"

Fields = Sequence[tuple[bytes, bytes]]
"""Names and values of a query, decoded, in the order in which they came."""


class _Head(NamedTuple):
    method: str
    target: bytes
    headers: Mapping[bytes, bytes]


class Head(_Head):
    """A request as it came: the target raw; headers by their names in lower case, repeated ones as `fold_headers` has
    them."""

    @cached_property
    def fields(self) -> Fields:
        """Of its query, which is read once."""
        return query_fields(self.target.partition(b"?")[2])


class Scope(NamedTuple):
    """Where and when a signature holds. `time`: as 20260102T030405Z."""

    time: str
    region: str

    @property
    def day(self) -> str:
        return self.time[:8]

    def __str__(self) -> str:
        return f"{self.day}/{self.region}/s3/aws4_request"


def fold_headers(lines: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header lines by their names in lower case; values of repeated ones are joined by commas, as they are signed."""
    headers: dict[bytes, bytes] = {}
    for name, value in lines:
        name, value = name.lower(), value.strip()
        headers[name] = headers[name] + b"," + value if name in headers else value
    return headers


def query_fields(query: bytes) -> Fields:
    """A query's names and values. All who read it read it by this, so that what is done is what was signed."""
    pairs = (piece.partition(b"=") for piece in query.split(b"&") if piece)
    return [(_unquote(name), _unquote(value)) for name, _, value in pairs]


def _unquote(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def canonical_request(
    head: Head, fields: Fields, signed_headers: Sequence[bytes], payload_hash: str
) -> bytes:
    """The text whose hash is signed. Each of the signed headers must be there. A signature among the query's fields is
    left out: it cannot be part of what it signs."""
    path = quote_from_bytes(unquote_to_bytes(head.target.partition(b"?")[0]), safe="/-_.~").encode()
    pairs = sorted(
        (quote_from_bytes(name, safe="-_.~"), quote_from_bytes(value, safe="-_.~"))
        for name, value in fields
        if name != SIGNATURE_FIELD
    )
    query = "&".join(f"{name}={value}" for name, value in pairs).encode()
    lines = [name + b":" + b" ".join(head.headers[name].split()) + b"\n" for name in signed_headers]
    parts = (
        head.method.encode(),
        path,
        query,
        b"".join(lines),
        b";".join(signed_headers),
        payload_hash.encode(),
    )
    return b"\n".join(parts)


def signature_of(key: bytes, scope: Scope, canonical: bytes) -> str:
    """The signature of a request."""
    text = f"{ALGORITHM}\n{scope.time}\n{scope}\n{hashlib.sha256(canonical).hexdigest()}"
    return hmac.digest(key, text.encode(), "sha256").hex()
