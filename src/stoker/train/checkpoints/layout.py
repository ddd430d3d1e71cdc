"""How a snapshot lies in its file. PURE: bytes in, bytes out.

    header       4096 bytes, of which the first are used: what it is of, where the rest is, and a checksum
    data         the pieces, one after the other, each at a multiple of 64 bytes
    description  msgpack: the plain part, and of each piece what it is, where it lies, and its checksum

The description comes last because it is known last: the checksums of the pieces are in it, and its own is in the
header. All checksums are CRC-32C; numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from stoker._native import crc32c
from stoker.errors import WireError
from stoker.train.checkpoints.image import Image, Piece, common_of, is_common

MAGIC = b"STKSNAPS"
VERSION = 1
HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64
EMPTY, WRITING, COMPLETE = 0, 1, 2
_HEADER = struct.Struct("<8sII16sQQQQQQI")
_CRC = struct.Struct("<I")
_CRC_MAX = 0xFFFFFFFF

Read = Callable[[int, memoryview], None]
"""`read(offset, into)`: fill all of it from there on. Raises WireError where the file ends before."""


class Header(NamedTuple):
    """The beginning of a snapshot's file."""

    state: int
    """EMPTY, WRITING or COMPLETE. It is made COMPLETE after everything else has been written."""
    run: bytes
    """Of which run; see `run_digest`."""
    pid: int
    """Of the process that wrote it."""
    sequence: int
    """Grows with every snapshot of a worker's slots."""
    commits: int
    data_bytes: int
    description_at: int
    description_bytes: int
    description_crc: int


class Place(NamedTuple):
    """A piece in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    """Shape of this piece of it."""
    position: int
    """Its first byte, counted from the beginning of the data."""
    crc: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.local) * _dtype(self.dtype).itemsize


def run_digest(run_id: str) -> bytes:
    """Tells runs apart in 16 bytes, however long their ids are."""
    return hashlib.blake2b(run_id.encode(), digest_size=16).digest()


# -- writing ---------------------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """As it lies at the beginning of the file."""
    h = header
    body = _HEADER.pack(
        *(MAGIC, VERSION, h.state, h.run, h.pid, h.sequence, h.commits),
        *(h.data_bytes, h.description_at, h.description_bytes, h.description_crc),
    )
    return body + _CRC.pack(crc32c(body))


def place_pieces(pieces: Sequence[Piece]) -> tuple[list[Place], int]:
    """Where each piece is to lie, and how many bytes the data has. Checksums are not known yet."""
    places = []
    position = 0
    for piece in pieces:
        name = str(piece.tensor.dtype).removeprefix("torch.")
        place = Place(piece.name, name, piece.shape, piece.offsets, tuple(piece.tensor.shape), position, 0)
        places.append(place)
        position = aligned(position + place.size_bytes)
    return places, position


def encode_description(plain: Any, places: Sequence[Place]) -> bytes:
    """What stands behind the data."""
    return msgspec.msgpack.encode([plain, list(places)])


def description_bytes_max(plain: Any, places: Sequence[Place]) -> int:
    """How long it becomes at most, whatever the checksums are."""
    return len(encode_description(plain, [place._replace(crc=_CRC_MAX) for place in places]))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# -- reading ---------------------------------------------------------------------------------------------------


def decode_header(raw: bytes) -> Header:
    """Raises WireError for what is no header, is torn, or comes from another version."""
    used = _HEADER.size + _CRC.size
    if len(raw) < used:
        raise WireError(f"it ends after {len(raw)} bytes, within the header")
    body, crc = raw[: _HEADER.size], _CRC.unpack(raw[_HEADER.size : used])[0]
    if not any(raw[:used]):
        return Header(EMPTY, bytes(16), 0, 0, 0, 0, 0, 0, 0)
    magic, version, *fields = _HEADER.unpack(body)
    if magic != MAGIC:
        raise WireError("it does not begin as a snapshot does")
    if crc32c(body) != crc:
        raise WireError("the checksum of the header does not hold: it is torn or damaged")
    if version != VERSION:
        raise WireError(f"it is of layout {version}, this Stoker reads layout {VERSION}")
    return Header(*fields)


def read_header(read: Read, file_bytes: int) -> Header:
    """Raises WireError, also where the file is shorter than its header says."""
    raw = bytearray(min(file_bytes, _HEADER.size + _CRC.size))
    read(0, memoryview(raw))
    header = decode_header(bytes(raw))
    needed = max(HEADER_BYTES + header.data_bytes, header.description_at + header.description_bytes)
    if header.state == COMPLETE and file_bytes < needed:
        raise WireError(f"it ends after {file_bytes} bytes, of {needed}")
    return header


def image_in(whole: memoryview, header: Header) -> Image:
    """All of it as it lies in writable memory that holds the whole file: no copy; the tensors hold on to `whole`.

    Raises WireError where a checksum does not hold.
    """
    plain, places, fingerprint = _description_in(whole, header)
    for place in places:
        begin = HEADER_BYTES + place.position
        _check_piece(place, whole[begin : begin + place.size_bytes])
    pieces = [Piece(place.name, place.shape, place.offsets, piece_in(whole, place)) for place in places]
    return Image(header.commits, plain, pieces, fingerprint)


def _description_in(whole: memoryview, header: Header) -> tuple[Any, list[Place], str]:
    """The plain part, where each piece lies, and what tells this content from any other, whoever's it is."""
    begin, end = header.description_at, header.description_at + header.description_bytes
    if begin < HEADER_BYTES + header.data_bytes or end > len(whole):
        raise WireError("the header contradicts itself")
    raw = whole[begin:end]
    if crc32c(raw) != header.description_crc:
        raise WireError("the checksum of the description does not hold: it is damaged")
    try:
        plain, places = msgspec.msgpack.decode(raw, type=tuple[Any, list[Place]])
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"the description cannot be read: {error}") from None
    for place in places:
        _check(place, header.data_bytes)
    held = [place._replace(position=0) for place in places if is_common(place.name)]
    alike = encode_description(common_of(plain), held)
    return plain, places, hashlib.blake2b(alike, digest_size=16).hexdigest()


def _check_piece(place: Place, data: memoryview) -> None:
    """Raises WireError where the checksum of a piece does not hold."""
    if crc32c(data) != place.crc:
        raise WireError(f"the checksum of {place.name} does not hold: it is damaged")


def piece_in(buffer: Any, place: Place) -> torch.Tensor:
    """A piece as it lies in a writable buffer of the whole file: no copy."""
    dtype = _dtype(place.dtype)
    if not place.size_bytes:
        return torch.empty(place.local, dtype=dtype)
    offset, count = HEADER_BYTES + place.position, math.prod(place.local)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(place.local)


def _check(place: Place, data_bytes: int) -> None:
    _dtype(place.dtype)
    is_shape = len(place.shape) == len(place.offsets) == len(place.local) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for whole, offset, size in zip(place.shape, place.offsets, place.local, strict=True)
    )
    if not is_shape or place.position < 0 or place.position + place.size_bytes > data_bytes:
        raise WireError(f"the description contradicts itself about {place.name}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WireError(f"there is no tensor type {name!r} in this PyTorch ({torch.__version__})")
    return found
