"""The frames of POST /-/read: many whole objects in one answer.

A frame is a kind (u8), a length (u32, big endian) and that many bytes. The frames of one key are DATA*
then LAST or ERROR; keys come in the order of the request. An ERROR frame holds an ErrorBody in msgpack and
voids the DATA frames of its key.

The short circuit: a reader at a Unix socket may ask for descriptors in place of long records (DescriptorsWanted). A
PLACE frame may then stand for a key: the record's length (u32, big endian), the number of a container (u32), and where
in it the record begins (u64). The reader has a descriptor of that container from before, or is passed one, for reading
only (SCM_RIGHTS, with any byte of the answer up to the DESCRIPTORS frame that announces it). A DESCRIPTORS frame has 8
bytes that tell this run of the server from others, and for each container its number (u32), and its device (u64) and
inode (u64), by which the reader knows which of the descriptors that came is which. Numbers hold for one run, in which
none is used twice. What a PLACE frame points to never changes, though the server may have given it up. A reader that
lacks a descriptor (it had too many open, or something in between lost it) asks again without. Kinds 3 and 4 named files
by their paths once.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

FRAME = struct.Struct("!BI")
FRAME_DATA = 0
FRAME_LAST = 1
FRAME_ERROR = 2
FRAME_DESCRIPTORS = 5
FRAME_PLACE = 6
INSTANCE_BYTES = 8
DESCRIPTOR = struct.Struct("!IQQ")
PLACE = struct.Struct("!IIQ")
READ_KEYS_MAX = 65536

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class DescriptorsWanted(msgspec.Struct, frozen=True):
    """A reader takes places of objects of `from_bytes` and more, and `count_max` descriptors beside those it has.

    `held`: the 8 bytes of the run that passed them, and the numbers of their containers (u32, big endian), ascending;
    or nothing.
    """

    from_bytes: Count
    count_max: Count
    held: bytes = b""


class ReadRequest(msgspec.Struct, frozen=True):
    """Whole objects of one bucket, to be answered in this order; with `descriptors`, by PLACE frames where possible."""

    bucket: str
    keys: list[str]
    descriptors: DescriptorsWanted | None = None
