"""Whom a mount belongs to, who may look at it, and what stays the same from one mount to the next."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import mount_tree as tree
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted, needs
from tests.e2e.run_helpers import Finished

pytestmark = MOUNT_MARKS
OWNER, GROUP, STRANGER = 12301, 12302, 12309


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for name in ("a/b/c", "a/d", "e", "with space"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "large").write_bytes(os.urandom(2_000_000))
    return folder


@pytest.fixture
def base() -> Iterator[Path]:
    """Which others may come by."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_user(mount: Mount, uid: int, gid: int, *command: str) -> Finished:
    return mount.run("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *command)


@needs("setpriv")
def test_the_kernel_sees_to_owners_and_rights(base: Path, origin: Path) -> None:
    options = ("--allow-other", f"--uid={OWNER}", f"--gid={GROUP}", "--file-mode=440", "--folder-mode=550")
    with mounted(base, origin, *options) as mount:
        facts = [mount.call(tree.facts, mount.folder / name)[3:6] for name in ("e", "a")]
        assert facts == [[0o100440, OWNER, GROUP], [0o040550, OWNER, GROUP]]
        path = str(mount.folder / "a/b/c")
        for uid, gid in ((OWNER, STRANGER), (STRANGER, GROUP)):
            done = as_user(mount, uid, gid, "cat", path)
            assert (done.code, done.out) == (0, "a/b/c"), done.text
            assert as_user(mount, uid, gid, "ls", str(mount.folder)).code == 0
        for command in (("cat", path), ("ls", str(mount.folder)), ("stat", str(mount.folder / "e"))):
            done = as_user(mount, STRANGER, STRANGER, *command)
            assert done.code != 0
            assert "Permission denied" in done.err
        mount.sh("cmp $0/large $1/large", str(origin))
        done = as_user(mount, OWNER, GROUP, "cmp", str(mount.folder / "large"), str(mount.folder / "large"))
        assert done.code == 0, (
            "and what the kernel reads from the cache's own file, whose owner is another one"
        )


@needs("setpriv")
def test_others_may_not_look_at_it_unasked(base: Path, origin: Path) -> None:
    with mounted(base, origin) as mount:
        done = as_user(mount, STRANGER, STRANGER, "cat", str(mount.folder / "e"))
        assert "Permission denied" in done.err
        assert mount.sh("cat $0/e") == "e"


def test_inodes_stay_the_same(tmp_path: Path, origin: Path) -> None:
    with mounted(tmp_path / "one", origin) as mount:
        first = mount.call(tree.inodes, mount.folder)
        assert len(first) == len(set(first.values())) == 7
        mount.kill_daemon()
        mount.sh("echo 2 > /proc/sys/vm/drop_caches")
        assert mount.call(tree.inodes, mount.folder) == first
        assert mount.end() == 0
    with mounted(tmp_path / "one", origin) as mount:
        assert mount.call(tree.inodes, mount.folder) == first
    (origin / "e").write_text("another content")
    with mounted(tmp_path / "two", origin) as mount:
        then = mount.call(tree.inodes, mount.folder)
        assert {name for name in first if then[name] != first[name]} == {"e"}
