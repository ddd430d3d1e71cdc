"""Mounts of users that are not root, by mount(8), and started by systemd; orders announced for files of a mount."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import stoker
from stoker.cache.client import orders
from stoker.cache.client.fleet import open_client
from stoker.cache.mount.places import mount_of, mounted_on, place_name
from tests.e2e.mounting import MOUNT_MARKS, ROOT, abort, mounted, needs, run_beside
from tests.e2e.run_helpers import own_environment, wait_for

pytestmark = [*MOUNT_MARKS, pytest.mark.timeout(240)]
USER = pwd.getpwnam("nobody").pw_uid
"""fusermount3 wants one that has a name."""
AS_USER = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
# Python may lie where only root looks: this lets the user read all, and nothing else.
MAY_READ = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number:03}").write_bytes(random.Random(number).randbytes(5000))
    return folder


@pytest.fixture
def device_of_all() -> Iterator[None]:
    """As on most machines."""
    before = os.stat("/dev/fuse").st_mode & 0o777
    os.chmod("/dev/fuse", 0o666)
    yield
    os.chmod("/dev/fuse", before)


@contextlib.contextmanager
def logged_in() -> Iterator[None]:
    """The system makes a folder for who is, where mounts are kept from then on."""
    run = Path("/run/user") / str(USER)
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.chown(run, USER, USER)
        yield
    finally:
        shutil.rmtree(run)


def is_cleaned_by_systemd(kept: Path, base: Path) -> bool:
    """Whether systemd-tmpfiles, were all there old, would take away something of what is kept there."""
    before = sorted(os.listdir(kept))
    config = base / "tmpfiles.conf"
    others = [f"x {path}\n" for path in kept.parent.iterdir() if path != kept]
    config.write_text(f"d {kept.parent} - - - 0\n{''.join(others)}")
    subprocess.run(["systemd-tmpfiles", "--clean", config], check=True)
    return not kept.exists() or sorted(os.listdir(kept)) != before


@needs("fusermount3")
@needs("setpriv")
@pytest.mark.usefixtures("device_of_all")
def test_a_user_mounts_on_a_folder_of_his_own(tmp_path: Path, origin: Path) -> None:
    home = tmp_path / "home"
    folder = home / "mount"
    folder.mkdir(parents=True)
    for path in (home, folder):
        os.chown(path, USER, USER)
    for path in (tmp_path, *tmp_path.parents[:3]):
        os.chmod(path, os.stat(path).st_mode | 0o055)
    runtime = Path(tempfile.mkdtemp(dir="/tmp", prefix="stoker-"))  # paths of sockets are short
    os.chown(runtime, USER, USER)
    environment = {**own_environment(home), "HOME": str(home), "TMPDIR": str(runtime), "XDG_RUNTIME_DIR": ""}

    def command(*words: str) -> str:
        words = (*AS_USER, *MAY_READ, sys.executable, "-m", "stoker.cli.main", *words)
        done = run_beside(folder, *words, environment=environment)
        assert done.code == 0, done.text
        return done.out

    kept = Path(f"/tmp/stoker-{USER}/mounts") / place_name(str(folder))
    try:
        with logged_in():
            assert f"mounted on {folder}" in command("mount", str(origin), str(folder), "--daemon")
        # All that the system has made for the user is gone, and the next daemon finds what it must know.
        psutil.Process(json.loads((kept / "info").read_text())["daemon_pid"]).kill()
        as_user = run_beside(folder, *AS_USER, "md5sum", str(folder / "007"))
        assert as_user.out.split()[0] == run_beside(folder, "md5sum", str(origin / "007")).out.split()[0]
        # Not even root looks into the mount of another.
        assert "Permission denied" in run_beside(folder, "ls", str(folder)).err
        assert "another user's" in run_beside(folder, sys.executable, "-m", "stoker.cli.main", "mount").out
        with logged_in():
            assert f"on {folder} (mounted" in command("mount")
            if shutil.which("systemd-tmpfiles") is not None:
                assert not is_cleaned_by_systemd(kept, tmp_path)
            command("umount", str(folder))
        assert mounted_on(str(folder)) is None
        if shutil.which("systemd-tmpfiles") is not None:
            assert is_cleaned_by_systemd(kept, tmp_path), "the log"
    finally:
        abort(folder)
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
        shutil.rmtree(runtime, ignore_errors=True)


@needs("mount")
def test_mount_8_finds_its_helper(tmp_path: Path, origin: Path) -> None:
    """A line of fstab: mount(8) looks for /sbin/mount.TYPE."""
    folder, link = tmp_path / "mount", Path("/sbin/mount.stoker")
    folder.mkdir()
    if link.exists():
        pytest.skip("there is one already")
    link.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m stoker.cli.mount_helper "$@"\n')
    link.chmod(0o755)
    environment = own_environment(tmp_path)
    options = f"rw,allow_other,cache-dir={tmp_path / 'kept'},kernel_ttl=1s,_netdev,x-systemd.automount"
    try:
        words = ("mount", "-t", "stoker", str(origin), str(folder), "-o", options)
        done = run_beside(folder, *words, environment=environment)
        assert done.code == 0, done.text
        assert run_beside(folder, "cmp", str(folder / "001"), str(origin / "001")).code == 0
        assert run_beside(folder, "umount", str(folder)).code == 0
        done = run_beside(folder, *words[:-1], "allow_others", environment=environment)
        assert done.code == 2
        assert "-o allow_others: there is no such option; there are allow_other," in done.text
    finally:
        link.unlink()
        abort(folder)
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def test_systemd_is_told_when_it_is_ready(tmp_path: Path, origin: Path) -> None:
    unit = (ROOT / "deploy/systemd/stoker-mount@.service").read_text()
    assert "Type=notify" in unit
    if shutil.which("systemd-analyze") is not None:
        copy = tmp_path / "stoker-mount@.service"
        copy.write_text(unit)
        assert subprocess.run(["systemd-analyze", "verify", str(copy)], check=False).returncode == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            with mounted(tmp_path / "here", origin):
                assert told.recv(100) == b"READY=1"


def announced(folder: str, runtime: dict[str, str]) -> dict[str, Any]:
    """Read all files in an order that was announced; how many were there before they were asked for."""
    os.environ.update(runtime)
    mount = mount_of(folder)
    assert mount is not None
    files = [f"{folder}/{number:03}" for number in range(100)]
    order = random.Random(5).sample(range(100), 100)
    sampler = stoker.AnnouncedSampler(order, files)
    client = open_client(mount.place.endpoint, mount.place.token)
    seen, fetched = [], 0
    for position, number in enumerate(sampler):
        if position == 10:

            def is_ahead() -> bool:
                nonlocal fetched
                fetched = client.status().buckets[0].held_blocks
                return fetched == 100

            wait_for(is_ahead, 60, "files that are fetched ahead")
        seen.append(number)
        assert Path(files[number]).read_bytes() == random.Random(number).randbytes(5000)
    wait_for(lambda: not orders.orders(client, mount.place.bucket).streams, 60, "end of what was announced")
    return {"is_all": seen == order, "length": len(sampler), "fetched": fetched}


def test_what_is_announced_is_fetched_before_it_is_read(tmp_path: Path, origin: Path) -> None:
    with mounted(tmp_path / "here", origin) as mount:
        environment = {
            name: value for name, value in mount.environment.items() if name in ("XDG_RUNTIME_DIR", "TMPDIR")
        }
        found = mount.call(announced, str(mount.folder), environment)
        assert found == {"is_all": True, "length": 100, "fetched": 100}
    # Where there is no mount it costs nothing.
    assert list(stoker.AnnouncedSampler([2, 0], [str(origin / "000"), "b", "c"])) == [2, 0]
    with pytest.raises(IndexError, match="the sampler yields 3, and there are 1 files"):
        list(stoker.AnnouncedSampler([3], [str(origin / "000")]))
