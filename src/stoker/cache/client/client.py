"""The blocking client: pooled keep-alive connections, safe between threads and across forks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.client.batch import split_frames
from stoker.cache.client.connection import Connection, Endpoint
from stoker.errors import CacheUnavailable, OriginError, StokerError, WireError
from stoker.wire.cache_api import (
    LIST_LIMIT_MAX,
    MSGPACK,
    READ_KEYS_MAX,
    BucketSpec,
    CacheStatus,
    ErrorBody,
    ObjectInfo,
    ObjectPage,
    ReadRequest,
    Refreshed,
    error_of,
)
from stoker.wire.http import ResponseHead, check_key, etag_of, object_target, version_of

T = TypeVar("T")
_TRIES = 2


class CacheClient:
    """Talks to one cache server at `http://host:port` or `unix:///path`; connects when first used.

    `timeout_s` is the longest silence of the server, in seconds, before CacheUnavailable. Every method may
    raise CacheUnavailable, AccessDenied and WireError.
    """

    def __init__(self, endpoint: str, token: str | None = None, *, timeout_s: float = 30.0) -> None:
        self._endpoint = Endpoint(endpoint)
        self._timeout_s = timeout_s
        headers = f"Host: {self._endpoint.host}\r\nAccept: {MSGPACK}\r\n"
        if token is not None:
            headers += f"Authorization: Bearer {token}\r\n"
        self._headers = headers.encode("latin-1")
        self._pool: deque[Connection] = deque()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Where the server is."""
        return self._endpoint.url

    def read(
        self, bucket: str, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        """Bytes `[start, stop)` of an object; to its end without `stop`; fewer where the object ends before.

        With `version`, exactly that version's bytes. Raises ObjectNotFound, ObjectChanged, OriginError.
        """
        headers = b"" if version is None else f"If-Match: {etag_of(version)}\r\n".encode("latin-1")
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"bytes [{start}, {stop}) are not a range")
        if stop is not None and stop == start:
            return b""
        if start or stop is not None:
            headers += b"Range: bytes=%d-%b\r\n" % (start, b"" if stop is None else b"%d" % (stop - 1))
        head, body = self._request("GET", object_target(bucket, check_key(key)), headers, accept=(416,))
        return b"" if head.status == 416 else bytes(body)

    def read_many(self, bucket: str, keys: Sequence[str]) -> list[bytes]:
        """Whole objects, in the order of `keys`, by one request.

        Raises the error of the first that failed, which names its key: ObjectNotFound, ObjectChanged,
        OriginError.
        """
        items: list[bytes] = []
        for first in range(0, len(keys), READ_KEYS_MAX):
            part = list(keys[first : first + READ_KEYS_MAX])
            request = msgspec.msgpack.encode(ReadRequest(bucket, part))
            _, body = self._request("POST", "/-/read", body=request)
            items += split_frames(body, bucket, part)
        return items

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        """Size in bytes and version of an object. Raises ObjectNotFound, OriginError."""
        # A HEAD answer has no body to name the error in, so the first byte is asked for instead.
        head, _ = self._request(
            "GET", object_target(bucket, check_key(key)), b"Range: bytes=0-0\r\n", accept=(416,)
        )
        if head.status == 416:
            return ObjectInfo(key, 0, self._empty_version(bucket, key))
        total = head.headers.get("content-range", "").rpartition("/")[2] or head.headers.get(
            "content-length", "0"
        )
        return ObjectInfo(key, int(total), version_of(head.headers.get("etag", "")))

    def list_objects(self, bucket: str, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose keys start with `prefix`, sorted by key. Raises ObjectNotFound for the bucket."""
        try:
            return self._list_once(bucket, prefix)
        except OriginError:
            # Among others: an origin that lists out of order is only noticed on the way.
            return self._list_once(bucket, prefix)

    def _list_once(self, bucket: str, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        after: str | None = None
        while True:
            page = self.list_page(bucket, prefix, after, LIST_LIMIT_MAX)
            found += page.objects
            if page.after is None:
                return found
            after = page.after

    def list_page(self, bucket: str, prefix: str, after: str | None, limit: int) -> ObjectPage:
        """At most `limit` objects that come after the key `after`."""
        query = {"prefix": prefix, "limit": str(limit)} | ({} if after is None else {"after": after})
        return self._call("GET", f"/-/list/{quote(bucket, safe='')}?{urlencode(query)}", ObjectPage)

    def add_bucket(
        self,
        name: str,
        origin_url: str,
        *,
        policy: str = "lru",
        ttl_s: float = 3600.0,
        stale_if_error_s: float = 86400.0,
    ) -> None:
        """Add a bucket; nothing happens if the very same is there. Raises ConfigError if another one is."""
        spec = BucketSpec(origin_url, policy, ttl_s, stale_if_error_s)
        self._call("PUT", f"/-/buckets/{quote(name, safe='')}", BucketSpec, msgspec.json.encode(spec))

    def status(self) -> CacheStatus:
        """The server's figures."""
        return self._call("GET", "/-/status", CacheStatus)

    def refresh(self, bucket: str, prefix: str = "") -> int:
        """Make the next reader of each key under `prefix` ask the origin. Returns how many keys."""
        target = f"/-/refresh/{quote(bucket, safe='')}?{urlencode({'prefix': prefix})}"
        return self._call("POST", target, Refreshed, b"").dropped

    def close(self) -> None:
        """Close the pooled connections. The client may be used again."""
        with self._lock:
            pool, self._pool = self._pool, deque()
        for connection in pool:
            connection.close()

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        for connection in getattr(self, "_pool", ()):
            connection.close()

    def __getstate__(self) -> dict[str, object]:
        return {"endpoint": self._endpoint.url, "headers": self._headers, "timeout_s": self._timeout_s}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(str(state["endpoint"]), timeout_s=float(str(state["timeout_s"])))  # type: ignore[misc]
        self._headers = bytes(state["headers"])  # type: ignore[call-overload]

    def _empty_version(self, bucket: str, key: str) -> str:
        head, _ = self._request("GET", object_target(bucket, key))
        return version_of(head.headers.get("etag", ""))

    def _call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        _, answer = self._request(method, target, body=body)
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise WireError(f"the server's answer to {method} {target} is not understood: {error}") from error

    def _request(
        self,
        method: str,
        target: str,
        headers: bytes = b"",
        body: bytes | None = None,
        accept: tuple[int, ...] = (),
    ) -> tuple[ResponseHead, bytes | bytearray]:
        lines = f"{method} {target} HTTP/1.1\r\n".encode("ascii") + self._headers + headers
        if body is not None:
            lines += b"Content-Length: %d\r\n" % len(body)
        request = lines + b"\r\n" + (body or b"")
        failed = 0
        while True:
            connection = None
            try:
                connection = self._take()
                head = connection.ask(request, self._timeout_s)
                answer = connection.body(head)
            except OSError as error:
                was_used = connection is not None and connection.was_used
                if connection is not None:
                    connection.close()
                # A kept connection that the server has closed meanwhile is no failure of the server.
                failed += 0 if was_used and not isinstance(error, TimeoutError) else 1
                if failed >= _TRIES or isinstance(error, TimeoutError):
                    raise self._unavailable(error) from error
                continue
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            self._give(connection)
            if head.status >= 400 and head.status not in accept:
                raise _failure(head, answer)
            return head, answer

    def _take(self) -> Connection:
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            if self._pool:
                return self._pool.pop()
        return Connection(self._endpoint.connect(self._timeout_s))

    def _give(self, connection: Connection) -> None:
        if not connection.is_reusable:
            connection.close()
            return
        with self._lock:
            self._pool.append(connection)

    def _after_fork(self) -> None:
        """The parent's sockets are closed here, which the parent does not notice; its lock may be held."""
        self._lock = threading.Lock()
        pool, self._pool = self._pool, deque()
        self._pid = os.getpid()
        for connection in pool:
            connection.close()

    def _unavailable(self, error: OSError) -> CacheUnavailable:
        what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return CacheUnavailable(
            f"no cache server answers at {self._endpoint.url} ({what}); "
            "start one with `stoker cache serve`, or check the endpoint"
        )


def _failure(head: ResponseHead, body: bytes | bytearray) -> StokerError:
    try:
        return error_of(msgspec.json.decode(bytes(body), type=ErrorBody))
    except msgspec.DecodeError:
        return WireError(f"the server answered {head.status}: {bytes(body[:200])!r}")
