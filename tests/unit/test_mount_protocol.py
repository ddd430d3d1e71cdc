"""What is read from and written to the FUSE device, against the layout of the kernel's own header."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.mount import answers
from stoker.cache.mount.requests import (
    Access,
    Attribute,
    Body,
    Changing,
    Closing,
    Creating,
    Forget,
    Header,
    Init,
    InitRequest,
    Interrupt,
    Name,
    Nothing,
    Opcode,
    Opening,
    Reading,
    Renaming,
    Seeking,
    Writing,
    parse,
)
from stoker.errors import WireError

HEADER = struct.Struct("=IIQQIIIHH")


def asked(opcode: int, body: bytes, *, extra: bytes = b"") -> bytes:
    size_bytes = HEADER.size + len(body) + len(extra)
    return HEADER.pack(size_bytes, opcode, 7, 3, 1000, 100, 42, len(extra) // 8, 0) + body + extra


@pytest.mark.parametrize(
    ("opcode", "body", "found"),
    [
        (Opcode.LOOKUP, b"a name\0", Name(b"a name")),
        (Opcode.FORGET, struct.pack("=Q", 5), Forget(((3, 5),))),
        (Opcode.BATCH_FORGET, struct.pack("=IIQQQQ", 2, 0, 8, 1, 9, 2), Forget(((8, 1), (9, 2)))),
        (Opcode.GETATTR, struct.pack("=IIQ", 0, 0, 0), Nothing()),
        (Opcode.OPEN, struct.pack("=II", 0o100000, 0), Opening(0o100000)),
        (Opcode.READ, struct.pack("=QQIIQII", 4, 1 << 40, 131072, 0, 0, 0, 0), Reading(4, 1 << 40, 131072)),
        (Opcode.READDIRPLUS, struct.pack("=QQIIQII", 4, 9, 4096, 0, 0, 0, 0), Reading(4, 9, 4096)),
        (Opcode.RELEASE, struct.pack("=QIIQ", 4, 0, 0, 0), Closing(4)),
        (Opcode.FSYNC, struct.pack("=QII", 4, 0, 0), Closing(4)),
        (Opcode.WRITE, struct.pack("=QQIIQII", 4, 6, 3, 0, 0, 0, 0) + b"abc", Writing(4, 6, b"abc")),
        (Opcode.CREATE, struct.pack("=IIII", 2, 0o644, 0, 0) + b"new\0", Creating(2, 0o644, b"new")),
        (Opcode.MKDIR, struct.pack("=II", 0o755, 0) + b"new\0", Creating(0, 0o755, b"new")),
        (Opcode.RENAME, struct.pack("=Q", 9) + b"a\0b\0", Renaming(9, 0, b"a", b"b")),
        (Opcode.RENAME2, struct.pack("=QII", 9, 1, 0) + b"a\0b\0", Renaming(9, 1, b"a", b"b")),
        (
            Opcode.SETATTR,
            struct.pack("=IIQQQQQQIIIIIIII", 8, 0, 4, 99, 0, 1, 2, 3, 4, 5, 6, 0o600, 0, 11, 12, 0),
            Changing(8, 4, 99, 0o600, 11, 12),
        ),
        (Opcode.GETXATTR, struct.pack("=II", 64, 0) + b"user.a\0", Attribute(64, b"user.a")),
        (Opcode.LISTXATTR, struct.pack("=II", 0, 0), Attribute(0, b"")),
        (Opcode.ACCESS, struct.pack("=II", 4, 0), Access(4)),
        (Opcode.LSEEK, struct.pack("=QQII", 4, 10, 3, 0), Seeking(4, 10, 3)),
        (Opcode.INTERRUPT, struct.pack("=Q", 99), Interrupt(99)),
        (Opcode.STATFS, b"", Nothing()),
        (4711, b"whatever", Nothing()),
    ],
)
def test_requests_are_read(opcode: int, body: bytes, found: Body) -> None:
    for extra in (b"", b"a group "):
        request = parse(asked(opcode, body, extra=extra))
        assert request.header == Header(opcode, 7, 3, 1000, 100, 42)
        assert request.body == found


def test_flags_of_both_words_are_read_and_agreed() -> None:
    flags = Init.ASYNC_READ | Init.INIT_EXT | Init.PASSTHROUGH
    body = struct.pack("=IIIII44x", 7, 45, 131072, flags & 0xFFFFFFFF, flags >> 32)
    request = parse(asked(Opcode.INIT, body)).body
    assert request == InitRequest(7, 45, 131072, flags)
    wanted = flags | Init.HAS_RESEND
    said = answers.init(request, wanted, write_bytes_max=1 << 20, readahead_bytes=1 << 20, background_max=64)
    fields = struct.unpack("=IIIIHHIIHHII24x", said)
    assert (fields[:3], fields[6], fields[8]) == ((7, 40, 131072), 1 << 20, 256)
    assert fields[3] | fields[10] << 32 == flags
    assert fields[11] == 1
    old = parse(asked(Opcode.INIT, struct.pack("=IIII", 7, 31, 4096, 0xFFFFFFFF))).body
    assert old == InitRequest(7, 31, 4096, 0xFFFFFFFF)
    said = answers.init(old, wanted, write_bytes_max=4096, readahead_bytes=1 << 20, background_max=8)
    fields = struct.unpack("=IIIIHHIIHHII24x", said)
    assert (fields[1], fields[10], fields[11]) == (31, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 39,
        asked(Opcode.LOOKUP, b"no end"),
        asked(Opcode.LOOKUP, b"x\0") + b"more",
        asked(Opcode.OPEN, b"\0"),
        asked(Opcode.WRITE, struct.pack("=QQIIQII", 4, 6, 9, 0, 0, 0, 0) + b"short"),
        asked(Opcode.BATCH_FORGET, struct.pack("=IIQ", 1, 0, 8)),
        HEADER.pack(40, Opcode.STATFS, 7, 3, 0, 0, 0, 1, 0),
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="a request of FUSE"):
        parse(data)


@given(st.sampled_from([*Opcode, 0, 4711]), st.binary(max_size=200))
def test_no_request_crashes_who_reads_it(opcode: int, body: bytes) -> None:
    try:
        assert parse(asked(opcode, body)).header.unique == 7
    except WireError:
        pass


def test_folders_are_told_as_far_as_there_is_room() -> None:
    attr = answers.Attr(5, 10, 1, 0o100444, 0, 0)
    entries = [answers.DirEntry(b"x" * length, 5, length, 8, 6, attr, 1.5) for length in (1, 8, 9)]
    plain, count = answers.directory(entries, 4096, is_plus=False)
    assert (len(plain), count) == (32 + 32 + 40, 3)
    for room, fits in ((31, 0), (32, 1), (63, 1), (64, 2), (103, 2), (104, 3)):
        assert answers.directory(entries, room, is_plus=False)[1] == fits
    full, count = answers.directory(entries, 4096, is_plus=True)
    assert (len(full), count) == (3 * 128 + len(plain), 3)
    node, generation, name_s, attr_s, name_ns, attr_ns = struct.unpack_from("=QQQQII", full)
    assert (node, generation, name_s, attr_s, name_ns, attr_ns) == (6, 0, 1, 1, 500_000_000, 500_000_000)
    assert struct.unpack_from("=QQII", full, 128) == (5, 1, 1, 8)
    assert full[128 + 24 : 128 + 25] == b"x"


def test_answers_and_notices_say_their_length() -> None:
    attr = answers.Attr(5, 1000, 3_000_000_001, 0o100444, 7, 8)
    for said in (
        answers.answer(7, b"ab", b"c"),
        answers.answer(7, answers.entry(3, attr, 60, 1)),
        answers.answer(7, answers.attributes(attr, 60)),
        answers.stale_name(1, b"gone"),
        answers.stale_content(3),
        answers.send_again(),
    ):
        assert struct.unpack_from("=I", said)[0] == len(said)
    assert struct.unpack("=IiQ", answers.refusal(7, 5)) == (16, -5, 7)
    assert struct.unpack_from("=iQ", answers.send_again(), 4) == (7, 0)
    assert struct.unpack_from("=iQQII", answers.stale_name(1, b"gone"), 4) == (3, 0, 1, 4, 0)
    assert answers.stale_name(1, b"gone").endswith(b"gone\0")
    packed = struct.unpack("=QQQQQQIIIIIIIIII", answers.attributes(attr, 60)[16:])
    assert packed[:4] == (5, 1000, 2, 3)
    assert packed[7] == 1
    assert packed[9:13] == (0o100444, 1, 7, 8)
    assert len(answers.statfs(1 << 40, 1 << 39, 5)) == 80
    assert len(answers.opened(1, 0)) == 16
