"""Take a batch answer apart."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stoker.cache.client.descriptors import Places
from stoker.errors import WireError
from stoker.wire.cache_api import ErrorBody, error_of
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_DATA,
    FRAME_DESCRIPTORS,
    FRAME_ERROR,
    FRAME_LAST,
    FRAME_PLACE,
    PLACE,
)


def split_frames(
    body: bytes | bytearray, bucket: str, keys: Sequence[str], places: Places | None = None
) -> list[bytes | None]:
    """The objects in the order of `keys`; None for one whose place cannot be read.

    Raises the typed error of the first that failed; WireError.
    """
    unpack, size = FRAME.unpack_from, FRAME.size
    view = memoryview(body)
    items: list[bytes | None] = []
    parts: list[bytes] = []
    position, end = 0, len(body)
    while position < end:
        if position + size > end:
            raise WireError("the batch answer ends inside a frame")
        kind, length = unpack(body, position)
        start = position + size
        position = start + length
        if position > end:
            raise WireError("the batch answer ends inside an object")
        if kind == FRAME_LAST:
            data = bytes(view[start:position])
            items.append(b"".join((*parts, data)) if parts else data)
            parts = []
        elif kind == FRAME_PLACE and places is not None and length == PLACE.size:
            item_bytes, container, offset = PLACE.unpack_from(body, start)
            items.append(places.read(container, offset, item_bytes))
        elif kind == FRAME_DATA:
            parts.append(bytes(view[start:position]))
        elif kind == FRAME_DESCRIPTORS and places is not None:
            places.take(bytes(view[start:position]))
        elif kind == FRAME_ERROR:
            raise _error(bytes(view[start:position]), bucket, keys, len(items))
        else:
            raise WireError(f"the batch answer has a frame of unknown kind {kind}")
    if len(items) != len(keys) or parts:
        raise WireError(f"the batch answer has {len(items)} objects, {len(keys)} were asked for")
    return items


def _error(frame: bytes, bucket: str, keys: Sequence[str], position: int) -> Exception:
    key = keys[position] if position < len(keys) else "?"
    body = msgspec.msgpack.decode(frame, type=ErrorBody)
    message = body.message if repr(key) in body.message else f"{bucket}/{key}: {body.message}"
    return error_of(ErrorBody(body.code, message))
