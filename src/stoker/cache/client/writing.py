"""Writing objects through a cache, to their origin."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from stoker.cache.client.transport import Transport
from stoker.errors import CacheUnavailable, WireError, WrongBodyLength
from stoker.wire.cache_writes import COPY, SHA256, Written
from stoker.wire.http import check_key, object_target

if TYPE_CHECKING:
    from stoker.cache.client.client import CacheClient

T = TypeVar("T")
_PART_BYTES = 1024 * 1024


class WritingClient(ABC):
    """Of buckets that may be written to. What returns is at the origin, and no server of the fleet answers with what
    was there before. Every method may raise WriteRefused, AccessDenied and ObjectNotFound (for the bucket), after
    which nothing was done; and CacheUnavailable and OriginError, after which nobody knows."""

    _transport: Transport

    @abstractmethod
    def servers(self) -> Sequence[CacheClient]: ...

    def put(self, bucket: str, key: str, file: BinaryIO, size_bytes: int) -> Written:
        """Put what a file has from where it is read next, so many bytes; it is read twice. Raises WrongBodyLength where
        there are not so many."""
        start = file.tell()
        headers = f"{SHA256}: {_sha256(file, size_bytes)}\r\n".encode()

        def put(server: CacheClient) -> Written:
            file.seek(start)
            return _written(server._transport.send(_target(bucket, key), headers, file, size_bytes))

        return self._by_some(bucket, key, put)

    def copy(self, bucket: str, key: str, to: str) -> Written:
        """Put what another object holds, without its bytes coming here. Raises ObjectNotFound."""
        headers = f"{COPY}: {_target(bucket, key)}\r\n".encode()

        def copy(server: CacheClient) -> Written:
            return _written(server._transport.write("PUT", _target(bucket, to), headers))

        return self._by_some(bucket, to, copy)

    def remove(self, bucket: str, key: str) -> None:
        """Remove an object; that there is none is no error."""
        self._by_some(
            bucket, key, lambda server: server._transport.write("DELETE", _target(bucket, key), b"")
        )

    def _by_some(self, bucket: str, key: str, write: Callable[[CacheClient], T]) -> T:
        """By any server, as each writes for itself; what is written twice is the same."""
        servers = self.servers()
        first = zlib.crc32(f"{bucket}/{key}".encode()) % max(1, len(servers))
        last: CacheUnavailable | None = None
        for server in (*servers[first:], *servers[:first]):
            try:
                return write(server)
            except CacheUnavailable as error:
                last = error
        raise last or CacheUnavailable("no cache server is known that could write")


def _target(bucket: str, key: str) -> str:
    return object_target(bucket, check_key(key))


def _sha256(file: BinaryIO, size_bytes: int) -> str:
    made, left = hashlib.sha256(), size_bytes
    while left:
        part = file.read(min(left, _PART_BYTES))
        if not part:
            raise WrongBodyLength(f"{size_bytes} bytes are to be written, and the file ends {left} before")
        made.update(part)
        left -= len(part)
    return made.hexdigest()


def _written(answer: bytes | bytearray) -> Written:
    try:
        return msgspec.msgpack.decode(answer, type=Written)
    except msgspec.DecodeError as error:
        raise WireError(f"the server's answer to a write is not understood: {error}") from error
