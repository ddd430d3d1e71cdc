"""Folders of a mount that are read while files are written, renamed and removed in them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted

pytestmark = [*MOUNT_MARKS, pytest.mark.timeout(240)]
MANY = 2500
"""More than one page."""


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    (folder / "many").mkdir(parents=True)
    for number in range(MANY):
        (folder / f"many/{number:05}").write_bytes(b"x")
    return folder


@pytest.fixture
def mount(tmp_path: Path, origin: Path) -> Iterator[Mount]:
    with mounted(tmp_path / "here", origin, "--writable") as mount:
        yield mount


def listed(folder: str) -> dict[str, Any]:
    """What a program finds in lists of what it is writing there, in the midst of others and by other programs."""
    seen: dict[str, Any] = {}
    path = f"{folder}/many/01000a"
    with open(path, "wb", buffering=0) as file:
        file.write(b"half")
        names = os.listdir(f"{folder}/many")
        seen["while"] = [len(names), names.count("01000a")]
        ls = subprocess.run(
            ["ls", "-li", f"{folder}/many"], capture_output=True, text=True, check=True
        ).stdout
        (line,) = [line for line in ls.splitlines() if line.endswith("01000a")]
        seen["ls"] = [int(line.split()[0]) == os.fstat(file.fileno()).st_ino, int(line.split()[5])]
        with os.scandir(f"{folder}/many") as entries:
            (entry,) = [entry for entry in entries if entry.name == "01000a"]
            seen["scandir"] = [entry.is_file(), entry.inode() == os.fstat(file.fileno()).st_ino]
        find = ["find", folder, "-size", "-5c", "-name", "*a"]
        seen["find"] = subprocess.check_output(find, text=True).strip() == path
    names = os.listdir(f"{folder}/many")
    seen["then"] = [len(names), names.count("01000a")]
    os.mkdir(f"{folder}/made")
    with open(f"{folder}/made/a", "wb", buffering=0) as file:
        file.write(b"x")
        subprocess.run(["rm", "-r", f"{folder}/made"], check=True)
        seen["removed"] = [os.path.exists(f"{folder}/made"), os.fstat(file.fileno()).st_size]
    return seen


def test_what_is_being_written_is_listed(mount: Mount, origin: Path) -> None:
    assert mount.call(listed, str(mount.folder)) == {
        "while": [MANY + 1, 1],
        "ls": [True, 4],
        "scandir": [True, True],
        "find": True,
        "then": [MANY + 1, 1],
        "removed": [False, 1],
    }
    assert not (origin / "made/a").exists()


def crowded(folder: str) -> dict[str, Any]:
    """Programs write, rename and remove files in a folder, each its own, and look for them there; all that is not
    touched is listed once all the while."""
    seen: dict[str, Any] = {"wrong": [], "lists": 0}
    over = threading.Event()
    many = f"{folder}/many"

    def works(who: int) -> None:
        for number in range(12):
            temporary, final = f"{many}/new-{who}-{number}", f"{many}/{number:05}.by-{who}"
            with open(temporary, "wb", buffering=0) as file:
                file.write(b"bytes")
                expect(os.path.basename(temporary), 1)
            os.rename(temporary, final)
            expect(os.path.basename(temporary), 0)
            expect(os.path.basename(final), 1)
            os.unlink(final)
            expect(os.path.basename(final), 0)
            if os.path.exists(final):
                seen["wrong"].append(f"{final} is there")

    def expect(name: str, count: int) -> None:
        if (found := os.listdir(many).count(name)) != count:
            seen["wrong"].append(f"{name} is listed {found} times, not {count}")

    def looks() -> None:
        while not over.is_set():
            with os.scandir(many) as entries:
                names = [entry.name for entry in entries]
            old = [name for name in names if len(name) == 5]
            seen["lists"] += 1
            if len(old) != MANY or len(set(names)) != len(names):
                seen["wrong"].append(
                    f"{len(old)} are listed, {len(names) - len(set(names))} of all names twice"
                )

    workers = [threading.Thread(target=works, args=(who,)) for who in range(4)]
    lookers = [threading.Thread(target=looks) for _ in range(2)]
    for thread in workers + lookers:
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in lookers:
        thread.join()
    seen["wrong"] = seen["wrong"][:10]
    return seen


def test_who_looks_sees_what_was_done_before(mount: Mount, origin: Path) -> None:
    seen = mount.call(crowded, str(mount.folder))
    assert not seen["wrong"]
    assert seen["lists"] > 3
    assert len(list((origin / "many").iterdir())) == MANY


def made_again(folder: str, how_often: int) -> dict[str, Any]:
    """A folder that is removed and made again while somebody stands in what was removed."""
    seen: dict[str, Any] = {}
    path = f"{folder}/run"
    inside: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(how_often):
            if number or not os.path.exists(path):
                os.mkdir(path)
            Path(path, "a").write_text(f"{number}")
            inside.append(subprocess.Popen(["sleep", "1000"], cwd=path))
            os.unlink(f"{path}/a")
            os.rmdir(path)
        os.mkdir(path)
        Path(path, "b").write_text("b")
        seen["listed"] = os.listdir(path)
        in_old = subprocess.run(
            ["ls", f"/proc/{inside[-1].pid}/cwd/"], capture_output=True, text=True, check=False
        )
        seen["in the old one"] = in_old.stdout
    finally:
        for process in inside:
            process.kill()
            process.wait()
    seen["inodes"] = len({os.stat(path).st_ino, os.stat(path).st_ino})
    Path(path, "c").write_text("c")
    os.rename(f"{path}/c", f"{path}/d")
    seen["then"] = sorted(os.listdir(path))
    return seen


def test_a_folder_is_made_again_while_somebody_is_in_the_one_before(mount: Mount, origin: Path) -> None:
    expected = {"listed": ["b"], "in the old one": "", "inodes": 1, "then": ["b", "d"]}
    assert mount.call(made_again, str(mount.folder), 1) == expected
    mount.sh("rm -r $0/run")
    with mount.looking(
        "sh", "-c", "mkdir $0/run; cd $0/run; echo here; exec sleep 1000", str(mount.folder)
    ) as inside:
        assert inside.line() == "here"
        mount.sh("rmdir $0/run; mkdir $0/run; echo first > $0/run/first")
        mount.kill_daemon()
        mount.sh("echo second > $0/run/second")
        assert mount.sh("ls $0/run").split() == ["first", "second"]
    assert mount.sh("rm -r $0/run; ls $0").split() == ["many"]
    assert mount.call(made_again, str(mount.folder), 3) == expected
    assert sorted(path.name for path in (origin / "run").iterdir() if path.name[0] != ".") == ["b", "d"]
