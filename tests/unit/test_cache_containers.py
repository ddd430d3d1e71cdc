"""Files of containers on a real disk."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stoker._native import Index
from stoker.cache.store.containers import OPEN_TO_WRITE_MAX, ContainerFiles
from stoker.cache.store.opening import reconcile
from stoker.errors import CorruptBlock, EnvironmentProblem

MIB = 1024 * 1024


def sizes_bytes(files: ContainerFiles) -> dict[int, int]:
    """What each file takes of the disk."""
    return {
        int(path.name, 16): path.stat().st_blocks * 512 for path in files.below.rglob("*") if path.is_file()
    }


def test_what_was_written_is_read_and_found_again(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path / "cache")
    files.create(1)
    files.write(1, 0, b"abc")
    files.write(1, 3, b"defg")
    files.create(0x12345)
    files.write(0x12345, 8 * MIB, b"x" * 5000)
    assert files.read(1, 2, 4) == b"cdef"
    files.finish(1)
    files.finish(1)
    assert Path(files.sending.path(0x12345)).name == "00012345"
    sizes = sizes_bytes(files)
    assert sizes.keys() == {1, 0x12345}
    assert sizes[0x12345] < MIB, "it is sparse"
    files.close()
    again = ContainerFiles(tmp_path / "cache")
    assert sizes_bytes(again) == sizes
    assert again.read(0x12345, 8 * MIB + 4999, 1) == b"x"
    again.close()


def test_what_is_not_all_there_is_corrupt(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)
    with pytest.raises(CorruptBlock, match="container 7 cannot be read: No such file"):
        files.read(7, 0, 1)
    files.create(7)
    files.write(7, 0, b"abc")
    with pytest.raises(CorruptBlock, match="shorter"):
        files.read(7, 1, 3)
    assert files.is_there(7)
    files.unlink(7, 3)
    files.unlink(7, 3)
    assert not files.is_there(7)
    with pytest.raises(EnvironmentProblem, match="No such file"):
        files.write(7, 3, b"not made again: it would read as zeros before")
    with pytest.raises(CorruptBlock):
        files.read(7, 0, 1)
    Path(files.sending.path(8)).symlink_to("/etc/passwd")
    with pytest.raises(CorruptBlock):
        files.read(8, 0, 1)
    with pytest.raises(EnvironmentProblem):
        files.write(8, 0, b"never")
    files.close()


def test_a_hole_gives_back_whole_pages_and_leaves_the_rest(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)
    data = os.urandom(MIB)
    files.create(1)
    files.write(1, 0, data)
    before = sizes_bytes(files)[1]
    assert files.punch(1, 1000, MIB // 2)
    assert sizes_bytes(files)[1] <= before - MIB // 2 + 2 * 4096
    assert files.read(1, 0, 1000) == data[:1000]
    assert files.read(1, 1000 + MIB // 2, MIB // 2 - 1000) == data[1000 + MIB // 2 :]
    assert files.punch(1, 5, 10), "less than a page: nothing to give back"
    os.chmod(files.sending.path(1), 0o1600)
    assert not files.punch(1, 0, MIB), "readers may have it mapped"
    assert files.read(1, 0, 1000) == data[:1000]
    assert os.stat(files.sending.path(1)).st_size == MIB
    files.close()


def test_a_disk_that_is_full_or_takes_nothing_is_said(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)
    files.create(1)
    with pytest.raises(EnvironmentProblem, match="File exists"):
        files.create(1)
    files.write(1, 0, b"x" * 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(EnvironmentProblem, match="cannot write to the cache folder"):
            files.write(1, 100, b"y" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    files.write(1, 100, b"y" * 200)
    assert files.read(1, 0, 300) == b"x" * 100 + b"y" * 200
    files.close()


def test_few_files_are_open_however_many_are_written(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 3 * OPEN_TO_WRITE_MAX):
        files.create(number)
        files.write(number, 0, b"a")
        files.write(1 + number // 2, number, b"b")
    assert len(os.listdir("/proc/self/fd")) <= before + OPEN_TO_WRITE_MAX
    files.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_bytes_land_where_they_belong_whoever_else_writes(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)

    def write(worker: int) -> None:
        for number in range(300):
            files.create(worker * 1000 + number)
            files.write(worker * 1000 + number, 0, b"%8d" % (worker * 1000 + number) * 100)
            files.finish(worker * 1000 + number // 2)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in (1, 2, 3):
        for number in range(worker * 1000, worker * 1000 + 300):
            assert files.read(number, 0, 800) == b"%8d" % number * 100
    files.unlink(1000, 800)
    assert not files.punch(1000, 0, 8192), "it is not made anew"
    assert 1000 not in sizes_bytes(files)
    files.close()


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    files = ContainerFiles(tmp_path)
    with pytest.raises(EnvironmentProblem, match="in use by another cache server"):
        ContainerFiles(tmp_path)
    files.close()
    program = (
        "import sys; from pathlib import Path\n"
        "from stoker.cache.store.containers import ContainerFiles\n"
        "files = ContainerFiles(Path(sys.argv[1])); files.create(1); files.write(1, 0, b'kept')\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with pytest.raises(EnvironmentProblem, match="in use"):
            ContainerFiles(tmp_path)
        other.kill()
    files = ContainerFiles(tmp_path)
    assert files.read(1, 0, 4) == b"kept"
    files.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot use the cache folder"):
        ContainerFiles(tmp_path / "file")


@pytest.mark.parametrize("is_handed_out", [False, True])
def test_what_a_killed_server_left_in_a_large_file_is_a_hole_or_the_file_leaves(
    tmp_path: Path, is_handed_out: bool
) -> None:
    files, index = ContainerFiles(tmp_path), Index(str(tmp_path / "index"), MIB)
    bucket = index.bucket("b", "")
    for number, blocks in ((1, 10), (2, 1)):
        index.learn(bucket, f"large-{number}", "v", 10 * MIB, False, 1000)
        files.create(number)
        files.write(number, 0, os.urandom(blocks * MIB))
        index.hold(bucket, f"large-{number}", "v", 0, number, 0, 0, 1000)
        if is_handed_out:
            os.chmod(files.sending.path(number), 0o1600)
    found = reconcile(index, files, MIB)
    assert files.is_there(1) != is_handed_out
    assert (index.container(1) is None) == is_handed_out
    assert found.large_bytes == {bucket: (1 if is_handed_out else 2) * MIB}
    assert sum(sizes_bytes(files).values()) <= 2 * MIB + 65536
    assert files.is_there(2)
    files.close()
