"""Requests of FUSE out of bytes, as Linux has them in include/uapi/linux/fuse.h. Pure.

All integers are in the machine's own order. Times are seconds and nanoseconds since 1970, sizes bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import NamedTuple

from stoker.errors import WireError

MAJOR, MINOR = 7, 40
"""Spoken here; kernels that have more speak this much. From 7.40 on passthrough exists, and requests are sent again."""
MINOR_MIN = 31
ROOT = 1
"""The node that the mount's own folder is."""
RESENT = 1 << 63
"""In a request's number: it was read before, by a daemon that did not answer."""


class Opcode(IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46


class Init(IntFlag):
    """What kernel and daemon can do; the upper half is a word of its own."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


class Header(NamedTuple):
    """Of a request. `unique`: its number, which the answer has; `node`: what it is about."""

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int


class InitRequest(NamedTuple):
    """The first one."""

    major: int
    minor: int
    max_readahead_bytes: int
    flags: int


class Name(NamedTuple):
    """LOOKUP, UNLINK, RMDIR, REMOVEXATTR."""

    name: bytes


class Forget(NamedTuple):
    """FORGET, BATCH_FORGET: of each node, how many lookups the kernel has let go of."""

    lookups: tuple[tuple[int, int], ...]


class Opening(NamedTuple):
    """OPEN, OPENDIR."""

    flags: int


class Reading(NamedTuple):
    """READ, READDIR, READDIRPLUS."""

    handle: int
    offset: int
    size_bytes: int


class Closing(NamedTuple):
    """RELEASE, RELEASEDIR, FLUSH, FSYNC, FSYNCDIR."""

    handle: int


class Writing(NamedTuple):
    """WRITE."""

    handle: int
    offset: int
    data: bytes


class Creating(NamedTuple):
    """CREATE, MKDIR."""

    flags: int
    mode: int
    name: bytes


class Renaming(NamedTuple):
    """RENAME, RENAME2."""

    to_node: int
    flags: int
    name: bytes
    to_name: bytes


class Changing(NamedTuple):
    """SETATTR. `valid`: which of the others count."""

    valid: int
    handle: int
    size_bytes: int
    mode: int
    uid: int
    gid: int


class Attribute(NamedTuple):
    """GETXATTR; LISTXATTR without a name. `size_bytes` 0: how large it is."""

    size_bytes: int
    name: bytes


class Access(NamedTuple):
    """ACCESS."""

    mask: int


class Seeking(NamedTuple):
    """LSEEK."""

    handle: int
    offset: int
    whence: int


class Interrupt(NamedTuple):
    """Nobody waits for the answer to that request any more."""

    unique: int


class Nothing(NamedTuple):
    """All that is in the header."""


Body = (
    InitRequest | Name | Forget | Opening | Reading | Closing | Writing | Creating | Renaming | Changing | Attribute
    | Access | Seeking | Interrupt | Nothing
)  # fmt: skip


class Request(NamedTuple):
    """What the kernel asks for."""

    header: Header
    body: Body


_HEADER = struct.Struct("=IIQQIIIHH")
_INIT_IN = struct.Struct("=IIII")
_READ = struct.Struct("=QQI")
_WRITE_HEAD_BYTES = 40
_SETATTR = struct.Struct("=IIQQQQQQIIIIIIII")
_U32, _U64, _U32_U32 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=II")


def parse(data: bytes | memoryview) -> Request:
    """One request, as it was read from the device. Raises WireError for what is none; an opcode that is not known here
    is not."""
    if len(data) < _HEADER.size:
        raise WireError(f"a request of FUSE has at least {_HEADER.size} bytes, not {len(data)}")
    size_bytes, opcode, unique, node, uid, gid, pid, extra, _ = _HEADER.unpack_from(data)
    if size_bytes != len(data) or extra * 8 > size_bytes - _HEADER.size:
        raise WireError(f"a request of FUSE says that it has {size_bytes} bytes, and has {len(data)}")
    header = Header(opcode, unique, node, uid, gid, pid)
    body = bytes(data[_HEADER.size : size_bytes - extra * 8])
    read = _BODIES.get(opcode)
    try:
        return Request(header, Nothing() if read is None else read(node, body))
    except (struct.error, ValueError) as error:
        raise WireError(f"a request of FUSE with opcode {opcode} cannot be understood: {error}") from error


def _init(_: int, body: bytes) -> InitRequest:
    major, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if flags & Init.INIT_EXT and len(body) >= _INIT_IN.size + 4:
        flags |= int(_U32.unpack_from(body, _INIT_IN.size)[0]) << 32
    return InitRequest(major, minor, readahead, flags)


def _names(body: bytes, count: int = 1) -> list[bytes]:
    parts = body.split(b"\0")
    if len(parts) <= count:
        raise ValueError("a name does not end")
    return parts[:count]


def _batch_forget(_: int, body: bytes) -> Forget:
    (count,) = _U32.unpack_from(body)
    return Forget(tuple(struct.iter_unpack("=QQ", body[8 : 8 + 16 * count])))


def _write(_: int, body: bytes) -> Writing:
    handle, offset, size_bytes = _READ.unpack_from(body)
    data = body[_WRITE_HEAD_BYTES : _WRITE_HEAD_BYTES + size_bytes]
    if len(data) != size_bytes:
        raise ValueError(f"{len(data)} bytes came of {size_bytes}")
    return Writing(handle, offset, data)


def _setattr(_: int, body: bytes) -> Changing:
    found = _SETATTR.unpack_from(body)
    return Changing(found[0], found[2], found[3], found[11], found[13], found[14])


def _name(_: int, body: bytes) -> Name:
    return Name(*_names(body))


def _open(_: int, body: bytes) -> Opening:
    return Opening(*_U32.unpack_from(body))


def _read(_: int, body: bytes) -> Reading:
    return Reading(*_READ.unpack_from(body))


def _close(_: int, body: bytes) -> Closing:
    return Closing(*_U64.unpack_from(body))


def _renaming(to_node: int, flags: int, names: bytes) -> Renaming:
    name, to_name = _names(names, 2)
    return Renaming(to_node, flags, name, to_name)


_BODIES: dict[int, Callable[[int, bytes], Body]] = {
    Opcode.INIT: _init,
    Opcode.FORGET: lambda node, body: Forget(((node, *_U64.unpack_from(body)),)),
    Opcode.BATCH_FORGET: _batch_forget,
    Opcode.WRITE: _write,
    Opcode.CREATE: lambda _, body: Creating(*_U32_U32.unpack_from(body), *_names(body[16:])),
    Opcode.MKDIR: lambda _, body: Creating(0, *_U32.unpack_from(body), *_names(body[8:])),
    Opcode.RENAME: lambda _, body: _renaming(_U64.unpack_from(body)[0], 0, body[8:]),
    Opcode.RENAME2: lambda _, body: _renaming(
        _U64.unpack_from(body)[0], _U32.unpack_from(body, 8)[0], body[16:]
    ),
    Opcode.SETATTR: _setattr,
    Opcode.GETXATTR: lambda _, body: Attribute(_U32.unpack_from(body)[0], _names(body[8:])[0]),
    Opcode.LISTXATTR: lambda _, body: Attribute(_U32.unpack_from(body)[0], b""),
    Opcode.ACCESS: lambda _, body: Access(*_U32.unpack_from(body)),
    Opcode.LSEEK: lambda _, body: Seeking(*struct.unpack_from("=QQI", body)),
    Opcode.INTERRUPT: lambda _, body: Interrupt(*_U64.unpack_from(body)),
    **dict.fromkeys((Opcode.LOOKUP, Opcode.UNLINK, Opcode.RMDIR, Opcode.REMOVEXATTR), _name),
    **dict.fromkeys((Opcode.OPEN, Opcode.OPENDIR), _open),
    **dict.fromkeys((Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS), _read),
    **dict.fromkeys((Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.FLUSH, Opcode.FSYNC, Opcode.FSYNCDIR), _close),
}
