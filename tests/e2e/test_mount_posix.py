"""What the kernel says to calls on a mount: the same as on any other file system that is mounted to be read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import mount_calls as calls
from tests.e2e import mount_tree as tree
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted

pytestmark = MOUNT_MARKS
NAMES = 2500
"""In a folder: of several pages."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    (folder / "d").mkdir()
    for name, size_bytes in (("f", calls.SIZE_BYTES), ("g", 1), ("big", 3_000_000), ("d/x", 1)):
        (folder / name).write_bytes(os.urandom(size_bytes))
        (folder / name).chmod(0o444)
    for number in range(NAMES):
        (folder / "d" / f"{number:04}").touch()
    (folder / "d").chmod(0o555)
    return folder


@pytest.fixture(scope="module")
def mount(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("m"), origin) as made:
        yield made


@pytest.fixture(scope="module")
def another(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same files on the machine's own file system, not to be written to."""
    folder = tmp_path_factory.mktemp("read-only")
    subprocess.run(["mount", "--bind", origin, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("table", [calls.openings, calls.writes, calls.reads])
def test_calls_are_answered_as_elsewhere(
    mount: Mount, another: Path, table: Callable[[str], dict[str, Any]]
) -> None:
    said = mount.call(table, mount.folder)
    assert len(said) > 20
    assert said == mount.call(table, another)


def test_nothing_can_be_written(mount: Mount, origin: Path) -> None:
    before = tree.summary(str(origin))
    said = mount.call(calls.writes, mount.folder)
    allowed = {"mkdir of one there": "EEXIST", "access to write": False, "access to write in a folder": False}
    allowed |= {
        "write to what was opened to read": "EBADF",
        "fallocate of it": "EBADF",
        "ftruncate of it": "EINVAL",
    }
    allowed["shared mapping to write"] = "EACCES"
    assert {what: said.pop(what) for what in allowed} == allowed
    assert set(said.values()) == {"EROFS"}
    assert tree.summary(str(origin)) == before


def test_the_kernel_moves_bytes_out_of_it(mount: Mount, tmp_path: Path) -> None:
    for _ in range(2):  # by requests, then from the cache's file
        said = mount.call(calls.moved, mount.folder, tmp_path)
        assert said == dict.fromkeys(("sendfile", "pread", "splice"), True)


def test_a_private_mapping_is_its_readers_own(mount: Mount) -> None:
    for name in ("f", "big"):
        assert mount.call(calls.private_mapping, mount.folder / name) == [True, True]


def test_a_folder_can_be_read_in_pieces_and_from_anywhere(mount: Mount, another: Path) -> None:
    said = mount.call(calls.listed_in_pieces, mount.folder / "d")
    rest, again = said.pop("rest"), said.pop("rest again")
    assert rest == again
    assert len(rest) == (NAMES + 3) - (NAMES + 3) // 2
    wanted = sorted(mount.call(calls.listed_in_pieces, another / "d")["first"])
    assert len(wanted) == NAMES + 3
    assert {size: sorted(names) == wanted for size, names in said.items()} == dict.fromkeys(said, True)


def test_to_watch_it_does_no_harm(mount: Mount, another: Path) -> None:
    assert mount.call(calls.watched, mount.folder, "f") == mount.call(calls.watched, another, "f") > 0
