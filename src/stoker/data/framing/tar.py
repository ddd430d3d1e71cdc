"""tar files as WebDataset has them: files that follow each other and have one name up to the first dot are one record.

Known are POSIX ustar and pax (long names and sizes), GNU's long names, and sizes of 8 GiB and more.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from stoker.data.framing.scan import Compressed, Malformed, Scan, Spans, Want

BLOCK = 512
_EXTENSION_BYTES_MAX = 1 << 20
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)", re.DOTALL)
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_BYTES = (b"1", b"2", b"3", b"4", b"5", b"6")
_SPARSE = b"S"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_ZEROS = bytes(BLOCK)
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file in the archive: where its bytes are, and where what comes after it begins."""

    name: str
    is_file: bool
    start: int
    stop: int
    next: int


class _Short(Exception):
    """So many bytes are needed to go on."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


def key_of(name: str) -> tuple[str, str] | None:
    """The record that a file belongs to, and what it is of it; None: of none. As WebDataset has it."""
    match = _NAME.match(name)
    if match is None or _META.match(name):
        return None
    return match.group(1), match.group(2).lower()


def scan(size_bytes: int, spans: Spans) -> Scan:
    """Find the records of an object; only heads are looked at."""
    at, wanted = 0, BLOCK
    record: tuple[str, int, int] | None = None
    while at < size_bytes:
        data = yield Want(at, wanted)
        base, wanted = at, BLOCK
        while at < size_bytes:
            try:
                member = _member(data, at - base, base)
            except _Short as short:
                wanted = short.size_bytes
                if at + wanted > size_bytes:
                    raise Malformed(
                        "the archive ends inside the head of a file: it was cut off", at
                    ) from None
                break
            if member is None:
                at = size_bytes
                break
            if base + member.stop > size_bytes:
                raise Malformed(
                    f"the file {member.name!r} ends at byte {base + member.stop}, the object at {size_bytes}: "
                    "it was cut off", at,
                )  # fmt: skip
            named = key_of(member.name) if member.is_file else None
            if named is not None and record is not None and named[0] == record[0]:
                record = (record[0], record[1], base + member.stop)
            elif named is not None:
                if record is not None:
                    spans.add(record[1], record[2])
                record = (named[0], at, base + member.stop)
            at = base + member.next
    if record is not None:
        spans.add(record[1], record[2])
    return ""


def sample(record: bytes) -> dict[str, str | bytes]:
    """What a record's files hold, by what follows the first dot of their names; its name is `__key__`. Raises
    Malformed."""
    found: dict[str, str | bytes] = {}
    for member in _members(record):
        named = key_of(member.name) if member.is_file else None
        if named is None:
            continue
        key, kind = named
        if found.setdefault("__key__", key) != key:
            raise Malformed(f"the file {member.name!r} is another record's", member.start)
        if kind in found:
            raise Malformed(f"the file {member.name!r} is there twice", member.start)
        found[kind] = record[member.start : member.stop]
    if not found:
        raise Malformed("there is no file in it")
    return found


def head(name: str, size_bytes: int) -> bytes:
    """What stands before a file's bytes; `bytes(-size_bytes % BLOCK)` stands behind them. A long name, or one that is
    not ASCII, is written as pax has it."""
    raw = name.encode("utf-8", "surrogateescape")
    is_plain = len(raw) <= 100 and raw.isascii()
    before = b""
    if not is_plain or size_bytes >= 8**11:
        fields = ([] if is_plain else [(b"path", raw)]) + (
            [(b"size", b"%d" % size_bytes)] if size_bytes >= 8**11 else []
        )
        pax = b"".join(_pax_line(key, value) for key, value in fields)
        before = _block(b"././@PaxHeader", len(pax), _PAX) + pax + bytes(-len(pax) % BLOCK)
    return before + _block(raw[:100], min(size_bytes, 8**11 - 1), b"0")


END = _ZEROS * 2


def _members(record: bytes) -> Iterator[Member]:
    at = 0
    while at < len(record):
        try:
            member = _member(record, at, 0)
        except _Short:
            raise Malformed("it ends inside the head of a file", at) from None
        if member is None or member.stop > len(record):
            raise Malformed("it ends inside a file", at)
        yield member
        at = member.next


def _member(data: bytes, at: int, base: int) -> Member | None:
    """The file whose heads begin at `at`; None at the archive's end. Raises _Short, Malformed."""
    first = at
    name: str | None = None
    size_bytes: int | None = None
    while True:
        if len(data) < at + BLOCK:
            raise _Short(at + BLOCK - first)
        block = data[at : at + BLOCK]
        if block == _ZEROS and first == at:
            return None
        said, kind, posix = _checked(block, base + at)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            if said > _EXTENSION_BYTES_MAX:
                raise Malformed(f"a head of {said} bytes is no head", base + at)
            if len(data) < at + BLOCK + said:
                raise _Short(at + BLOCK + said - first)
            text = data[at + BLOCK : at + BLOCK + said]
            if kind == _LONG_NAME:
                name = _text(text)
            elif kind != _LONG_LINK:
                fields = _pax(text, base + at)
                if kind == _PAX_GLOBAL and fields.keys() & {"path", "size"}:
                    raise Malformed("a pax head gives all files that follow one name or size", base + at)
                if kind == _PAX:
                    name = fields.get("path", name)
                    size_bytes = _number(fields["size"], base + at) if "size" in fields else size_bytes
            at += BLOCK + said + -said % BLOCK
            continue
        if kind == _SPARSE:
            raise Malformed("a sparse file cannot be read: pack it again without --sparse", base + at)
        if kind in _WITHOUT_BYTES:
            said = 0
        elif size_bytes is not None:
            said = size_bytes
        start = at + BLOCK
        name = posix if name is None else name
        is_file = kind in _REGULAR and not name.endswith("/")
        return Member(name, is_file, start, start + said, start + said + -said % BLOCK)


def _checked(block: bytes, offset: int) -> tuple[int, bytes, str]:
    """Size, kind and name of a head."""
    try:
        wanted = _octal(block[148:156])
        total = sum(block) - sum(block[148:156]) + 8 * 32
        if wanted != total:
            # Some old programs add the bytes up as signed ones.
            total -= 256 * sum(byte > 127 for byte in (*block[:148], *block[156:]))
        if wanted != total:
            raise ValueError
        size_bytes = _octal(block[124:136])
    except ValueError:
        packed = [name for magic, name in _PACKED.items() if block.startswith(magic)]
        if offset == 0 and packed:
            raise Compressed(f"it is compressed with {packed[0]}") from None
        raise Malformed("there is no tar head: its checksum or size is wrong", offset) from None
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345] != 0:
        name = f"{_text(block[345:500])}/{name}"
    return size_bytes, block[156:157], name


def _octal(field: bytes) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if not re.fullmatch(b"[0-7]*", digits):
        raise ValueError(f"{field!r} is no octal number")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(text: bytes, offset: int) -> dict[str, str]:
    """`LENGTH KEY=VALUE\\n`, again and again; the length counts all of it."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(text) and text[at] != 0:
        match = re.compile(rb"([0-9]{1,7}) ").match(text, at)
        length = int(match.group(1)) if match else 0
        line = text[at : at + length]
        key, equals, value = line[match.end() - at if match else 0 : -1].partition(b"=")
        if not match or len(line) != length or not equals or not line.endswith(b"\n"):
            raise Malformed("a pax head is not what it should be", offset)
        if key.startswith(b"GNU.sparse"):
            raise Malformed("a sparse file cannot be read: pack it again without --sparse", offset)
        fields[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at += length
    return fields


def _number(text: str, offset: int) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise Malformed(f"a pax head gives the size {text[:20]!r}", offset)
    return int(text)


def _pax_line(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


def _block(name: bytes, size_bytes: int, kind: bytes) -> bytes:
    block = struct.pack(
        "100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x",
        name, b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size_bytes, b"00000000000\0", b" " * 8,
        kind, b"", b"ustar\0", b"00", b"", b"", b"0000000\0", b"0000000\0", b"",
    )  # fmt: skip
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
