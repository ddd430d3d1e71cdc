"""How a snapshot lies in its file: every cut and every flipped bit is noticed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from stoker.errors import WireError
from stoker.train.checkpoints import layout
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.layout import (
    ALIGNMENT_BYTES,
    COMPLETE,
    EMPTY,
    HEADER_BYTES,
    Header,
    decode_header,
    description_bytes_max,
    encode_description,
    encode_header,
    place_pieces,
    run_digest,
)
from stoker.train.checkpoints.memory import MemorySlots
from tests.unit.snapshot_helpers import RUN, a_state, same, snapshot_in, take, used_bytes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file of a small state."""
    folder = tmp_path_factory.mktemp("slots")
    slots = MemorySlots(folder, RUN, 0)
    state = a_state(size=8)
    assert slots.take(image_of(7, state), set())
    slots.finish()
    return used_bytes(folder / "0-0.snapshot")


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    state = take(MemorySlots(tmp_path, RUN, 0), 5)
    header, image = snapshot_in(used_bytes(tmp_path / "0-0.snapshot"))
    assert (header.commits, header.run, image.commits) == (5, run_digest(RUN), 5)
    assert same(image.state(), state)
    assert [piece.shape for piece in image.pieces if piece.name == "modules.model.odd"] == [(4, 3, 2)]


def test_pieces_are_aligned_and_apart() -> None:
    places, data_bytes = place_pieces(image_of(1, a_state(size=9)).pieces)
    end = 0
    for place in places:
        assert place.position % ALIGNMENT_BYTES == 0
        assert place.position >= end
        end = place.position + place.size_bytes
    assert data_bytes >= end


def test_a_file_cut_off_at_any_byte_is_no_snapshot(small: bytes) -> None:
    snapshot_in(small)
    for end in range(len(small)):
        if HEADER_BYTES // 2 < end < HEADER_BYTES - 4:
            continue  # all the same
        with pytest.raises(WireError):
            snapshot_in(small[:end])


def test_a_flipped_bit_is_noticed_wherever_it_counts(small: bytes) -> None:
    """Of the rest of the header's page and the gaps between pieces nothing is read."""
    header, image = snapshot_in(small)
    places = place_pieces(image.pieces)[0]
    gaps = set(range(HEADER_BYTES, header.description_at))
    for place in places:
        gaps -= set(range(HEADER_BYTES + place.position, HEADER_BYTES + place.position + place.size_bytes))
    begin = layout._HEADER.size + layout._CRC.size
    used = [at for at in range(len(small)) if at not in gaps and not begin <= at < HEADER_BYTES]
    rng = random.Random(1)
    for at in used:
        raw = bytearray(small)
        raw[at] ^= 1 << rng.randrange(8)
        with pytest.raises(WireError):
            snapshot_in(bytes(raw))


def test_the_message_says_what_is_wrong(small: bytes) -> None:
    def why(raw: bytes) -> str:
        with pytest.raises(WireError) as told:
            snapshot_in(raw)
        return str(told.value)

    def flipped(at: int) -> bytes:
        raw = bytearray(small)
        raw[at] ^= 1
        return bytes(raw)

    header, _ = snapshot_in(small)
    assert "does not begin as a snapshot does" in why(flipped(0))
    assert "checksum of the header" in why(flipped(40))
    assert "the checksum of modules.model.w does not hold" in why(flipped(HEADER_BYTES))
    assert "checksum of the description" in why(flipped(header.description_at))
    assert re.search(r"it ends after \d+ bytes, of \d+", why(small[:-1]))
    other = bytearray(small)
    newer = layout._HEADER.pack(b"STKSNAPS", layout.VERSION + 1, *header)
    other[: len(newer) + 4] = newer + layout._CRC.pack(layout.crc32c(newer))
    assert f"it is of layout {layout.VERSION + 1}" in why(bytes(other))


def test_headers_come_back_and_a_new_file_is_empty() -> None:
    header = Header(COMPLETE, run_digest("a" * 500), 2**31, 2**40, 2**50, 2**45, 2**46, 2**20, 2**32 - 1)
    assert decode_header(encode_header(header)) == header
    assert decode_header(bytes(HEADER_BYTES)).state == EMPTY
    assert run_digest("a" * 500) != run_digest("a" * 501)


def test_a_description_never_outgrows_what_was_reckoned() -> None:
    image = image_of(1, a_state(size=3))
    places = [place._replace(crc=2**32 - 1) for place in place_pieces(image.pieces)[0]]
    assert len(encode_description(image.plain, places)) <= description_bytes_max(image.plain, places)


def test_a_description_that_contradicts_itself_is_refused(small: bytes) -> None:
    """Its checksum holds: who wrote it was wrong."""
    header, image = snapshot_in(small)
    places = place_pieces(image.pieces)[0]
    for wrong in (
        places[0]._replace(position=2**40),
        places[0]._replace(position=-64),
        places[0]._replace(local=(10**9,)),
        places[0]._replace(offsets=(1,)),
        places[0]._replace(shape=(8, 1)),
        places[0]._replace(dtype="float33"),
        places[0]._replace(dtype="nn"),
    ):
        raw = encode_description(image.plain, [wrong, *places[1:]])
        head = header._replace(description_bytes=len(raw), description_crc=layout.crc32c(raw))
        body = bytearray(small[: header.description_at] + raw)
        body[: len(encode_header(head))] = encode_header(head)
        with pytest.raises(WireError, match=r"contradicts itself about|there is no tensor type"):
            snapshot_in(bytes(body))


def test_pieces_of_divided_tensors_keep_their_places(tmp_path: Path) -> None:
    image = image_of(1, {"w": torch.arange(6.0)})
    piece = image.pieces[0]._replace(shape=(12,), offsets=(6,))
    slots = MemorySlots(tmp_path, RUN, 0)
    assert slots.take(image._replace(pieces=[piece]), set())
    slots.finish()
    _, found = snapshot_in(used_bytes(tmp_path / "0-0.snapshot"))
    assert found.pieces[0][1:3] == ((12,), (6,))
    assert torch.equal(found.pieces[0].tensor, torch.arange(6.0))
