"""Ranges of many objects: how they are asked for, cut between servers, and taken apart."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.client.asked import ByteRange, Parts, Wholes, cut_at_owners, joined, raise_first
from stoker.cache.client.batch import split_frames
from stoker.errors import ObjectChanged, ObjectNotFound, WireError
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_DATA,
    FRAME_ERROR,
    FRAME_LAST,
    OFFSET_MAX,
    RANGE,
    ReadRequest,
)
from stoker.wire.cache_errors import ErrorBody


def frame(kind: int, body: bytes) -> bytes:
    return FRAME.pack(kind, len(body)) + body


def error(code: str, message: str) -> bytes:
    return frame(FRAME_ERROR, msgspec.msgpack.encode(ErrorBody(code, message)))


def test_each_version_of_a_key_is_named_once() -> None:
    parts = Parts(
        [
            ByteRange("a", 1, 2),
            ByteRange("b", 3, 2**80, "v"),
            ByteRange("a", 2**70, 2**71),
            ByteRange("b", 0, 0),
            ByteRange("b", 5, 6, "v"),
        ]
    )
    packed = [(0, 1, 2), (1, 3, OFFSET_MAX), (0, OFFSET_MAX, OFFSET_MAX), (2, 0, 0), (1, 5, 6)]
    ranges = b"".join(RANGE.pack(*one) for one in packed)
    assert parts.request("x", None) == ReadRequest("x", ["a", "b", "b"], None, ranges, ["", "v", ""])
    assert parts.some([0, 2]).request("x", None).versions == []
    for start, stop in ((2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="not a range"):
            Parts([ByteRange("a", start, stop)]).request("x", None)


def test_a_request_for_whole_objects_is_what_it_was() -> None:
    body = msgspec.msgpack.encode(Wholes(["a", "b"]).request("x", None))
    assert msgspec.msgpack.decode(body) == {"bucket": "x", "keys": ["a", "b"]}
    read = msgspec.msgpack.decode(body, type=ReadRequest)
    assert (read.descriptors, read.ranges, read.versions) == (None, None, [])


def test_errors_are_items_and_void_what_came_of_theirs() -> None:
    body = (
        frame(FRAME_LAST, b"a")
        + frame(FRAME_DATA, b"lost")
        + error("changed", "it changed")
        + frame(FRAME_DATA, b"b")
        + frame(FRAME_LAST, b"c")
        + error("new-in-2.0", "'z' is odd")
    )
    for views in (False, True):
        first, second, third, last = split_frames(body, "x", Wholes(["k", "l", "m", "z"]), views=views)
        assert (first, third) == (b"a", b"bc")
        assert isinstance(second, ObjectChanged)
        assert str(second) == "x/l: it changed"
        assert str(last) == "'z' is odd"
        assert isinstance(first, memoryview if views else bytes)
        with pytest.raises(ObjectChanged):
            raise_first([first, second, third])
    for cut in range(1, len(body)):
        with pytest.raises(WireError):
            split_frames(body[:cut], "x", Wholes(["k", "l", "m", "z"]))
    with pytest.raises(WireError):
        split_frames(frame(FRAME_ERROR, b"\xff"), "x", Wholes(["k"]))


def test_a_view_of_an_answer_cannot_be_written_to() -> None:
    (view,) = split_frames(bytearray(frame(FRAME_LAST, b"abc")), "x", Wholes(["k"]), views=True)
    assert isinstance(view, memoryview)
    with pytest.raises(TypeError):
        view[0] = 1


@given(st.integers(0, 200), st.integers(0, 300), st.lists(st.sampled_from("xyz"), min_size=60, max_size=60))
def test_a_part_is_cut_where_owners_change_and_nowhere_else(
    start: int, length: int, owners: list[str]
) -> None:
    part = ByteRange("k", start, start + length, "v")
    pieces = cut_at_owners(part, 10, lambda block: owners[block])
    assert pieces[0].start == part.start
    assert pieces[-1].stop == part.stop
    assert all(piece.version == "v" for piece in pieces)
    for one, other in pairwise(pieces):
        assert one.stop == other.start
        assert one.stop % 10 == 0
        assert owners[one.stop // 10 - 1] != owners[other.start // 10]
    for piece in pieces:
        assert len({owners[at // 10] for at in range(piece.start, piece.stop)}) <= 1


def test_pieces_are_joined_or_are_the_first_error() -> None:
    gone, changed = ObjectNotFound("gone"), ObjectChanged("changed")
    assert joined([b"a", memoryview(b"b")], views=False) == b"ab"
    assert isinstance(joined([b"a", b"b"], views=True), memoryview)
    assert joined([b"a", changed, gone], views=False) is changed
    assert joined([gone], views=True) is gone
