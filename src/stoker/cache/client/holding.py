"""What a cache holds of single objects: how much, whole files of it, and what it is to hold soon."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.client.transport import Transport
from stoker.errors import WireError
from stoker.wire.cache_api import HeldObject, LoadAnswer, LoadRequest
from stoker.wire.cache_batch import DESCRIPTOR, FRAME, FRAME_DESCRIPTORS, INSTANCE_BYTES
from stoker.wire.http import check_key, object_target

if TYPE_CHECKING:
    from stoker.cache.client.client import CacheClient

T = TypeVar("T")
_FRAME_BYTES = FRAME.size + INSTANCE_BYTES + DESCRIPTOR.size


class HoldingClient(ABC):
    """Every method may raise CacheUnavailable, AccessDenied and WireError, and ObjectNotFound for the bucket."""

    _transport: Transport

    @abstractmethod
    def call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T: ...

    @abstractmethod
    def servers(self) -> Sequence[CacheClient]:
        """One for each server."""

    def whole_file(self, bucket: str, key: str, version: str) -> int | None:
        """A descriptor, which the caller closes, of a file of the server's that holds exactly this version, complete
        and verified; None, where there is no such file, or none that can be passed. Raises ObjectNotFound,
        ObjectChanged."""
        if not self._transport.takes_descriptors:
            return None
        target = f"/-/whole{object_target(bucket, check_key(key))}?{urlencode({'version': version})}"
        answer, arrived = self._transport.passed(target)
        if not answer:
            return None
        if len(answer) != _FRAME_BYTES or FRAME.unpack_from(answer)[0] != FRAME_DESCRIPTORS:
            raise WireError("the server's answer about a whole file is not understood")
        _, device, inode = DESCRIPTOR.unpack_from(answer, FRAME.size + INSTANCE_BYTES)
        for descriptor in arrived:
            if descriptor.identity == (device, inode):
                return os.dup(descriptor.fd)
        return None  # it got lost: this process has too many open

    def held(self, bucket: str, key: str) -> HeldObject:
        """How much is held of the version that is there. Raises ObjectNotFound, OriginError."""
        return self.call("GET", f"/-/loaded{object_target(bucket, check_key(key))}", HeldObject)

    def begin_load(self, bucket: str, keys: Sequence[str]) -> None:
        """As `load`, but nobody waits for it, or is told how it went."""
        request = msgspec.msgpack.encode(LoadRequest(list(keys)))
        self.call("POST", f"/-/load/{quote(bucket, safe='')}?begin=1", LoadAnswer, request)
