"""Making signatures (AWS Signature Version 4): links that open one object for a while, and signed heads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from stoker.cache.auth.sigv4_canonical import (
    ALGORITHM,
    UNSIGNED,
    Head,
    Scope,
    canonical_request,
    query_fields,
    signature_of,
)
from stoker.cache.origin.s3_signing import Credentials, signing_key
from stoker.errors import ConfigError
from stoker.wire.http_dates import format_amz_date

EXPIRES_MAX_S = 7 * 24 * 3600


def presign(
    method: str,
    target: bytes,
    host: str,
    credentials: Credentials,
    region: str,
    now_s: float,
    expires_s: int,
    headers: Mapping[bytes, bytes] | None = None,
) -> bytes:
    """The target with a signature in its query, which opens it for whoever sends it to that host with these headers.

    `target`: path and perhaps query, percent-encoded; the query may say X-Amz-Content-Sha256.
    Raises ConfigError for a time that is none or beyond a week.
    """
    if not 1 <= expires_s <= EXPIRES_MAX_S:
        raise ConfigError(f"a link is good for 1 s to {EXPIRES_MAX_S} s (a week), not for {expires_s} s")
    scope = Scope(format_amz_date(now_s), region)
    signed = {**(headers or {}), b"host": host.encode()}
    names = sorted(signed)
    said = {
        "X-Amz-Algorithm": ALGORITHM,
        "X-Amz-Credential": f"{credentials.access_key_id}/{scope}",
        "X-Amz-Date": scope.time,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": b";".join(names).decode(),
    }
    if credentials.session_token:
        said["X-Amz-Security-Token"] = credentials.session_token
    mark = b"&" if b"?" in target else b"?"
    target += mark + "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in said.items()).encode()
    fields = query_fields(target.partition(b"?")[2])
    payload_hash = dict(fields).get(b"X-Amz-Content-Sha256", UNSIGNED.encode()).decode()
    asked = canonical_request(Head(method, target, signed), fields, names, payload_hash)
    key = signing_key(credentials.secret_access_key, scope.day, region)
    return target + f"&X-Amz-Signature={signature_of(key, scope, asked)}".encode()


def sign_header(
    head: Head, credentials: Credentials, region: str, now_s: float, payload_hash: str
) -> dict[bytes, bytes]:
    """The headers of a request with those that sign it; all of them are signed, `host` must be among them.

    `payload_hash`: the body's SHA-256 in hex, or one of the words that stand for it.
    """
    scope = Scope(format_amz_date(now_s), region)
    headers = dict(head.headers)
    headers[b"x-amz-date"] = scope.time.encode()
    headers[b"x-amz-content-sha256"] = payload_hash.encode()
    if credentials.session_token:
        headers[b"x-amz-security-token"] = credentials.session_token.encode()
    names = sorted(headers)
    fields = query_fields(head.target.partition(b"?")[2])
    asked = canonical_request(head._replace(headers=headers), fields, names, payload_hash)
    key = signing_key(credentials.secret_access_key, scope.day, region)
    headers[b"authorization"] = (
        f"{ALGORITHM} Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={b';'.join(names).decode()}, Signature={signature_of(key, scope, asked)}"
    ).encode()
    return headers
