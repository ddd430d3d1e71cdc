"""Take a batch answer apart."""

from __future__ import annotations

import msgspec

from stoker.cache.client.asked import Asked, Item
from stoker.cache.client.descriptors import Places
from stoker.errors import StokerError, WireError
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_DATA,
    FRAME_DESCRIPTORS,
    FRAME_ERROR,
    FRAME_LAST,
    FRAME_PLACE,
    PLACE,
)
from stoker.wire.cache_errors import ErrorBody, error_of


def split_frames(
    body: bytes | bytearray,
    bucket: str,
    asked: Asked,
    places: Places | None = None,
    *,
    views: bool = False,
) -> list[Item | None]:
    """What came of each thing that was asked for, in order; None for one whose place cannot be read.

    `views`: of the body, instead of copies. Raises WireError.
    """
    unpack, size = FRAME.unpack_from, FRAME.size
    view = memoryview(body).toreadonly()
    items: list[Item | None] = []
    parts: list[memoryview] = []
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
            data = view[start:position]
            if parts:
                data = memoryview(b"".join((*parts, data)))
                parts = []
            items.append(data if views else bytes(data))
        elif kind == FRAME_PLACE and places is not None and length == PLACE.size:
            item_bytes, container, offset = PLACE.unpack_from(body, start)
            items.append(places.read(container, offset, item_bytes, views=views))
        elif kind == FRAME_DATA:
            parts.append(view[start:position])
        elif kind == FRAME_DESCRIPTORS and places is not None:
            places.take(bytes(view[start:position]))
        elif kind == FRAME_ERROR:
            items.append(_error(bytes(view[start:position]), bucket, asked, len(items)))
            parts = []
        else:
            raise WireError(f"the batch answer has a frame of unknown kind {kind}")
    if len(items) != len(asked) or parts:
        raise WireError(f"the batch answer has {len(items)} items, {len(asked)} were asked for")
    return items


def _error(frame: bytes, bucket: str, asked: Asked, position: int) -> StokerError:
    key = asked.key(position) if position < len(asked) else "?"
    try:
        body = msgspec.msgpack.decode(frame, type=ErrorBody)
    except msgspec.DecodeError as error:
        raise WireError(f"the batch answer has an error that is not understood: {error}") from error
    message = body.message if repr(key) in body.message else f"{bucket}/{key}: {body.message}"
    return error_of(ErrorBody(body.code, message))
