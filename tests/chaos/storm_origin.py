"""An S3 origin over real HTTP whose objects can be told from their name and version, and which fails on demand."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from functools import lru_cache
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_servers import QuietHandler, QuietServer

SMALL, LARGE = 300, 12
SMALL_BYTES = (1, 500, 20_000, 300_000)
LARGE_BYTES = 9_000_000
LIE_BYTES = 1000
PAGE_BYTES = 4096


def names() -> list[str]:
    return [f"s/{n:04}" for n in range(SMALL)] + [f"big/{n:02}" for n in range(LARGE)]


def content(key: str, version: int) -> bytes:
    """Every page tells of the key, the version and its place: no mixture of two looks like one."""
    if key.startswith("big/"):
        return _large(key, version)
    return _pages(key, version, SMALL_BYTES[int(key[2:]) % len(SMALL_BYTES)])


@lru_cache(maxsize=24)
def _large(key: str, version: int) -> bytes:
    return _pages(key, version, LARGE_BYTES)


def _pages(key: str, version: int, size_bytes: int) -> bytes:
    stamp = hashlib.sha256(f"{key}@{version}".encode()).digest()[:24]
    pages = range(-(-size_bytes // PAGE_BYTES))
    return b"".join((stamp + page.to_bytes(8, "big")) * (PAGE_BYTES // 32) for page in pages)[:size_bytes]


class StormOrigin(QuietServer):
    """`mood`: ok, slow, refusing (503), cutting (bodies end early), lying (objects are longer, as it says).

    `requests` counts all that was asked, `reads` whole answers by key, version and first byte.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.mood = "ok"
        self.lock = threading.Lock()
        self.versions = dict.fromkeys(names(), 0)
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self.read_bytes = 0
        self.requests = 0

    @property
    def url(self) -> str:
        return f"s3://bucket?endpoint={super().url}"


class _Handler(QuietHandler):
    server: StormOrigin

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests += 1
        if self.server.mood == "refusing":
            self._say(503, b"<Error><Code>SlowDown</Code></Error>")
            return
        if self.server.mood == "slow":
            time.sleep(0.3)
        parts = urlsplit(self.path)
        key = unquote(parts.path.removeprefix("/bucket").lstrip("/"))
        if not key:
            self._list(parse_qs(parts.query))
            return
        with self.server.lock:
            version = self.server.versions.get(key)
        if version is None:
            self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = f'"{version}"'
        if self.headers.get("If-Match") not in (None, tag):
            self._say(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self._object(key, version, tag)

    def _object(self, key: str, version: int, tag: str) -> None:
        body, first, status = content(key, version), 0, 200
        total = len(body) + LIE_BYTES * (self.server.mood == "lying")
        asked = self.headers.get("Range")
        if asked:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}")
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", str(total if is_head and status == 200 else len(body)))
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if is_head:
            return
        if self.server.mood == "cutting" and len(body) > 1:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)
        with self.server.lock:
            self.server.reads[key, version, first] += 1
            self.server.read_bytes += len(body)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        with self.server.lock:
            versions = {k: v for k, v in self.server.versions.items() if k.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(content(key, version))}</Size><ETag>&quot;{version}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, version in sorted(versions.items())
        )
        listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._say(200, listing.encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
