"""Requests that botocore has signed, as they go over the wire."""

from __future__ import annotations

import datetime
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from stoker.cache.auth.sigv4 import CredentialsOf
from stoker.cache.auth.sigv4_canonical import Head, fold_headers
from stoker.cache.origin.s3_signing import Credentials

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
NOW_S = NOW.timestamp()
HOST = "cache.example:9000"
ALICE = Credentials("ALICE", "alice's secret")
GUEST = Credentials("GUEST", "guest/secret+key", "a/session+token==")


def credentials_of(*known: Credentials) -> CredentialsOf:
    return {credentials.access_key_id: credentials for credentials in known or (ALICE, GUEST)}.get


def head_of(
    method: str = "GET",
    target: str = "/bucket/key",
    headers: list[tuple[str, str]] | None = None,
    body: bytes = b"",
    credentials: Credentials = ALICE,
    region: str = "eu-west-1",
    expires_s: int | None = None,
) -> Head:
    """Signed in the header, or in the query if it expires. `target` and the headers' names as they are sent."""
    boto = BotoCredentials(
        credentials.access_key_id, credentials.secret_access_key, credentials.session_token or None
    )
    request = AWSRequest(method, f"http://{HOST}{target}", data=body)
    for name, value in headers or []:
        request.headers.add_header(name, value)
    auth: Any
    if expires_s is None:
        auth = S3SigV4Auth(boto, "s3", region)
    else:
        auth = S3SigV4QueryAuth(boto, "s3", region, expires=expires_s)
    with patch("botocore.auth.get_current_datetime", return_value=NOW.replace(tzinfo=None)):
        auth.add_auth(request)
    sent = urlsplit(request.prepare().url)
    lines = [
        (name.encode(), value.encode() if isinstance(value, str) else value)
        for name, value in request.headers.items()
    ]
    raw = sent.path + (f"?{sent.query}" if sent.query else "")
    return Head(method, raw.encode(), fold_headers([(b"Host", HOST.encode()), *lines]))


def changed(head: Head, **headers: str | None) -> Head:
    """With other headers; None takes one away."""
    fields = dict(head.headers)
    for name, value in headers.items():
        key = name.replace("_", "-").encode()
        if value is None:
            fields.pop(key)
        else:
            fields[key] = value.encode()
    return head._replace(headers=fields)
