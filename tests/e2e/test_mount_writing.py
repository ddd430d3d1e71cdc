"""Whole files written through a mount: what others see of them and when, and what is refused."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, Mount, mounted, run_beside, stop
from tests.e2e.run_helpers import wait_for

pytestmark = [*MOUNT_MARKS, pytest.mark.timeout(240)]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    (folder / "in").mkdir(parents=True)
    (folder / "in/old").write_bytes(b"as it was")
    return folder


@pytest.fixture
def mount(tmp_path: Path, origin: Path) -> Iterator[Mount]:
    with mounted(tmp_path / "here", origin, "--writable") as mount:
        yield mount


def failing(work: Any) -> str:
    """How a call fails: the name of its reason."""
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "it does not"


def written(folder: str, origin: str) -> dict[str, Any]:
    """Files of all sizes, written in pieces: what is at the origin before and after they are closed."""
    seen: dict[str, Any] = {}
    rng = random.Random(1)
    for size_bytes in (0, 1, 4095, 4096, 1_048_577, 5_000_003):
        data = rng.randbytes(size_bytes)
        path, there = f"{folder}/{size_bytes}", Path(origin, str(size_bytes))
        with open(path, "wb", buffering=0) as file:
            at = 0
            while at < size_bytes:
                at += file.write(data[at : at + rng.choice((1000, 70_000, 2_000_000))])
            before = there.exists()
            size_now = os.fstat(file.fileno()).st_size
        with open(path, "rb") as file:
            again = file.read()
        seen[str(size_bytes)] = [before, size_now == size_bytes, again == data, os.stat(path).st_size]
        if size_bytes:
            assert there.read_bytes() == data
    return seen


def test_the_origin_has_a_file_when_it_is_closed(mount: Mount, origin: Path) -> None:
    seen = mount.call(written, str(mount.folder), str(origin))
    assert seen == {size: [False, True, True, int(size)] for size in seen}
    assert len(seen) == 6
    wait_for((origin / "0").exists, WAIT_S, "the empty one, which gets nothing more once nobody has it open")


def grown(folder: str) -> list[bool]:
    """A small file that is open while another, large one takes its place, and is opened again: who has it open reads
    on, and so do others."""
    path = f"{folder}/in/old"
    before = os.open(path, os.O_RDONLY)
    seen = [os.pread(before, 100, 0) == b"as it was"]
    data = random.Random(3).randbytes(3_000_000)
    with open(path, "wb") as file:
        file.write(data)
    for _ in range(2):
        with open(path, "rb") as file:
            seen.append(file.read() == data)
        seen.append(os.pread(before, 2_000_000, 1_000_000) == data[1_000_000:])
        # From then on the kernel could read it itself.
        until = time.monotonic() + WAIT_S
        while int(os.getxattr(path, "user.stoker.held_bytes")) < len(data) and time.monotonic() < until:
            time.sleep(0.05)
    os.close(before)
    with open(path, "rb") as file:
        seen.append(file.read() == data)
    return seen


def test_a_small_file_that_is_open_may_become_a_large_one(mount: Mount) -> None:
    assert mount.call(grown, str(mount.folder)) == [True] * 6


def changed(folder: str, origin: str) -> dict[str, Any]:
    """What one does to files, and how it goes."""
    old, there = f"{folder}/in/old", Path(origin, "in/old")
    seen: dict[str, Any] = {}
    reader = os.open(old, os.O_RDONLY)
    os.pread(reader, 1, 0)
    with open(old, "wb") as file:
        file.write(b"anew")
        file.flush()
        seen["others until then"] = there.read_text()
        os.fsync(file.fileno())
        seen["after fsync"] = there.read_text()
        file.write(b", and more")
    seen["closed"] = there.read_text()
    seen["read"] = Path(old).read_text()
    with open(old, "r+b", buffering=0) as file:
        seen["change in place"] = failing(lambda: file.write(b"X"))
    with open(old, "ab", buffering=0) as file:
        seen["append"] = failing(lambda: file.write(b"X"))
    seen["truncate"] = failing(lambda: os.truncate(old, 2))
    seen["unchanged"] = there.read_text()
    os.chmod(old, 0o600)
    os.utime(old, (1, 1))
    os.rename(old, f"{folder}/in/new")
    seen["renamed"] = [there.exists(), Path(origin, "in/new").read_text(), Path(folder, "in/new").read_text()]
    Path(folder, "in/other").write_text("other")
    os.replace(f"{folder}/in/new", f"{folder}/in/other")
    seen["replaced"] = sorted(os.listdir(f"{folder}/in")), Path(folder, "in/other").read_text()
    seen["rename a folder"] = failing(lambda: os.rename(f"{folder}/in", f"{folder}/out"))
    seen["full folder"] = failing(lambda: os.rmdir(f"{folder}/in"))
    seen["link"] = failing(lambda: os.link(f"{folder}/in/other", f"{folder}/l")) != "it does not"
    seen["symlink"] = failing(lambda: os.symlink("a", f"{folder}/s")) != "it does not"
    os.unlink(f"{folder}/in/other")
    seen["gone"] = [Path(origin, "in/other").exists(), failing(lambda: os.stat(f"{folder}/in/other"))]
    os.mkdir(f"{folder}/made")
    seen["made"] = sorted(os.listdir(folder)), failing(lambda: os.mkdir(f"{folder}/made"))
    os.rmdir(f"{folder}/made")
    seen["made and removed"] = os.path.exists(f"{folder}/made")
    with open(f"{folder}/sparse", "wb") as file:
        file.seek(5000)
        file.write(b"end")
        file.seek(2)
        file.write(b"begin")
    sparse = Path(origin, "sparse").read_bytes()
    seen["in any order"] = len(sparse), sparse[2:7] == b"begin", sparse[5000:] == b"end"
    return seen


def test_what_can_be_done_to_files_and_what_cannot(mount: Mount, origin: Path) -> None:
    assert mount.call(changed, str(mount.folder), str(origin)) == {
        "others until then": "as it was",
        "after fsync": "anew",
        "closed": "anew, and more",
        "read": "anew, and more",
        "change in place": "ENOTSUP",
        "append": "ENOTSUP",
        "truncate": "ENOTSUP",
        "unchanged": "anew, and more",
        "renamed": [False, "anew, and more", "anew, and more"],
        "replaced": [["other"], "anew, and more"],
        "rename a folder": "EXDEV",
        "full folder": "ENOTEMPTY",
        "link": True,
        "symlink": True,
        "gone": [False, "ENOENT"],
        "made": [["in", "made"], "EEXIST"],
        "made and removed": False,
        "in any order": [5003, True, True],
    }


def test_programs_write(mount: Mount, origin: Path) -> None:
    """Shells and programs they start have copies of descriptors, and close them at all times."""
    mount.sh("""
        echo one > $0/one; (echo two; sleep 0.3; echo three) > $0/two
        seq 1 100000 | tee $0/numbers | tail -1
        cp $0/numbers $0/copy; mv $0/copy $0/moved; cmp $0/numbers $0/moved
        head -c 3000000 /dev/urandom > /tmp/$$; dd if=/tmp/$$ of=$0/dd bs=64k status=none conv=fsync; cmp /tmp/$$ $0/dd
        rm /tmp/$$; mkdir -p $0/a/b; tar -C $0 -cf $0/a/b/t.tar one two; tar -tf $0/a/b/t.tar | wc -l
        touch $0/empty; touch $0/one; truncate -s 100 $0/long; rsync -r --inplace --size-only $0/in/ $0/a/
    """)
    assert (origin / "two").read_text() == "two\nthree\n"
    assert (origin / "numbers").read_text() == "".join(f"{n}\n" for n in range(1, 100_001))
    assert (origin / "moved").read_bytes() == (origin / "numbers").read_bytes()
    assert not (origin / "copy").exists()
    assert (origin / "a/b/t.tar").stat().st_size > 1000
    wait_for(
        lambda: (origin / "empty").exists() and (origin / "long").exists(), WAIT_S, "file that was closed"
    )
    assert (origin / "long").read_bytes() == bytes(100)


def parts(folder: str, half: str, go_on: str) -> None:
    """A file in two halves, between which something happens."""
    data = random.Random(7).randbytes(6_000_000)
    with open(f"{folder}/halves", "wb", buffering=0) as file:
        file.write(data[:3_000_000])
        Path(half).touch()
        while not os.path.exists(go_on):
            time.sleep(0.01)
        file.write(data[3_000_000:])


def test_the_daemon_is_killed_while_a_file_is_written(mount: Mount, origin: Path, tmp_path: Path) -> None:
    half, go_on = tmp_path / "half", tmp_path / "go on"
    with mount.look(parts, str(mount.folder), str(half), str(go_on)) as looking:
        wait_for(half.exists, WAIT_S, "half of the file")
        mount.kill_daemon()
        mount.kill_daemon()
        go_on.touch()
        assert looking.finish().code == 0
    assert (origin / "halves").read_bytes() == random.Random(7).randbytes(6_000_000)


def test_what_cannot_be_put_is_an_error_of_close(mount: Mount, origin: Path, tmp_path: Path) -> None:
    """And then what was there before is what is there."""
    code = (
        "import sys; f = open(sys.argv[1], 'wb'); f.write(b'x' * 100); f.flush(); print(flush=True); input(); "
        "f.close()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(mount.folder / "in/old")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    (origin / "in").rename(origin / "away")
    (origin / "in").write_text("a file where a folder was")
    try:
        _, err = child.communicate("\n", timeout=60)
    finally:
        child.kill()
    assert child.returncode != 0
    assert "OSError" in err or "Error:" in err
    (origin / "in").unlink()
    (origin / "away").rename(origin / "in")
    assert (origin / "in/old").read_bytes() == b"as it was"
    mount.sh("stat $0/.stoker-refresh > /dev/null")
    wait_for(lambda: mount.sh("cat $0/in/old") == "as it was", WAIT_S, "what is there")


def replaced(folder: str) -> dict[str, Any]:
    """What becomes of files that are written while others do things with their names."""
    seen: dict[str, Any] = {}
    first = open(f"{folder}/x", "wb", buffering=0)  # noqa: SIM115  (it outlives its name)
    first.write(b"first")
    os.unlink(f"{folder}/x")
    seen["unlinked"] = os.path.exists(f"{folder}/x")
    with open(f"{folder}/x", "wb") as second:
        second.write(b"second")
    first.write(b" goes on")
    seen["the first reads"] = os.pread(
        os.open(f"/proc/self/fd/{first.fileno()}", os.O_RDONLY), 100, 0
    ).decode()
    first.close()
    seen["the second"] = Path(folder, "x").read_text()
    for number in range(20):
        with open(f"{folder}/temporary", "wb") as file:
            file.write(b"%d" % number if number % 2 else b"")
        os.rename(f"{folder}/temporary", f"{folder}/final")
    seen["written and renamed"] = Path(folder, "final").read_text()
    with open(f"{folder}/being written", "wb", buffering=0) as file:
        file.write(b"half")
        os.rename(f"{folder}/being written", f"{folder}/named later")
        file.write(b" and half")
    seen["renamed meanwhile"] = sorted(os.listdir(folder)), Path(folder, "named later").read_text()
    return seen


def test_names_of_files_that_are_written(mount: Mount, origin: Path) -> None:
    assert mount.call(replaced, str(mount.folder)) == {
        "unlinked": False,
        "the first reads": "first goes on",
        "the second": "second",
        "written and renamed": "19",
        "renamed meanwhile": [["final", "in", "named later", "x"], "half and half"],
    }
    assert (origin / "x").read_text() == "second"
    assert sorted(path.name for path in origin.iterdir() if path.name[0] != ".") == [
        "final",
        "in",
        "named later",
        "x",
    ]


def half(folder: str) -> None:
    """Begin to write over a file, and wait."""
    with open(f"{folder}/in/old", "wb", buffering=0) as file:
        file.write(b"half of it")
        print("half", flush=True)
        signal.pause()


def test_whoever_is_killed_has_written_nothing(mount: Mount, origin: Path) -> None:
    with mount.look(half, str(mount.folder)) as looking:
        assert looking.line() == "half"
        looking.process.kill()
        looking.process.wait()
    wait_for(lambda: "in/old could not be written: what was is kept in" in mount.log, WAIT_S, "word of it")
    assert (origin / "in/old").read_bytes() == b"as it was"
    wait_for(lambda: mount.sh("cat $0/in/old") == "as it was", WAIT_S, "what is there")


def synced(folder: str, go_on: str) -> list[str]:
    """Write on after a fsync and after the daemon was replaced; what is read back."""
    with open(f"{folder}/grows", "w+b", buffering=0) as file:
        file.write(b"a" * 5000)
        os.fsync(file.fileno())
        print("synced", flush=True)
        while not os.path.exists(go_on):
            time.sleep(0.01)
        os.pwrite(file.fileno(), b"b" * 10, 5000)
        os.ftruncate(file.fileno(), 9000)
        seen = [os.pread(file.fileno(), 10, 5000).decode(), str(len(os.pread(file.fileno(), 9999, 0)))]
    print(*seen, flush=True)
    return seen


def test_a_file_goes_on_being_written_after_fsync_and_kill(
    mount: Mount, origin: Path, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    with mount.look(synced, str(mount.folder), str(go_on)) as looking:
        assert looking.line() == "synced"
        mount.kill_daemon()
        go_on.touch()
        assert looking.line() == "bbbbbbbbbb 9000"
        assert looking.finish().code == 0
    assert (origin / "grows").read_bytes() == b"a" * 5000 + b"b" * 10 + bytes(3990)


def test_what_was_closed_is_put_before_the_mount_ends(tmp_path: Path, origin: Path) -> None:
    with mounted(tmp_path / "here", origin, "--writable") as mount:
        mount.sh("touch $0/_SUCCESS; umount $0")
        mount.holder.wait(WAIT_S)
    assert (origin / "_SUCCESS").exists()


def test_what_could_not_be_written_is_not_overwritten_later(tmp_path: Path, origin: Path) -> None:
    base = tmp_path / "here"
    with mounted(base, origin, "--writable") as mount, mount.look(half, str(mount.folder)) as looking:
        assert looking.line() == "half"
        looking.process.kill()
        looking.process.wait()
        wait_for(lambda: "is kept in" in mount.log, WAIT_S, "word of it")
        kept = Path(mount.log.partition("is kept in ")[2].splitlines()[0])
    with mounted(base, origin, "--writable") as mount:
        assert kept.name.endswith("-in%2Fold")
        words = "1 files that could not be written by mounts before are kept in"
        assert f"{words} {kept.parent} ({kept.name}): " in mount.log
        mount.sh("echo another > $0/another")
        assert kept.read_bytes() == b"half of it"


def test_nothing_is_written_where_it_was_not_asked_for(tmp_path: Path, origin: Path) -> None:
    with mounted(tmp_path / "here", origin) as mount:
        done = run_beside(
            mount.folder, "bash", "-c", f"echo x > {mount.folder}/new; rm {mount.folder}/in/old"
        )
        assert done.err.count("Read-only file system") == 2
        assert (origin / "in/old").exists()


def test_two_mounts_see_what_is_whole(tmp_path: Path, origin: Path) -> None:
    with (
        mounted(tmp_path / "a", origin, "--writable") as ours,
        mounted(tmp_path / "b", origin, "--kernel-ttl", "0s", "--ttl", "0s", "--absent-ttl", "0s") as theirs,
    ):
        half, go_on = tmp_path / "half", tmp_path / "go on"
        with ours.look(parts, str(ours.folder), str(half), str(go_on)) as looking:
            wait_for(half.exists, WAIT_S, "half of the file")
            theirs.sh("stat $0/.stoker-refresh > /dev/null")
            assert "halves" not in theirs.sh("ls $0")
            go_on.touch()
            assert looking.finish().code == 0
        theirs.sh("stat $0/.stoker-refresh > /dev/null")
        assert theirs.sh("stat -c %s $0/halves") == "6000000\n"
        stop(ours.daemon())
        assert theirs.sh("md5sum < $0/halves") == ours.run("md5sum", str(origin / "halves")).out.replace(
            str(origin / "halves"), "-"
        )
        ours.daemon().resume()


def in_the_middle(folder: str) -> None:
    """Writes: to a file that is there, one that is not, and one that is synced; another one is whole. Until told."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fds = [os.open(f"{folder}/in/{name}", flags) for name in ("old", "new", "synced")]
    for fd in fds:
        os.write(fd, b"half of it")
    os.fsync(fds[-1])
    Path(folder, "in/whole").write_bytes(b"all of it")
    print("written", flush=True)
    sys.stdin.readline()


def test_who_is_in_the_middle_when_a_mount_is_forced_away_has_written_nothing(
    mount: Mount, origin: Path
) -> None:
    with mount.look(in_the_middle, str(mount.folder)) as writer:
        assert writer.line() == "written"
        subprocess.run(["umount", "-f", str(mount.folder)], check=False, capture_output=True)
        mount.holder.wait(WAIT_S)
        assert {path.name: path.read_bytes() for path in (origin / "in").iterdir()} == {
            "old": b"as it was",
            "synced": b"half of it",
            "whole": b"all of it",
        }
    kept = [line.partition("is kept in ")[2] for line in mount.log.splitlines() if "is kept in" in line]
    assert sorted(Path(path).name.partition("-")[2] for path in kept) == ["in%2Fnew", "in%2Fold"]
    assert {Path(path).read_bytes() for path in kept} == {b"half of it"}
