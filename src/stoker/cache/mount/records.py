"""What a mount's daemon writes down for the next one, which goes on in its place. Pure.

The kernel speaks of nodes and handles by numbers that it was once told, and does not tell again what they mean. All of
it is written down before the kernel is told: what is written and was never told costs a few bytes. A record is its
length (u32) and that many bytes of msgpack; one that ends early was not written whole, and nothing follows it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from stoker.errors import WireError

_LENGTH = struct.Struct("=I")


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A daemon begins. `number`: which one, from 1 on; `flags`: what was agreed in INIT, 0: nothing yet."""

    number: int
    flags: int
    started_ns: int


class NodeNamed(msgspec.Struct, frozen=True, array_like=True, tag="node"):
    """The kernel is told of a node, and has looked it up so often. `was_plain`: it may be open without anybody having
    written that down."""

    node: int
    path: str
    is_folder: bool
    size_bytes: int
    version: str
    modified_ns: int
    lookups: int
    kind: str = ""
    was_plain: bool = False


class LookedUp(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """Nodes that are known were looked up once more."""

    nodes: list[int]


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """The kernel has let go of so many lookups of each node."""

    lookups: list[tuple[int, int]]


class FileOpened(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """`backing_id` 0: it is read by requests. `request`: the number of the one that this answers."""

    handle: int
    node: int
    backing_id: int
    request: int = 0


class FolderRead(msgspec.Struct, frozen=True, array_like=True, tag="folder"):
    """A folder is open, and of its entries those from number `cookie` on come after the name `after`. `request`: the
    number of the one that opened it."""

    handle: int
    node: int
    cookie: int
    after: str | None
    request: int = 0


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """A file or folder."""

    handle: int


class FileStaged(msgspec.Struct, frozen=True, array_like=True, tag="staged"):
    """A file that is being written. `process`: whose it is; `put_revision`: what the origin has of it, -1: nothing, -2:
    perhaps some; `failure`: why bytes from `failed_at` on could not be written, out of `errno`, or 0. `opener`: who has
    opened it as `handle`, 0: whose it is; `is_closed`: they have closed it. `handle` 0: nobody has it open any more,
    and it has ended."""

    handle: int
    stage: int
    node: int
    path: str
    process: int
    size_bytes: int
    revision: int
    put_revision: int
    is_new: bool = False
    is_removed: bool = False
    is_abandoned: bool = False
    failure: int = 0
    failed_at: int = 0
    opener: int = 0
    is_closed: bool = False


class TakenAgain(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """A daemon has read a request that was read before, by one that did not live to answer it."""

    unique: int


class RequestRead(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """A daemon has read a request, of a kernel that would not send it again."""

    unique: int
    request: bytes


Record = (
    Began
    | NodeNamed
    | LookedUp
    | Forgotten
    | FileOpened
    | FolderRead
    | Closed
    | FileStaged
    | TakenAgain
    | RequestRead
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def packed(record: Record) -> bytes:
    """A record as it is written."""
    body = _encoder.encode(record)
    return _LENGTH.pack(len(body)) + body


def whole_bytes(data: bytes | bytearray) -> int:
    """How much of it was written whole."""
    at = 0
    while at + _LENGTH.size <= len(data):
        behind = at + _LENGTH.size + int(_LENGTH.unpack_from(data, at)[0])
        if behind > len(data):
            break
        at = behind
    return at


def records(data: bytes) -> Iterator[Record]:
    """What was written, one after the other. Raises WireError for what no daemon wrote."""
    at, end = 0, whole_bytes(data)
    while at < end:
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        try:
            yield _decoder.decode(memoryview(data)[at : at + length])
        except msgspec.MsgspecError as error:
            raise WireError(f"the state of the mount is not understood at byte {at}: {error}") from error
        at += length
