"""The client's side of the short circuit: which folder is believed, and which file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stoker.cache.client.batch import split_frames
from stoker.cache.client.local_files import LocalFiles, OpenedFiles
from stoker.errors import WireError
from stoker.wire.cache_api import FRAME, FRAME_FOLDER, FRAME_LAST, FRAME_PLACE, PLACE, StoreFolder


def folder_of(path: Path, inode: int | None = None) -> bytes:
    found = path.stat()
    folder = StoreFolder(os.fsencode(path), found.st_dev, found.st_ino if inode is None else inode)
    return msgspec.msgpack.encode(folder)


def frame(kind: int, body: bytes) -> bytes:
    return FRAME.pack(kind, len(body)) + body


def place_frame(path: bytes, size_bytes: int, offset: int = 0) -> bytes:
    return frame(FRAME_PLACE, PLACE.pack(size_bytes, offset) + path)


def test_bytes_are_read_if_they_are_there(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    file.write_bytes(b"some content")
    (tmp_path / "link").symlink_to(file)
    path = os.fsencode(file)
    with OpenedFiles() as opened:
        assert opened.read(path, 5, 7) == b"content"
        assert opened.read(path, 0, 4) == b"some"
        for bad, offset, size_bytes in [(path, 6, 7), (path + b"x", 0, 1), (os.fsencode(tmp_path), 0, 7)]:
            assert opened.read(bad, offset, size_bytes) is None
        assert opened.read(os.fsencode(tmp_path / "link"), 0, 7) is None


def test_another_folder_of_the_same_name_ends_the_short_circuit(tmp_path: Path) -> None:
    files = LocalFiles(1000)
    assert files.find(folder_of(tmp_path)) == os.fsencode(tmp_path) + b"/"
    assert files.find(folder_of(tmp_path, inode=1)) is None
    assert files.from_bytes is None
    unseen = msgspec.msgpack.encode(StoreFolder(b"/not/there", 1, 1))
    assert LocalFiles().find(unseen) is None
    with pytest.raises(WireError):
        LocalFiles().find(b"nonsense")


def test_paths_and_bytes_keep_the_order_of_the_keys(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1" * 10)
    body = (
        frame(FRAME_FOLDER, folder_of(tmp_path))
        + place_frame(b"one", 10)
        + frame(FRAME_LAST, b"two")
        + place_frame(b"gone", 5)
        + place_frame(b"one", 9, 2)
    )
    keys = ["a", "b", "c", "d"]
    assert split_frames(body, "b", keys, LocalFiles()) == [b"1" * 10, b"two", None, None]
    with pytest.raises(WireError):
        split_frames(body, "b", keys)
    with pytest.raises(WireError):
        split_frames(frame(FRAME_PLACE, b"abc"), "b", ["a"], LocalFiles())
    assert split_frames(place_frame(b"one", 10), "b", ["a"], LocalFiles()) == [None]
