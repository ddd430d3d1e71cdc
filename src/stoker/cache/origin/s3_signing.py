"""Signed requests of S3 (AWS signature, version 4): GETs made so that one costs a few microseconds, and any others."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
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


UNSIGNED = "UNSIGNED-PAYLOAD"
"""What stands for the hash of a body that is not signed."""
IN_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
"""What stands for it where each chunk of the body is signed."""


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

    @property
    def can_sign(self) -> bool:
        """Whether there are credentials."""
        return self._credentials is not None

    def request(
        self, method: str, path: str, query: Mapping[str, str], fields: Mapping[str, str], body: str, now: str
    ) -> tuple[bytes, ChunkSigner | None]:
        """The head of a request, and what signs the chunks of its body, if it is signed.

        `fields`: all header lines but the signature's, names in lower case. `body`: its SHA-256, UNSIGNED or IN_CHUNKS.
        """
        target = quote(path, safe="/-._~")
        asked = "&".join(f"{_quoted(name)}={_quoted(query[name])}" for name in sorted(query))
        lines = {"host": self._host, **fields}
        signer = None
        if self._credentials is not None:
            lines |= {"x-amz-content-sha256": body, "x-amz-date": now}
            if self._credentials.session_token:
                lines["x-amz-security-token"] = self._credentials.session_token
            names = sorted(name for name in lines if name not in _NOT_SIGNED)
            signed = "".join(f"{name}:{' '.join(lines[name].split())}\n" for name in names)
            canonical = f"{method}\n{target}\n{asked}\n{signed}\n{';'.join(names)}\n{body}"
            scope = f"{now[:8]}/{self._region}/s3/aws4_request"
            text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
            key = self._key_of(now[:8])
            signature = hmac.digest(key, text.encode(), "sha256").hex()
            lines["authorization"] = (
                f"AWS4-HMAC-SHA256 Credential={self._credentials.access_key_id}/{scope}, "
                f"SignedHeaders={';'.join(names)}, Signature={signature}"
            )
            signer = ChunkSigner(key, f"{now}\n{scope}", signature)
        head = f"{method} {target}{'?' if asked else ''}{asked} HTTP/1.1\r\n"
        return (head + "".join(f"{n}: {v}\r\n" for n, v in lines.items()) + "\r\n").encode(), signer

    def _key_of(self, day: str) -> bytes:
        """It is of one day, and is derived once."""
        if day != self._day:
            assert self._credentials is not None
            self._day, self._key = day, signing_key(self._credentials.secret_access_key, day, self._region)
        return self._key


_NOT_SIGNED = frozenset(("content-length", "expect", "connection"))
_SIGNATURE_BYTES = 64


class ChunkSigner:
    """Signs the chunks of one body, in order: each signature is of all before as well."""

    def __init__(self, key: bytes, scope: str, signature: str) -> None:
        self._key = key
        self._scope = scope
        self._last = signature

    def chunk(self, data: bytes) -> bytes:
        """A chunk as it is sent; an empty one is the last."""
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{self._scope}\n{self._last}\n{_NO_BODY}\n{hashlib.sha256(data).hexdigest()}"
        self._last = hmac.digest(self._key, text.encode(), "sha256").hex()
        return b"%x;chunk-signature=%s\r\n%s\r\n" % (len(data), self._last.encode(), data)


def chunked_bytes(size_bytes: int, chunk_bytes: int) -> int:
    """How long a body is in signed chunks of that size, the empty one included."""
    whole, rest = divmod(size_bytes, chunk_bytes)
    sizes = [(whole, chunk_bytes), (1 if rest else 0, rest), (1, 0)]
    around = len(";chunk-signature=") + _SIGNATURE_BYTES + 4
    return sum(count * (len(f"{size:x}") + around + size) for count, size in sizes)


def _quoted(text: str) -> str:
    return quote(text, safe="-._~")
