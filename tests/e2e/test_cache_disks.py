"""A real server's disk turns read-only, or fails altogether, while it serves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.errors import ShortBody
from stoker.wire.cache_api import CacheStatus
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served, wait_until_held

pytestmark = pytest.mark.real
_SHUT_DOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: every use of the file system fails with an input/output error until it is mounted again."""
_WITHOUT_WRITING = 2


class Disk:
    """A file system of its own, which becomes read-only at its first error, as most are mounted."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "image", folder / "disk"
        self.path.mkdir()
        with open(self.image, "wb") as image:
            image.truncate(64_000_000)
        self._run("mkfs.ext4", "-q", "-O", "^has_journal", str(self.image))
        self.mount()

    def mount(self) -> None:
        self._run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.path))

    def unmount(self) -> None:
        self._run("umount", str(self.path))

    def mend(self) -> None:
        """What an operator does: take it out, check it, put it back."""
        self.unmount()
        # 1: errors were corrected.
        assert subprocess.run(["e2fsck", "-fy", self.image], capture_output=True, check=False).returncode <= 1
        self.mount()

    def become_read_only(self) -> None:
        device = os.stat(self.path).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")

    def fail(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUT_DOWN, struct.pack("I", _WITHOUT_WRITING))
        finally:
            os.close(fd)

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a disk of its own needs root and mkfs.ext4")
    try:
        made = Disk(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr!r}")
    yield made
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "-l", str(made.path)], capture_output=True, check=False)


def wait_for_state(client: CacheClient, state: str) -> CacheStatus:
    deadline = time.monotonic() + 60
    while (status := client.status()).state != state:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def read_all(server: ServerProcess, objects: dict[str, bytes]) -> None:
    with client_of(server) as client:
        assert client.read_many("b", list(objects)) == list(objects.values())
        for key, data in objects.items():
            assert client.read("b", key) == data


def read_all_in_the_end(server: ServerProcess, objects: dict[str, bytes]) -> None:
    """An answer that had begun when its file failed is broken off; who asks again is answered, at the latest once the
    server has seen that."""
    deadline = time.monotonic() + 60
    while True:
        try:
            read_all(server, objects)
            return
        except ShortBody:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def some(folder: Path, name: str) -> dict[str, bytes]:
    found = fill(folder, [f"{name}-small-{n}" for n in range(30)], 900)
    found |= fill(folder, [f"{name}-mid-{n}" for n in range(10)], 70_000)
    return found | fill(folder, [f"{name}-big"], 5_000_000)


def test_a_disk_that_becomes_read_only_serves_what_it_holds_and_takes_no_more(
    tmp_path: Path, disk: Disk
) -> None:
    before = some(tmp_path / "o", "before")
    with served(disk.path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        read_all(server, before)
        wait_until_held(client, len(before) + 1)
        asked = client.status().origin_bytes
        disk.become_read_only()
        read_all(server, before)
        assert client.status().origin_bytes == asked, "what is held is served as ever"

        after = some(tmp_path / "o", "after")
        for _ in range(2):
            read_all(server, after)
        status = wait_for_state(client, "pass-through")
        assert any("Read-only file system" in note for note in status.notes), status.notes
        changed = fill(tmp_path / "o", ["before-mid-0", "before-small-0", "before-big"], 70_001)
        client.refresh("b", "")
        read_all(server, {**before, **changed})
        (tmp_path / "o" / "before-mid-1").unlink()
        client.refresh("b", "")
        with client_of(server) as other:
            assert other.read("b", "before-mid-0") == changed["before-mid-0"]
        code, said = server.stop()
        assert (code, "Traceback" in said) == (0, False), said
    disk.mend()
    (tmp_path / "o" / "before-mid-1").write_bytes(before["before-mid-1"])
    with served(disk.path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        client.refresh("b", "")
        for _ in range(2):
            read_all(server, {**before, **changed, **after})
        assert wait_for_state(client, "ok").notes == []
        wait_until_held(client, len(before) + len(after) + 1)


def test_a_disk_that_fails_is_passed_by(tmp_path: Path, disk: Disk) -> None:
    objects = some(tmp_path / "o", "k")
    with served(disk.path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        read_all(server, objects)
        wait_until_held(client, len(objects) + 1)
        disk.fail()
        for _ in range(3):
            read_all_in_the_end(server, objects)
        later = some(tmp_path / "o", "later")
        for _ in range(2):
            read_all_in_the_end(server, {**objects, **later})
        status = wait_for_state(client, "pass-through")
        assert any("Input/output error" in note for note in status.notes), status.notes
        code, said = server.stop()
        assert (code, "Traceback" in said) == (0, False), said
    disk.mend()
    with served(disk.path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        for _ in range(2):
            read_all(server, {**objects, **later})
        wait_for_state(client, "ok")
