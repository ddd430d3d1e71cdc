"""What is said where the kernel does not unmount."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from stoker.cache.mount import device, helper, places
from stoker.cache.mount.device import MountBusy
from stoker.cli.main import main as stoker
from stoker.errors import EnvironmentProblem


def refusing(code: int) -> object:
    """The C library whose kernel does not unmount, for that reason."""

    class Refusing:
        def umount2(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    return Refusing()


@pytest.mark.parametrize(
    ("code", "is_busy", "words"),
    [
        (errno.EBUSY, True, "cannot unmount /m: Device or resource busy$"),
        (
            errno.EPERM,
            False,
            "cannot unmount /m: Operation not permitted: it needs the capability CAP_SYS_ADMIN",
        ),
        (errno.EINVAL, False, "cannot unmount /m: Invalid argument: it is not mounted there any more"),
        (
            errno.ENOENT,
            False,
            "cannot unmount /m: No such file or directory: the folder is not there any more",
        ),
        (errno.EAGAIN, False, "cannot unmount /m: Resource temporarily unavailable$"),
    ],
)
def test_why_it_is_not_unmounted(
    monkeypatch: pytest.MonkeyPatch, code: int, is_busy: bool, words: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(device, "_libc", refusing(code))
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        device.unmount("/m")
    assert isinstance(caught.value, MountBusy) is is_busy


@pytest.mark.parametrize(
    ("said", "is_busy"),
    [
        ("fusermount3: failed to unmount /m: Device or resource busy", True),
        ("fusermount3: failed to unmount /busy: Operation not permitted", False),
        ("fusermount3: entry for /m not found in /etc/mtab", False),
    ],
)
def test_why_the_helper_does_not_unmount(monkeypatch: pytest.MonkeyPatch, said: str, is_busy: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(helper, "unmount", lambda folder, is_lazy: said)
    with pytest.raises(EnvironmentProblem, match=said) as caught:
        device.unmount("/m")
    assert isinstance(caught.value, MountBusy) is is_busy


@pytest.mark.parametrize(
    ("code", "more", "words"),
    [
        (errno.EBUSY, "", "used by "),
        (
            errno.EBUSY,
            "31 30 0:42 / {tmp}/in rw - tmpfs none rw\n",
            "something is mounted on {tmp}/in: end that",
        ),
        (errno.EPERM, "", "CAP_SYS_ADMIN, as root has it\n"),
    ],
)
def test_who_is_in_the_way_is_said_where_somebody_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    more: str,
    words: str,
) -> None:
    lines = tmp_path / "mountinfo"
    lines.write_text(
        f"30 1 0:41 / {tmp_path} rw - fuse.stoker s3://b rw,user_id={os.getuid()}\n"
        + more.format(tmp=tmp_path)
    )
    monkeypatch.setattr(places, "_MOUNTS", str(lines))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(device, "_libc", refusing(code))
    assert stoker(["umount", str(tmp_path)]) == EnvironmentProblem.exit_code
    said = capsys.readouterr().err
    assert words.format(tmp=tmp_path) in said
    assert ("--lazy" in said) is (code == errno.EBUSY)
