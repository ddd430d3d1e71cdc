"""A daemon that is killed on a kernel that does not send again what it had read, as all before Linux 6.9. This one can;
it is not asked to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.storm_origin import content
from tests.e2e import mount_readers as readers
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, Mount, mounted
from tests.e2e.run_helpers import wait_for
from tests.e2e.test_mount_restarts import read_by_many
from tests.http_servers import running

pytestmark = MOUNT_MARKS
_AT_START = """
import os, signal
from stoker.cache.mount import core
core._WANTED &= ~core.Init.HAS_RESEND
read = os.readv
def ends_once(fd, buffers):
    size_bytes = read(fd, buffers)
    if buffers[0][4] == 1 and buffers[0][40:size_bytes] == b"lost\\0" and os.path.exists({once!r}):  # LOOKUP
        os.unlink({once!r})
        os.kill(os.getpid(), signal.SIGKILL)
    return size_bytes
os.readv = ends_once
"""


@pytest.fixture(autouse=True)
def an_old_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To daemons of mounts that are made from now on."""
    at_start = tmp_path / "at_start"
    at_start.mkdir()
    (at_start / "sitecustomize.py").write_text(_AT_START.format(once=str(tmp_path / "once")))
    paths = [str(at_start), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    readers.make(folder, small=20, large=2)
    return folder


def test_readers_do_not_notice_that_the_daemon_is_killed(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        with read_by_many(mount, tmp_path) as count:
            for _ in range(4):
                mount.kill_daemon()
                before = count()
                wait_for(lambda: count() > before + 16, why="reads")  # noqa: B023
            for _ in range(3):
                mount.kill_daemon()
        assert mount.log.count("the daemon of the mount has ended (signal 9)") == 7
        assert mount.end() == 0


def answers(mount: Mount) -> None:
    """Wait until a daemon does, without asking for more than it knows. It has then taken what was left to it."""
    mount.run(sys.executable, "-c", "import os, sys; os.listxattr(sys.argv[1])", f"{mount.folder}/s/0000")


def test_who_waits_is_answered_by_the_next_one(tmp_path: Path) -> None:
    origin = SlowOrigin()
    with running(origin), mounted(tmp_path / "m", origin.url, "--timeout=300s", "--no-passthrough") as mount:
        assert mount.sh("ls $0/s/0000; cat $0/.stoker-status")
        origin.hold()
        with mount.look(readers.outcome, mount.folder / "s/0001") as waits:
            wait_for(lambda: "s/0001" in origin.asked, why="question")
            mount.kill_daemon()
            answers(mount)
            assert waits.process.poll() is None
            origin.release()
            assert readers.sha256(content("s/0001", 0)) in waits.finish().out
        assert mount.end() == 0


def test_who_is_killed_while_it_waits_for_the_next_one_is_gone(tmp_path: Path) -> None:
    origin = SlowOrigin()
    with running(origin), mounted(tmp_path / "m", origin.url, "--timeout=300s") as mount:
        assert mount.sh("ls $0/s/0000; cat $0/.stoker-status")
        origin.hold()
        with mount.looking("cat", str(mount.folder / "s/0400")) as waits:
            wait_for(lambda: "s/0400" in origin.asked, why="question")
            mount.kill_daemon()
            answers(mount)
            waits.process.terminate()
            waits.process.wait(20)
        origin.release()


def test_what_was_read_and_not_written_down_is_answered(origin: Path, tmp_path: Path) -> None:
    (origin / "lost").write_text("found")
    with mounted(tmp_path / "m", origin) as mount:
        mount.sh("cat $0/s/000 > /dev/null")
        (tmp_path / "once").touch()
        assert mount.sh("cat $0/lost") == "found"
        assert not (tmp_path / "once").exists()
        assert mount.log.count("the daemon of the mount has ended (signal 9)") == 1
        assert mount.end() == 0


def test_writers_do_not_notice_it_either(tmp_path: Path) -> None:
    origin = tmp_path / "empty"
    origin.mkdir()
    with mounted(tmp_path / "m", origin, "--writable") as mount:
        script = (
            "for n in $(seq 60); do head -c 200000 /dev/urandom > $1/f; cp $1/f $0/$n; cmp $1/f $0/$n; done"
        )
        with mount.looking("bash", "-euc", script, str(mount.folder), str(tmp_path)) as writes:
            for number in (10, 25, 40):
                wait_for(lambda: len(os.listdir(origin)) > number, why="files")  # noqa: B023
                mount.kill_daemon()
            done = writes.finish()
        assert done.code == 0, done.text
        assert len([name for name in os.listdir(origin) if name.isdigit()]) == 60
        assert mount.end() == 0


def test_reloads_are_not_what_a_request_is_blamed_for(tmp_path: Path) -> None:
    origin = SlowOrigin()
    with running(origin), mounted(tmp_path / "m", origin.url, "--timeout=300s") as mount:
        assert mount.sh("ls $0/s/0000; cat $0/.stoker-status")
        origin.hold()
        with mount.look(readers.outcome, mount.folder / "s/0001") as waits:
            wait_for(lambda: "s/0001" in origin.asked, why="question")
            for _ in range(5):
                last = mount.daemon()
                mount.holder.send_signal(signal.SIGHUP)
                mount.next_daemon(last)
                answers(mount)
            assert waits.process.poll() is None
            origin.release()
            assert readers.sha256(content("s/0001", 0)) in waits.finish().out
        assert "it fails" not in mount.log
        assert "the daemon of the mount has ended" not in mount.log
