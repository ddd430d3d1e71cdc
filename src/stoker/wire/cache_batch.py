"""The frames of POST /-/read: many objects, or parts of objects, in one answer.

A frame is a kind (u8), a length (u32, big endian) and that many bytes. The frames of one item are DATA*
then LAST or ERROR; items come in the order of the request. An ERROR frame holds an ErrorBody in msgpack and
voids the DATA frames of its item.

Items are whole objects, one for each key; with `ranges` they are parts of the objects of `keys`, one for each range. A
part ends where its object does; one that begins there or behind has no bytes. One whose end comes before its start is
an error of that item, one of a key that is not in the request makes all of it a bad one. With `versions` an item is of
the version that is given for its key, or an error; without, each is of one version, but two of the same key may not be
of the same.

The short circuit: a reader at a Unix socket may ask for descriptors in place of long records (DescriptorsWanted). A
PLACE frame may then stand for an item: its length (u32, big endian), the number of a container (u32), and where in it
the item begins (u64), in one piece. The reader has a descriptor of that container from before, or is passed one, for
reading only (SCM_RIGHTS, with any byte of the answer up to the DESCRIPTORS frame that announces it). A DESCRIPTORS
frame has 8 bytes that tell this run of the server from others, and for each container its number (u32), and its device
(u64) and inode (u64), by which the reader knows which of the descriptors that came is which. Numbers hold for one run,
in which none is used twice. What a PLACE frame points to never changes, though the server may have given it up. A
reader that lacks a descriptor (it had too many open, or something in between lost it) asks again without. Kinds 3 and 4
named files by their paths once.
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
READ_RANGES_MAX = 65536
RANGE = struct.Struct("!IQQ")
OFFSET_MAX = 2**64 - 1
PLACE_OBJECT_BYTES_MAX = 2**30
"""Files of larger objects are not handed out: they leave as a whole then, and who has one keeps all of its room."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class DescriptorsWanted(msgspec.Struct, frozen=True):
    """A reader takes places of items of `from_bytes` and more, and `count_max` descriptors beside those it has.

    `held`: the 8 bytes of the run that passed them, and the numbers of their containers (u32, big endian), ascending;
    or nothing.
    """

    from_bytes: Count
    count_max: Count
    held: bytes = b""


class ReadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Items of one bucket, to be answered in this order; with `descriptors`, by PLACE frames where possible.

    `ranges`: for each item the number of its key in `keys` (u32, big endian), and where it begins and ends (u64); None:
    the items are the whole objects. `versions`: for each key the version to be read, empty for whatever is there; none
    at all: that for all keys.
    """

    bucket: str
    keys: list[str]
    descriptors: DescriptorsWanted | None = None
    ranges: bytes | None = None
    versions: list[str] = []
