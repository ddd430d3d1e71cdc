"""Large files of a mount that the kernel reads in the cache's own files, without the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import mount_readers as readers
from tests.e2e import mount_tree as tree
from tests.e2e.cache_helpers import served
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted, stop, wait_until_held
from tests.e2e.run_helpers import wait_for

pytestmark = MOUNT_MARKS
LARGE = "l/0"
SIZE_BYTES = 3_000_000
SPOKEN_BYTES = 100_000
"""Less than any answer with bytes of such a file."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    readers.make(folder, small=3, large=20)
    return folder


@pytest.fixture(params=["own", "socket"])
def mount(request: pytest.FixtureRequest, origin: Path, tmp_path: Path) -> Iterator[Mount]:
    """Through a cache of its own, or through a server on the same machine."""
    if request.param == "own":
        with mounted(tmp_path / "m", origin) as made:
            yield made
        return
    socket = tmp_path / "socket"
    with (
        served(tmp_path / "server", {"b": f"file://{origin}"}, "--unix", str(socket)),
        mounted(tmp_path / "m", "stoker://b", "--endpoint", f"unix://{socket}", cache=False) as made,
    ):
        yield made


def answered_bytes(mount: Mount, name: str) -> int:
    """How much the daemon has said while a file was read of which the kernel had kept nothing."""
    daemon = psutil.Process(mount.daemon().pid)
    before = daemon.io_counters().write_chars
    said = mount.call(readers.read_anew, mount.folder / name)
    size_bytes = SIZE_BYTES + int(name.rpartition("/")[2])
    assert said == readers.sha256(readers.content(name, size_bytes))
    return daemon.io_counters().write_chars - before


def read_until_it_is_held(mount: Mount, name: str) -> None:
    wait_for(lambda: answered_bytes(mount, name) < SPOKEN_BYTES, why="file that the kernel reads")


def test_the_kernel_reads_a_file_that_is_whole(mount: Mount) -> None:
    assert answered_bytes(mount, LARGE) >= SIZE_BYTES, "at first it comes by requests"
    read_until_it_is_held(mount, LARGE)
    with mount.look(readers.read_when_told, mount.folder / LARGE, [1000, SIZE_BYTES]) as reader:
        assert reader.line() == "opened"
        daemon = mount.daemon()
        stop(daemon)
        try:
            there = readers.content(LARGE, SIZE_BYTES)
            assert reader.tell() == readers.sha256(there[:1000])
            assert reader.tell() == readers.sha256(there[1000:])
        finally:
            daemon.resume()
    with mount.look(readers.map_when_told, mount.folder / LARGE) as reader:
        assert reader.line() == "mapped"
        stop(daemon)
        try:
            assert reader.tell() == readers.sha256(readers.content(LARGE, SIZE_BYTES))
        finally:
            daemon.resume()


def test_a_daemon_that_is_killed_changes_nothing_about_it(mount: Mount) -> None:
    read_until_it_is_held(mount, LARGE)
    with mount.look(readers.read_when_told, mount.folder / LARGE, [1000, SIZE_BYTES]) as reader:
        assert reader.line() == "opened"
        mount.kill_daemon()
        there = readers.content(LARGE, SIZE_BYTES)
        assert reader.tell() == readers.sha256(there[:1000])
        assert mount.sh("head -c 1000 $0/l/0 | sha256sum").split()[0] == readers.sha256(there[:1000])
        assert answered_bytes(mount, LARGE) < SPOKEN_BYTES, "who comes now shares the file with who was there"
        assert reader.tell() == readers.sha256(there[1000:])
    assert answered_bytes(mount, LARGE) < SPOKEN_BYTES


def test_without_it_all_comes_by_requests(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin, "--no-passthrough") as mount:
        assert answered_bytes(mount, LARGE) >= SIZE_BYTES
        wait_until_held(mount, LARGE, SIZE_BYTES)
        assert answered_bytes(mount, LARGE) >= SIZE_BYTES
        assert mount.call(tree.mapped_sums, mount.folder / LARGE)[0] == tree.sha256(str(origin / LARGE))


def test_a_file_that_is_evicted_while_it_is_open_can_be_read(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin, "--capacity=20MB") as mount:
        read_until_it_is_held(mount, LARGE)
        with mount.look(readers.read_when_told, mount.folder / LARGE, [1000, SIZE_BYTES]) as reader:
            assert reader.line() == "opened"

            def is_evicted() -> bool:
                mount.sh("cat $0/l/1? > /dev/null")
                return bool(mount.call(readers.held_bytes, mount.folder / LARGE) == 0)

            wait_for(is_evicted, why="eviction")
            there = readers.content(LARGE, SIZE_BYTES)
            mount.sh("echo 1 > /proc/sys/vm/drop_caches")
            assert reader.tell() == readers.sha256(there[:1000])
            assert reader.tell() == readers.sha256(there[1000:])
        assert answered_bytes(mount, LARGE) >= SIZE_BYTES
