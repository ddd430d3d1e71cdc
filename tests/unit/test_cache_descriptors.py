"""The client's side of the short circuit: which descriptor is which, and which are kept."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.asked import Item, Wholes
from stoker.cache.client.batch import split_frames
from stoker.cache.client.descriptors import COUNT_MAX, Descriptor, Descriptors, Places
from stoker.errors import WireError
from stoker.wire.cache_batch import (
    DESCRIPTOR,
    FRAME,
    FRAME_DESCRIPTORS,
    FRAME_LAST,
    FRAME_PLACE,
    PLACE,
    DescriptorsWanted,
)

ONE, OTHER = b"run no 1", b"run no 2"


def made(path: Path, content: bytes) -> Descriptor:
    path.write_bytes(content)
    return Descriptor(os.open(path, os.O_RDONLY))


def frame(kind: int, body: bytes) -> bytes:
    return FRAME.pack(kind, len(body)) + body


def list_frame(instance: bytes, files: dict[int, Descriptor]) -> bytes:
    entries = []
    for number, file in files.items():
        assert file.identity is not None
        entries.append(DESCRIPTOR.pack(number, *file.identity))
    return frame(FRAME_DESCRIPTORS, instance + b"".join(entries))


def place(size_bytes: int, container: int, offset: int = 0) -> bytes:
    return frame(FRAME_PLACE, PLACE.pack(size_bytes, container, offset))


def read(body: bytes, known: Descriptors, arrived: list[Descriptor]) -> list[Item | None]:
    return split_frames(body, "b", Wholes(["key"] * _objects(body)), Places(known, known.held(), arrived))


def _objects(body: bytes) -> int:
    count = at = 0
    while at < len(body):
        kind, length = FRAME.unpack_from(body, at)
        count += kind != FRAME_DESCRIPTORS
        at += FRAME.size + length
    return count


def said(known: Descriptors) -> tuple[bytes, tuple[int, ...]]:
    wanted = known.held().wanted
    assert isinstance(wanted, DescriptorsWanted)
    return wanted.held[:8], struct.unpack(f"!{len(wanted.held[8:]) // 4}I", wanted.held[8:])


def test_places_are_read_from_what_came_whatever_the_order(tmp_path: Path) -> None:
    known = Descriptors(1000, 10)
    assert said(known) == (b"", ())
    a, b = made(tmp_path / "a", b"content of a"), made(tmp_path / "b", b"content of b")
    body = (
        list_frame(ONE, {7: a, 300: b})
        + place(4, 300, 8)
        + frame(FRAME_LAST, b"bytes")
        + place(12, 7)
        + place(13, 7)
        + place(1, 8)
    )
    assert read(body, known, [b, a]) == [b"of b", b"bytes", b"content of a", None, None]
    assert said(known) == (ONE, (7, 300))
    assert read(place(7, 7), known, []) == [b"content"], "it is known from before"
    assert known.held().wanted == DescriptorsWanted(1000, 10, ONE + struct.pack("!2I", 7, 300))


def test_numbers_of_another_run_are_other_files(tmp_path: Path) -> None:
    known = Descriptors(1000, 10)
    a, b = made(tmp_path / "a", b"content of a"), made(tmp_path / "b", b"content of b")
    asked_before = Places(known, known.held(), [a])
    read(list_frame(ONE, {1: a, 2: a}), known, [a])
    body = list_frame(OTHER, {1: b}) + place(12, 1) + place(12, 2)
    assert read(body, known, [b]) == [b"content of b", None]
    assert said(known) == (OTHER, (1,))
    late = list_frame(ONE, {3: a}) + place(12, 3) + place(12, 1)
    assert split_frames(late, "b", Wholes(["x", "y"]), asked_before) == [b"content of a", None]


def test_what_did_not_come_is_not_read_and_fewer_are_asked_for(tmp_path: Path) -> None:
    known = Descriptors(1000, 4)
    a, b = made(tmp_path / "a", b"content of a"), made(tmp_path / "b", b"content of b")
    body = list_frame(ONE, {1: a, 2: b}) + place(12, 1) + place(12, 2)
    for left in (2, 1):
        assert read(body, known, [b]) == [None, b"content of b"]
        assert known.held().wanted == DescriptorsWanted(1000, left)
    assert read(body, known, [b]) == [None, b"content of b"]
    assert known.held().wanted is None, "none at all come: it is not tried any more"


def test_no_more_are_kept_than_may_be_and_all_are_closed(tmp_path: Path) -> None:
    known = Descriptors(1000, 3)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        read(list_frame(ONE, {number: (file := made(tmp_path / "a", b"a"))}), known, [file])
        del file
        assert len(os.listdir("/proc/self/fd")) - before == min(3, number + 1)
    assert said(known) == (ONE, (7, 8, 9))
    assert said(pickle.loads(pickle.dumps(known))) == (b"", ())
    known.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_server_gave_up_is_let_go_of(tmp_path: Path) -> None:
    known = Descriptors(1000, 100)
    for number in range(20):
        file = made(tmp_path / str(number), b"a")
        read(list_frame(ONE, {number: file}), known, [file])
    del file
    for number in range(0, 20, 3):
        os.unlink(tmp_path / str(number))
    for _ in range(10):
        known.held()
    assert said(known) == (ONE, tuple(number for number in range(20) if number % 3))


def test_views_show_what_is_there_by_now_and_outlive_the_descriptor(tmp_path: Path) -> None:
    file = made(tmp_path / "a", b"content of a")
    first = file.view(8, 4)
    assert first == b"of a"
    assert first.readonly
    assert file.view(8, 5) is None
    assert file.view(2**40, 1) is None
    large = os.urandom(3_000_000)
    with (tmp_path / "a").open("ab") as growing:
        growing.write(large)
    assert file.view(0, 13) == b"content of a" + large[:1]
    assert file.view(12, len(large)) == large
    assert file.view(13, len(large)) is None
    os.unlink(tmp_path / "a")
    del file
    assert first == b"of a"
    maps = Path("/proc/self/maps").read_text
    assert f"{tmp_path}/a" in maps()
    del first
    assert f"{tmp_path}/a" not in maps()


def test_a_view_of_what_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    known = Descriptors(1000, 10)
    a = made(tmp_path / "a", b"content of a")
    read(list_frame(ONE, {1: a}), known, [a])
    places = Places(known, known.held(), [])
    assert places.read(1, 8, 4, views=True) == b"of a"
    os.truncate(tmp_path / "a", 0)
    other = Descriptors(1000, 10)
    pipe, _ = ends = os.pipe()
    odd = Descriptor(os.dup(pipe))
    assert odd.view(0, 1) is None
    read(list_frame(ONE, {2: odd}), other, [odd])
    assert Places(other, other.held(), []).read(2, 0, 1, views=True) is None
    for end in ends:
        os.close(end)


@pytest.fixture
def low_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_may_open_little_asks_for_little(low_limit: None) -> None:
    wanted = Descriptors().held().wanted
    assert wanted is not None
    assert wanted.count_max == 32 < COUNT_MAX


def test_what_is_not_understood_is_an_error(tmp_path: Path) -> None:
    known = Descriptors(1000, 10)
    for body in (
        frame(FRAME_DESCRIPTORS, b"short"),
        frame(FRAME_DESCRIPTORS, ONE + b"x"),
        frame(FRAME_PLACE, b"abc"),
    ):
        with pytest.raises(WireError):
            split_frames(body, "b", Wholes(["a"]), Places(known, known.held(), []))
    with pytest.raises(WireError):
        split_frames(place(1, 1), "b", Wholes(["a"]))
