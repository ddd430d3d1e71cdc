"""Reads of S3 objects by plain GETs, where the way there is plain HTTP: for a small object a whole client costs several
times what its bytes do. What is out of the ordinary it leaves to that client.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import NamedTuple
from urllib.parse import urlsplit

from stoker.cache.origin.content import seconds_of, tag_of_version, told_headers, version_of_tag
from stoker.cache.origin.http_gets import Connection, HttpGets
from stoker.cache.origin.s3_signing import Credentials, Signer, is_plain
from stoker.errors import OriginError
from stoker.wire.http import ResponseHead

_DIGITS_MAX = 18


class Found(NamedTuple):
    """What an answer says, and what it came on; `status` is 206, 404, 412 or 416, and only 206 has a body for us.

    `start` and `stop`: the bytes of the object that come, which has `size_bytes` in all. `modified_s` and `headers`:
    see ObjectInfo; headers only where no version was asked for.
    """

    status: int
    connection: Connection
    version: str = ""
    start: int = 0
    stop: int = 0
    size_bytes: int = 0
    modified_s: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()


class DirectReads:
    """Of one bucket."""

    def __init__(
        self,
        url: str,
        endpoint: str,
        bucket: str,
        region: str,
        credentials: Credentials | None,
        part_bytes: int,
    ) -> None:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        self._url = url
        self._below = f"{parts.path.rstrip('/')}/{bucket}/"
        self._signer = Signer(parts.netloc.rpartition("@")[2], region, credentials)
        self._gets = HttpGets(url, host, parts.port or 80, part_bytes)
        self._second = 0
        self._now = ""

    @staticmethod
    def can_reach(endpoint: str) -> bool:
        """Whether the way there is plain HTTP."""
        return endpoint.startswith("http://")

    def can_name(self, path: str) -> bool:
        """Whether this path is every client's name for the same object."""
        return is_plain(path)

    async def get(self, path: str, start: int, stop: int, version: str = "") -> Found | None:
        """Bytes `[start, stop)` of an object, or what there is of them; of that version, if one is said. None: it is
        answered in a way that is for a whole client, or not at all: that has the patience to ask again."""
        if not _is_plain_text(version):
            return None
        fields = f"range: bytes={start}-{stop - 1}\r\n" + (
            f"if-match: {tag_of_version(version)}\r\n" if version else ""
        )
        try:
            head, connection = await self._gets.ask(
                self._signer.get(self._below + path, fields, self._time())
            )
        except OriginError:
            return None
        found = _found(head, connection, is_told=not version)
        if found is None or found.status != 206:
            self._gets.leave(connection)
        return found

    def parts(self, found: Found) -> AsyncGenerator[bytearray, None]:
        """The bytes, in parts as they come. Raises OriginError."""
        return self._gets.parts(found.connection)

    def leave(self, found: Found) -> None:
        """Its bytes are not wanted."""
        self._gets.leave(found.connection)

    def close(self) -> None:
        """End all connections."""
        self._gets.close()

    def _time(self) -> str:
        """As it is signed; made once a second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._now = second, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        return self._now


def _found(head: ResponseHead, connection: Connection, *, is_told: bool) -> Found | None:
    if head.status in (404, 412, 416):
        return Found(head.status, connection)
    fields = head.headers
    version = version_of_tag(fields.get("etag", ""))
    if head.status != 206 or "content-encoding" in fields or not version or not _is_plain_text(version):
        return None
    unit, _, rest = fields.get("content-range", "").partition(" ")
    span, _, size = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not all(n.isdecimal() and len(n) <= _DIGITS_MAX for n in (first, last, size)):
        return None
    modified_s = seconds_of(fields.get("last-modified", ""))
    span_and_size = int(first), int(last) + 1, int(size)
    headers = told_headers(fields) if is_told else ()
    found = Found(206, connection, version, *span_and_size, modified_s, headers)
    return found if connection.length_bytes == found.stop - found.start else None


def _is_plain_text(text: str) -> bool:
    """Whether it can be said in a header line as it is."""
    return text.isascii() and (text.isprintable() or not text)
