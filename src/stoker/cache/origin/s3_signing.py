"""Signed GET requests of S3 (AWS signature, version 4), made so that one costs a few microseconds."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple
from urllib.parse import quote

_NO_BODY = hashlib.sha256(b"").hexdigest()
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._\-=@,:+ ]+"
_PLAIN = re.compile(f"{_PART}(?:/{_PART})*")


class Credentials(NamedTuple):
    """Who asks; `session_token` only with credentials that end."""

    access_key_id: str
    secret_access_key: str
    session_token: str = ""


def is_plain(path: str) -> bool:
    """Whether all who read a path, clients and servers, take it for the same object's name."""
    return _PLAIN.fullmatch(path) is not None


def signing_key(secret_access_key: str, day: str, region: str) -> bytes:
    """What all signatures of one day and region are made with; `day` as 20260102."""
    key = b"AWS4" + secret_access_key.encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class Signer:
    """Makes the heads of requests to one host; without credentials they are not signed."""

    def __init__(self, host: str, region: str, credentials: Credentials | None) -> None:
        self._host = host
        self._region = region
        self._credentials = credentials
        self._day = ""
        self._key = b""

    def get(self, path: str, fields: str, now: str) -> bytes:
        """The head of a GET for a path (from its slash, as it is named). `fields`: header lines that need no signature.
        `now`: as 20260102T030405Z."""
        target = quote(path, safe="/-._~")
        head = f"GET {target} HTTP/1.1\r\nhost: {self._host}\r\n{fields}"
        if self._credentials is None:
            return f"{head}\r\n".encode("ascii")
        token = self._credentials.session_token
        names = "host;x-amz-content-sha256;x-amz-date" + (";x-amz-security-token" if token else "")
        signed = f"x-amz-content-sha256:{_NO_BODY}\nx-amz-date:{now}\n"
        if token:
            signed += f"x-amz-security-token:{token}\n"
            head += f"x-amz-security-token: {token}\r\n"
        asked = f"GET\n{target}\n\nhost:{self._host}\n{signed}\n{names}\n{_NO_BODY}"
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
        signature = hmac.digest(self._key_of(now[:8]), text.encode(), "sha256").hex()
        return (
            f"{head}x-amz-content-sha256: {_NO_BODY}\r\nx-amz-date: {now}\r\n"
            f"authorization: AWS4-HMAC-SHA256 Credential={self._credentials.access_key_id}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}\r\n\r\n"
        ).encode()

    def _key_of(self, day: str) -> bytes:
        """It is of one day, and is derived once."""
        if day != self._day:
            assert self._credentials is not None
            self._day, self._key = day, signing_key(self._credentials.secret_access_key, day, self._region)
        return self._key
