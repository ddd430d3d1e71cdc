"""Processes of a mount that are killed under its readers, who notice nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoker.cache.mount.places import MountPlace, mounted_on
from stoker.errors import EnvironmentProblem
from tests.e2e import mount_readers as readers
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, Looking, Mount, mounted, needs, stop
from tests.e2e.run_helpers import wait_for
from tests.http_servers import running

pytestmark = MOUNT_MARKS
READERS = 16
_HERE, _EXCHANGE = -100, 2
"""Of renameat2(2)."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    readers.make(folder, small=40, large=4)
    return folder


@contextlib.contextmanager
def read_by_many(mount: Mount, folder: Path) -> Iterator[Callable[[], int]]:
    """Within it many read; how many reads there were yet. In the end none has noticed anything."""
    until, begun = folder / "until", folder / "begun"

    def count() -> int:
        return sum(len(path.read_bytes().splitlines()) for path in folder.glob("begun.*"))

    with mount.look(readers.read_at_random, mount.folder, READERS, until, begun) as looking:
        wait_for(lambda: count() > 2 * READERS, why="reads")
        yield count
        before = count()
        wait_for(lambda: count() > before + 2 * READERS, why="reads after all")
        until.touch()
        done = looking.finish()
    assert done.code == 0, done.text
    assert done.out.startswith('{"read": '), done.out
    assert done.out.count(":") == 1, f"all were read: {done.out}"


def test_readers_do_not_notice_that_the_daemon_is_killed(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        with read_by_many(mount, tmp_path) as count:
            mount.kill_daemon()
            before = count()
            wait_for(lambda: count() > before + READERS, why="reads")
            for _ in range(5):
                mount.kill_daemon()
        assert mount.log.count("the daemon of the mount has ended (signal 9)") == 6
        assert mount.end() == 0


def stands_in_the_kernel(process: psutil.Process) -> bool:
    """Whether a thread of it waits where no signal ends that."""
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"D":
                return True
    return False


@contextlib.contextmanager
def waiting_for_each_other(mount: Mount, made: SlowOrigin) -> Iterator[tuple[Looking, Looking]]:
    """Who looks something up waits for the daemon, and the daemon, who tells the kernel something, for them: it does
    not end before they have an answer."""
    mount.sh("ls $0/s/0001 > /dev/null")
    made.hold()
    made.asked.clear()
    with (
        mount.looking("stat", "-c", "%s", f"{mount.folder}/s/0400") as looks,
        contextlib.ExitStack() as last,
    ):
        last.callback(made.release)
        wait_for(lambda: made.asked, why="look at the origin")
        refreshes = last.enter_context(mount.looking("stat", f"{mount.folder}/s/.stoker-refresh"))
        daemon = mount.daemon()
        wait_for(lambda: stands_in_the_kernel(daemon), why="wait for who looks")
        yield looks, refreshes


def test_a_daemon_that_is_killed_while_the_kernel_has_it_wait_is_replaced(tmp_path: Path) -> None:
    made = SlowOrigin()
    with running(made), mounted(tmp_path / "m", made.url) as mount:
        with waiting_for_each_other(mount, made) as (looks, refreshes):
            daemon = mount.daemon()
            mount.kill_daemon()
            made.release()
            assert "No such file" in looks.finish().err
            assert refreshes.finish().code == 0
        wait_for(lambda: not psutil.pid_exists(daemon.pid), why="end of the first daemon")
        assert mount.end() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_waits_for_ever_where_the_mount_ends_then(tmp_path: Path, number: int) -> None:
    made = SlowOrigin()
    with (
        running(made),
        mounted(tmp_path / "m", made.url) as mount,
        waiting_for_each_other(mount, made) as (looks, refreshes),
    ):
        mount.kill_daemon()
        for _ in range(1 if number == signal.SIGKILL else 3):
            mount.holder.send_signal(number)
            time.sleep(0.5)
        assert looks.finish().code != 0
        assert refreshes.finish().code != 0
        mount.holder.wait(WAIT_S)


@pytest.mark.parametrize("by_whom", ["umount", "the next mount"])
def test_who_waits_for_what_was_killed_whole_is_let_go(tmp_path: Path, by_whom: str) -> None:
    made = SlowOrigin()
    with (
        running(made),
        mounted(tmp_path / "m", made.url) as mount,
        waiting_for_each_other(mount, made) as (looks, refreshes),
    ):
        daemon = mount.daemon()
        mount.holder.send_signal(signal.SIGSTOP)  # it starts no other daemon
        daemon.kill()
        wait_for(lambda: daemon.status() == psutil.STATUS_ZOMBIE, why="end of what can end of it")
        mount.holder.kill()
        mount.holder.wait(WAIT_S)
        with pytest.raises(subprocess.TimeoutExpired):
            looks.process.wait(1)
        if by_whom == "umount":
            assert mount.command("umount", str(mount.folder)).code == 0
        else:
            made.release()
            with mounted(tmp_path / "m", made.url) as again:
                assert again.sh("ls $0/s/0001")
        assert looks.finish().code != 0
        assert refreshes.finish().code != 0


def test_readers_do_not_notice_reloads_nor_that_the_cache_is_killed(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount, read_by_many(mount, tmp_path) as count:
        for _ in range(2):
            last = mount.cache()
            last.kill()
            wait_for(lambda: mount.cache().pid != last.pid, why="cache")  # noqa: B023
            before = count()
            wait_for(lambda: count() > before + READERS, why="reads")  # noqa: B023
        for _ in range(2):
            daemon, info = mount.daemon(), MountPlace(str(mount.folder)).info()
            assert info is not None
            assert (info.daemon_pid, info.answers) == (daemon.pid, True)
            assert mount.command("mount", "--reload", str(mount.folder)).code == 0
            again = MountPlace(str(mount.folder)).info()
            assert again is not None
            assert (again.daemon_pid != daemon.pid, again.answers) == (True, True), (
                "who has said so waits for it"
            )
            assert not daemon.is_running()
            assert mount.daemon().pid == again.daemon_pid
        assert mount.log.count("starting the daemon anew") == 2
        assert "the daemon of the mount has ended" not in mount.log, "it was asked for"


def test_a_request_that_ends_each_daemon_fails(tmp_path: Path) -> None:
    """As it may be in the way that it waits for an origin when each is killed. The kernel asks for a page once more of
    which it was told that reading ahead has failed."""
    origin = SlowOrigin()
    with running(origin), mounted(tmp_path / "m", origin.url, "--timeout=300s") as mount:
        assert mount.sh("ls $0/s/0000; cat $0/.stoker-status")
        origin.hold()
        with mount.look(readers.outcome, mount.folder / "s/0001") as waits:
            wait_for(lambda: "s/0001" in origin.asked, why="question")
            for kills in range(1, 7):
                # The next one has it now, and answers others.
                wait_for(lambda: "waiting: 1\n" in mount.sh("cat $0/.stoker-status"), why="request it has")
                assert waits.process.poll() is None
                mount.kill_daemon()
                if kills % 3 == 0:
                    wait_for(lambda n=kills // 3: mount.log.count("it fails") == n, why="end of a request")
            assert '"EIO"' in waits.finish().out
        origin.release()


def exchange(one: Path, other: Path) -> None:
    """Both are there at each moment: who looks makes none anew."""
    paths = os.fsencode(one), os.fsencode(other)
    assert ctypes.CDLL(None).renameat2(_HERE, paths[0], _HERE, paths[1], _EXCHANGE) == 0


def test_a_cache_that_cannot_be_started_keeps_nobody(origin: Path, tmp_path: Path) -> None:
    """The daemon is replaced meanwhile, signals are heard, and who reads goes on once it can be started."""
    with mounted(tmp_path / "m", origin, "--no-passthrough") as mount:
        kept, away = tmp_path / "m" / "kept", tmp_path / "m" / "away"
        with mount.look(readers.read_when_told, mount.folder / "l/0", [1000]) as reader:
            assert reader.line() == "opened"
            away.touch()
            exchange(kept, away)
            mount.cache().kill()
            wait_for(lambda: mount.log.count("the cache of the mount cannot be started") > 1, why="tries")
            mount.kill_daemon()
            assert mount.command("mount", "--reload", str(mount.folder)).code == 0
            wait_for(lambda: "starting the daemon anew" in mount.log, why="signal that is heard")
            exchange(kept, away)
            assert reader.tell() == readers.sha256((origin / "l/0").read_bytes()[:1000])
        exchange(kept, away)
        before = mount.log.count("the cache of the mount cannot be started")
        mount.cache().kill()
        wait_for(lambda: mount.log.count("the cache of the mount cannot be started") > before, why="try")
        assert mount.end() == 0


def test_a_daemon_that_cannot_start_is_given_up(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin, "--no-passthrough") as mount:
        state = MountPlace(str(mount.folder)).state_path
        with mount.look(readers.outcome, mount.folder / "s/001") as reads:
            assert reads.process.wait(WAIT_S) == 0
        state.unlink()
        state.mkdir()
        mount.daemon().kill()
        with mount.look(readers.outcome, mount.folder / "s/002") as waits:
            assert mount.holder.wait(120) == EnvironmentProblem.exit_code
            assert re.search('"(ENOTCONN|ECONNABORTED|ENOENT)"', waits.finish().out)
        assert "10 daemons in a row" in mount.log
        assert mounted_on(str(mount.folder)) is None
        assert mount.sh("ls -A $0") == ""


def test_a_mount_goes_with_its_holder(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_temporary = tmp_path / "tmp"
    own_temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(own_temporary))
    with mounted(tmp_path / "m", origin) as mount:
        mount.sh("cat $0/s/* > /dev/null")
        family = mount.holder.children(recursive=True)
        mount.holder.kill()
        mount.holder.wait()
        gone, left = psutil.wait_procs(family, timeout=WAIT_S)
        assert len(gone) >= 2
        assert not left, "nobody is left"
        assert not [path for path in own_temporary.iterdir() if path.name.startswith("stoker-")]
        assert mounted_on(str(mount.folder)) is None
        assert mount.sh("ls -A $0") == ""


def test_what_is_left_is_taken_away_by_the_next_mount(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        with mount.look(readers.read_when_told, mount.folder / "s/001", [10]) as open_there:
            assert open_there.line() == "opened"
            daemon, family = mount.daemon(), mount.holder.children(recursive=True)
            mount.holder.suspend()
            daemon.kill()
            mount.holder.kill()
            mount.holder.wait()
            assert not psutil.wait_procs(family, timeout=WAIT_S)[1], (
                "the cache of it has let go of its folder"
            )
        assert mounted_on(str(mount.folder)) is not None
        assert "Transport endpoint" in mount.run("ls", str(mount.folder)).err
        assert "left by a process that is gone" in mount.command("mount").out
        with mounted(tmp_path / "m", origin) as again:
            assert "was left there by a process that is gone; it is taken away" in again.log
            there = readers.sha256((origin / "s/001").read_bytes())
            assert again.call(readers.outcomes, again.folder, ["s/001"]) == [there]
            assert again.end() == 0


def test_ctrl_c_ends_it_also_while_somebody_reads(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        family = mount.holder.children(recursive=True)
        with mount.look(readers.read_when_told, mount.folder / "l/1", [1000, 4_000_000]) as reader:
            assert reader.line() == "opened"
            mount.holder.send_signal(signal.SIGINT)
            wait_for(lambda: mounted_on(str(mount.folder)) is None, why="end of the mount")
            assert mount.holder.poll() is None, "it goes on for who has something open"
            assert reader.tell() == readers.sha256((origin / "l/1").read_bytes()[:1000])
            assert reader.tell() == readers.sha256((origin / "l/1").read_bytes()[1000:])
        assert mount.holder.wait(WAIT_S) == 0
        assert not psutil.wait_procs(family, timeout=WAIT_S)[1]


@pytest.mark.parametrize("end", ["signal", "kill"])
def test_what_is_mounted_in_its_place_since_stays(origin: Path, tmp_path: Path, end: str) -> None:
    """The mount was ended while somebody reads, who reads on through the first signal."""
    with mounted(tmp_path / "m", origin) as mount:
        family = mount.holder.children(recursive=True)
        with mount.look(readers.read_when_told, mount.folder / "l/1", [1000, 4_000_000]) as reader:
            assert reader.line() == "opened"
            assert mount.command("umount", "--lazy", str(mount.folder)).code == 0
            subprocess.run(["mount", "-t", "tmpfs", "none", mount.folder], check=True)
            try:
                data = (origin / "l/1").read_bytes()
                if end == "signal":
                    mount.holder.send_signal(signal.SIGTERM)
                    wait_for(lambda: "shows something else by now" in mount.log, why="answer")
                    assert reader.tell() == readers.sha256(data[:1000])
                    assert reader.tell() == readers.sha256(data[1000:])
                else:
                    mount.holder.kill()
                    mount.holder.wait()
                reader.process.kill()
                reader.process.wait()
                assert not psutil.wait_procs([*family, mount.holder], timeout=WAIT_S)[1]
                assert (there := mounted_on(str(mount.folder))) is not None
                assert there.file_system == "tmpfs"
            finally:
                subprocess.run(["umount", mount.folder], check=True)


def test_a_signal_to_a_mount_that_was_ended_lets_its_readers_go_on(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        with mount.look(readers.read_when_told, mount.folder / "l/1", [1000, 4_000_000]) as reader:
            assert reader.line() == "opened"
            assert mount.command("umount", "--lazy", str(mount.folder)).code == 0
            mount.holder.send_signal(signal.SIGTERM)
            data = (origin / "l/1").read_bytes()
            wait_for(lambda: "nobody finds the mount there any more" in mount.log, why="answer")
            assert reader.tell() == readers.sha256(data[:1000])
            assert reader.tell() == readers.sha256(data[1000:])
        assert mount.holder.wait(WAIT_S) == 0


@needs("fusermount3")
def test_fusermount_ends_it(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        mount.sh("fusermount3 -u $0")
        assert mount.holder.wait(WAIT_S) == 0


def test_a_daemon_that_stands_still_is_replaced(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        daemon = mount.daemon()
        stop(daemon)
        assert mount.command("mount", "--reload", str(mount.folder)).code == 0
        mount.next_daemon(daemon)
        assert "the daemon of the mount does not end: it is killed" in mount.log
        assert mount.sh("cat $0/s/000 | wc -c") == "100\n"


def test_a_reload_that_nothing_comes_of_is_said(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        MountPlace(str(mount.folder)).state_path.unlink()  # no other daemon can go on
        done = mount.command("mount", "--reload", str(mount.folder))
        assert done.code == EnvironmentProblem.exit_code, done.text
        assert (
            f"the mount on {mount.folder} has ended in place of starting its daemon anew: its log" in done.err
        )
        assert mount.holder.wait(WAIT_S) == EnvironmentProblem.exit_code
        done = mount.command("mount", "--reload", str(mount.folder))
        assert "nothing is mounted on" in done.err


def test_no_daemon_is_left_where_the_holder_dies_as_it_starts_one(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        last = mount.daemon()
        last.kill()
        next_one = mount.next_daemon(last)  # which has hardly begun
        place = MountPlace(str(mount.folder))
        wait_for(
            lambda: (info := place.info()) and info.daemon_pid == next_one.pid, why="word of what it is to do"
        )
        mount.holder.kill()
        mount.holder.wait()
        wait_for(lambda: not next_one.is_running() or next_one.status() == psutil.STATUS_ZOMBIE, why="end")
        wait_for(lambda: mounted_on(str(mount.folder)) is None, why="end of the mount")


def test_what_its_daemon_had_written_down_is_removed(origin: Path, tmp_path: Path) -> None:
    """Without it the next one could tell nobody anything, and readers would wait for ever."""
    with mounted(tmp_path / "m", origin) as mount:
        MountPlace(str(mount.folder)).state_path.unlink()
        mount.daemon().kill()
        assert mount.holder.wait(WAIT_S) == EnvironmentProblem.exit_code, mount.log
        assert "somebody has removed what its daemon had written down" in mount.log
        assert mounted_on(str(mount.folder)) is None


def test_many_small_files_are_opened_without_asking(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    for number in range(1000):
        (origin / f"{number}").write_bytes(b"%d" % number)
    with mounted(tmp_path / "m", origin) as mount:
        assert "nearly all is in small files" in mount.log
        assert mount.sh("cat $0/7 $0/11") == "711"
    with mounted(tmp_path / "other", origin, "--no-small-files") as mount:
        assert "nearly all is in small files" not in mount.log
