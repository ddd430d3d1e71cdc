"""The client's side of the short circuit: which folder is believed, and which file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stoker.cache.client.batch import split_frames
from stoker.cache.client.local_files import LocalFiles, read_file
from stoker.errors import WireError
from stoker.wire.cache_api import FRAME, FRAME_FOLDER, FRAME_LAST, FRAME_PATH, PATH_SIZE, StoreFolder


def folder_of(path: Path, inode: int | None = None) -> bytes:
    found = path.stat()
    folder = StoreFolder(os.fsencode(path), found.st_dev, found.st_ino if inode is None else inode)
    return msgspec.msgpack.encode(folder)


def frame(kind: int, body: bytes) -> bytes:
    return FRAME.pack(kind, len(body)) + body


def path_frame(path: bytes, size_bytes: int) -> bytes:
    return frame(FRAME_PATH, PATH_SIZE.pack(size_bytes) + path)


def test_a_file_is_read_if_it_is_there_and_as_long_as_it_should_be(tmp_path: Path) -> None:
    file = tmp_path / "block"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to(file)
    path = os.fsencode(file)
    assert read_file(path, 7) == b"content"
    for bad, size_bytes in [(path, 6), (path, 8), (path + b"x", 7), (os.fsencode(tmp_path), 7)]:
        assert read_file(bad, size_bytes) is None
    assert read_file(os.fsencode(tmp_path / "link"), 7) is None


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
        + path_frame(b"one", 10)
        + frame(FRAME_LAST, b"two")
        + path_frame(b"gone", 5)
        + path_frame(b"one", 9)
    )
    keys = ["a", "b", "c", "d"]
    assert split_frames(body, "b", keys, LocalFiles()) == [b"1" * 10, b"two", None, None]
    with pytest.raises(WireError):
        split_frames(body, "b", keys)
    with pytest.raises(WireError):
        split_frames(frame(FRAME_PATH, b"abc"), "b", ["a"], LocalFiles())
    assert split_frames(path_frame(b"one", 10), "b", ["a"], LocalFiles()) == [None]
