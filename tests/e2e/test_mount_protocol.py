"""The kernel's own FUSE against what `requests.py` and `answers.py` say it speaks."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stoker.cache.mount import device
from stoker.cache.mount.places import mounted_on
from stoker.cache.mount.requests import Init, Opcode
from stoker.errors import EnvironmentProblem
from tests.e2e.mount_one_file import FILE

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(device.DEVICE), reason="needs root and FUSE"),
]


@contextmanager
def mounted(folder: Path, backing: Path, data: Path) -> Iterator[list[str]]:
    """What the daemon saw is there in the end. It is a process of its own, which nobody waits for when it is gone."""
    folder.mkdir()
    seen: list[str] = []
    arguments = [str(folder), str(backing), str(data)]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.mount_one_file", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(folder):
            assert daemon.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield seen
    finally:
        with suppress(EnvironmentProblem):
            device.unmount(str(folder), is_lazy=True)
        try:
            out, _ = daemon.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            out, _ = daemon.communicate()
        seen += out.splitlines()
    assert daemon.returncode == 0


def test_the_kernel_understands_what_is_answered(tmp_path: Path) -> None:
    backing, data, folder = tmp_path / "backing", tmp_path / "data", tmp_path / "a mount"
    content, other = os.urandom(5_000_000), os.urandom(3_000_001)
    backing.write_bytes(content)
    data.write_bytes(other)
    with mounted(folder, backing, data) as seen:
        assert sorted(os.listdir(folder)) == ["answered", "backed"]
        found = (folder / "backed").stat()
        assert (found.st_size, found.st_mtime_ns) == (5_000_000, 1_500_000_000_123_456_789)
        assert (found.st_mode, found.st_uid, found.st_gid, found.st_ino) == (FILE, 7, 8, 2)
        assert (folder / "answered").read_bytes() == other
        assert (folder / "backed").read_bytes() == content
        with (
            open(folder / "backed", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            assert mapped[4_000_000:4_000_100] == content[4_000_000:4_000_100]
        space = os.statvfs(folder)
        assert (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize) == (10 << 30, 3 << 30)
        assert os.listxattr(folder / "answered") == ["user.one"]
        assert os.getxattr(folder / "answered", "user.one") == b"value"
        with pytest.raises(OSError, match="No data"):
            os.getxattr(folder / "answered", "user.two")
        with pytest.raises(FileNotFoundError):
            (folder / "none").stat()
        with pytest.raises(OSError, match="Read-only"):
            (folder / "new").write_bytes(b"")
        assert (folder / "answered").read_bytes() == other
    requests = [tuple(map(int, line.split())) for line in seen]
    reads = [node for opcode, node in requests if opcode == Opcode.READ]
    opened = [node for opcode, node in requests if opcode == Opcode.OPEN]
    assert set(reads) == {3}, "the kernel reads the backed file itself"
    assert len(reads) < 12, "of more than 128 KiB, and none for what it has kept"
    assert opened == [3, 2, 2, 3]
    agreed = max(flags for opcode, flags in requests if opcode == Opcode.INIT)
    assert Init.PASSTHROUGH in Init(agreed)


@pytest.mark.parametrize("is_listed", [True, False])
def test_who_waits_for_a_mount_that_is_aborted_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """Also where nobody has mounted the kernel's list of such mounts, as it may be in a container."""
    folder, connections = tmp_path / "m", tmp_path / "connections"
    folder.mkdir()
    connections.mkdir()
    monkeypatch.setattr(device, "_CONNECTIONS", str(connections))
    if is_listed:
        subprocess.run(["mount", "-t", "fusectl", "none", str(connections)], check=True)
    fd = device.attach(str(folder), "nobody answers", is_writable=False, lets_others=False)
    there = mounted_on(str(folder))
    try:
        assert there is not None
        waits = subprocess.Popen(["stat", str(folder / "file")], stderr=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waits.communicate(timeout=1)
        device.abort(there.number)
        _, said = waits.communicate(timeout=60)
        assert "not connected" in said or "connection abort" in said, said
    finally:
        device.unmount(str(folder), is_lazy=True)
        os.close(fd)
        if is_listed:
            device.unmount(str(connections))
    with pytest.raises(FileNotFoundError):
        device.abort(there.number)
