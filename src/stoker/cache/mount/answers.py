"""Answers and notices of FUSE into bytes, as `requests.py` has the requests. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import NamedTuple

from stoker.cache.mount.requests import MAJOR, MINOR, Init, InitRequest

BLOCK_BYTES = 4096
NAME_BYTES_MAX = 255
"""Of a file or folder."""


class Open(IntFlag):
    """How an opened file is to be read."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NONSEEKABLE = 1 << 2
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class Notice(IntEnum):
    """What the daemon tells the kernel unasked."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6
    RESEND = 7


class Attr(NamedTuple):
    """What `stat` tells of a file or folder. `mode`: with its kind."""

    inode: int
    size_bytes: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    links: int = 1


class DirEntry(NamedTuple):
    """Of a folder. `offset`: what reading goes on with after it. `attr` and `valid_s`: in READDIRPLUS; `node` 0: the
    kernel is not to remember it."""

    name: bytes
    inode: int
    offset: int
    kind: int
    node: int = 0
    attr: Attr | None = None
    valid_s: float = 0.0


_OUT = struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_DIRENT = struct.Struct("=QQII")
_STATFS = struct.Struct("=QQQQQIIII24x")
_U32_U32 = struct.Struct("=II")


def answer(unique: int, *parts: bytes | memoryview) -> bytes:
    """To a request, done."""
    return _OUT.pack(_OUT.size + sum(map(len, parts)), 0, unique) + b"".join(parts)


def head(unique: int, size_bytes: int) -> bytes:
    """To a request, done: what comes before so many bytes, in the same write."""
    return _OUT.pack(_OUT.size + size_bytes, 0, unique)


def refusal(unique: int, code: int) -> bytes:
    """To a request that cannot be done, for a reason out of `errno`."""
    return _OUT.pack(_OUT.size, -code, unique)


def init(
    asked: InitRequest, flags: int, *, write_bytes_max: int, readahead_bytes: int, background_max: int
) -> bytes:
    """What the daemon wants of what the kernel can."""
    agreed = flags & asked.flags
    pages = -(-write_bytes_max // BLOCK_BYTES)
    return _INIT_OUT.pack(
        MAJOR, min(MINOR, asked.minor), min(readahead_bytes, asked.max_readahead_bytes), agreed & 0xFFFFFFFF,
        background_max, background_max * 3 // 4, write_bytes_max, 1, pages, 0, agreed >> 32,
        1 if agreed & Init.PASSTHROUGH else 0,
    )  # fmt: skip


def entry(node: int, attr: Attr, entry_valid_s: float, attr_valid_s: float, generation: int = 0) -> bytes:
    """To LOOKUP. Node 0: there is nothing, which is to be remembered."""
    name_s, name_ns = _valid(entry_valid_s)
    attr_s, attr_ns = _valid(attr_valid_s)
    return _ENTRY.pack(node, generation, name_s, attr_s, name_ns, attr_ns) + _packed(attr)


def attributes(attr: Attr, valid_s: float) -> bytes:
    """To GETATTR."""
    return _ATTR_OUT.pack(*_valid(valid_s), 0) + _packed(attr)


def opened(handle: int, flags: int, backing_id: int = 0) -> bytes:
    """To OPEN and OPENDIR."""
    return _OPEN_OUT.pack(handle, flags, backing_id)


def directory(entries: Iterable[DirEntry], size_bytes: int, *, is_plus: bool) -> tuple[bytes, int]:
    """To READDIR and READDIRPLUS: as many as have room, and how many those are."""
    parts: list[bytes] = []
    left, count = size_bytes, 0
    for one in entries:
        head = b""
        if is_plus:
            attr = one.attr or Attr(one.inode, 0, 0, one.kind << 12, 0, 0)
            head = entry(one.node, attr, one.valid_s, one.valid_s)
        packed = head + _DIRENT.pack(one.inode, one.offset, len(one.name), one.kind) + one.name
        packed += bytes(-len(packed) % 8)
        left -= len(packed)
        if left < 0:
            break
        parts.append(packed)
        count += 1
    return b"".join(parts), count


def entry_bytes(name: bytes, *, is_plus: bool) -> int:
    """The room of one entry of READDIR or READDIRPLUS."""
    size_bytes = _DIRENT.size + len(name)
    return size_bytes + -size_bytes % 8 + (_ENTRY.size + _ATTR.size if is_plus else 0)


def statfs(total_bytes: int, free_bytes: int, files: int) -> bytes:
    """To STATFS."""
    blocks, free = total_bytes // BLOCK_BYTES, free_bytes // BLOCK_BYTES
    return _STATFS.pack(blocks, free, free, files, 0, BLOCK_BYTES, NAME_BYTES_MAX, BLOCK_BYTES, 0)


def size(size_bytes: int) -> bytes:
    """To GETXATTR and LISTXATTR that ask how large it is; to WRITE, how much was taken."""
    return _U32_U32.pack(size_bytes, 0)


def notice(code: Notice, *parts: bytes) -> bytes:
    """Unasked."""
    return _OUT.pack(_OUT.size + sum(map(len, parts)), code, 0) + b"".join(parts)


def stale_content(node: int) -> bytes:
    """What the kernel holds of a file's content and attributes is not so any more."""
    return notice(Notice.INVAL_INODE, struct.pack("=Qqq", node, 0, 0))


def stale_name(parent: int, name: bytes) -> bytes:
    """The kernel is to ask again what there is of that name."""
    return notice(Notice.INVAL_ENTRY, struct.pack("=QII", parent, len(name), 0), name, b"\0")


def send_again() -> bytes:
    """What was read from the device and has no answer is to be read again."""
    return notice(Notice.RESEND)


def _valid(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * 1e9)


def _packed(attr: Attr) -> bytes:
    time_s, time_ns = divmod(attr.mtime_ns, 1_000_000_000)
    return _ATTR.pack(
        attr.inode, attr.size_bytes, -(-attr.size_bytes // 512), time_s, time_s, time_s, time_ns, time_ns, time_ns,
        attr.mode, attr.links, attr.uid, attr.gid, 0, BLOCK_BYTES, 0,
    )  # fmt: skip
