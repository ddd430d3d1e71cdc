"""Files of a mount that are written anew in other ways than at one go: by editors, and where the disk is full."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.disks import small_disk
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, mounted
from tests.e2e.run_helpers import wait_for

pytestmark = [*MOUNT_MARKS, pytest.mark.timeout(240)]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "text").write_bytes(b"as it was")
    (folder / "empty").touch()
    return folder


def edited(folder: str, origin: str) -> dict[str, Any]:
    """As vim saves (open, ftruncate, write), and as Python's r+ does."""
    seen: dict[str, Any] = {}
    for name in ("text", "empty"):
        fd = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.ftruncate(fd, 0)
        os.write(fd, b"saved")
        before = Path(origin, name).read_text()
        os.close(fd)
        seen[name] = [before, Path(origin, name).read_text(), Path(folder, name).read_text()]
    with open(f"{folder}/text", "r+") as file:
        file.truncate(0)
        file.write("once more")
    seen["r+"] = Path(origin, "text").read_text()
    subprocess.run(["truncate", "-s", "0", f"{folder}/text"], check=True)
    return seen


def test_what_is_emptied_and_written_is_published_when_it_is_closed(tmp_path: Path, origin: Path) -> None:
    with mounted(tmp_path / "here", origin, "--writable") as mount:
        assert mount.call(edited, str(mount.folder), str(origin)) == {
            "text": ["as it was", "saved", "saved"],
            "empty": ["", "saved", "saved"],
            "r+": "once more",
        }


def cut_by_a_reader(folder: str) -> list[int]:
    """Opened to be read, and emptied by that: as on a local disk."""
    fd = os.open(f"{folder}/text", os.O_RDONLY | os.O_TRUNC)
    sizes = [os.fstat(fd).st_size, len(os.pread(fd, 100, 0))]
    os.close(fd)
    return [*sizes, os.stat(f"{folder}/text").st_size]


def test_who_only_reads_may_empty_a_file(tmp_path: Path, origin: Path) -> None:
    old = origin / "text"
    assert old.stat().st_size
    with mounted(tmp_path / "here", origin, "--writable") as mount:
        assert mount.call(cut_by_a_reader, str(mount.folder)) == [0, 0, 0]
        wait_for(lambda: not old.stat().st_size, WAIT_S, "the empty one")


def overfilled(folder: str) -> list[str]:
    """More than there is room for, by one who looks only at what the last call says."""
    said: list[str] = []
    fd = os.open(f"{folder}/text", os.O_WRONLY | os.O_TRUNC)
    for call in (*[lambda: os.write(fd, bytes(1 << 20))] * 8, lambda: os.fsync(fd), lambda: os.close(fd)):
        try:
            call()
        except OSError as error:
            said.append(errno.errorcode[error.errno or 0])
    return said


def test_what_had_no_room_is_not_published(tmp_path: Path, origin: Path) -> None:
    """Who writes less goes on."""
    with (
        small_disk(tmp_path / "here/cache", "4m"),
        mounted(tmp_path / "here", origin, "--writable") as mount,
    ):
        said = mount.call(overfilled, str(mount.folder))
        assert len(said) >= 3, said
        assert set(said) == {"ENOSPC"}
        assert (origin / "text").read_bytes() == b"as it was"
        mount.sh("echo small > $0/text")
        assert (origin / "text").read_text() == "small\n"
