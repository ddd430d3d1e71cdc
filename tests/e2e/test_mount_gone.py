"""A mount whose origin is gone: what is cached goes on, nobody waits for ever, and who is killed is gone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.storm_origin import content
from tests.e2e import mount_readers as readers
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, Mount, mounted, needs, wait_until_all_held
from tests.e2e.run_helpers import wait_for
from tests.http_servers import running

pytestmark = MOUNT_MARKS
CACHED = ["s/0001", "s/0002", "big/00"]
TIMEOUT = "--timeout=8s"
SHORT = ("--kernel-ttl=0s", "--ttl=0s", "--absent-ttl=0s")
FAILS = {"EIO", "ETIMEDOUT"}


@pytest.fixture
def origin() -> Iterator[SlowOrigin]:
    made = SlowOrigin()
    with running(made):
        yield made
        made.release()


@contextlib.contextmanager
def no_packets(port: int) -> Iterator[None]:
    """What is sent to that port is never heard of again."""
    rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
    subprocess.run(["iptables", "-w", "-I", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-w", "-D", *rule], check=True)


@contextlib.contextmanager
def gone(origin: SlowOrigin, how: str) -> Iterator[None]:
    """Within it the origin is, in one of the ways in which it can be."""
    with contextlib.ExitStack() as stack:
        if how == "silent":
            origin.hold()
            stack.callback(origin.release)
        elif how == "unreachable":
            stack.enter_context(no_packets(origin.server_port))
        else:
            origin.mood = "refusing"
            stack.callback(setattr, origin, "mood", "ok")
        yield


def read_all(mount: Mount) -> None:
    """Until the cache holds what is CACHED, and has its names."""
    there = [readers.sha256(content(name, 0)) for name in CACHED]
    mount.sh("ls -l $0/s $0/big > /dev/null")
    assert mount.call(readers.outcomes, mount.folder, CACHED) == there
    wait_until_all_held(mount, {name: len(content(name, 0)) for name in CACHED})


@needs("iptables")
@pytest.mark.parametrize("how", ["silent", "unreachable", "refusing"])
def test_what_is_cached_goes_on(origin: SlowOrigin, tmp_path: Path, how: str) -> None:
    """Also where nobody believes for a moment what was known."""
    there = [readers.sha256(content(name, 0)) for name in CACHED]
    with mounted(tmp_path / "m", origin.url, TIMEOUT, *SHORT) as mount:
        read_all(mount)
        with gone(origin, how):
            mount.sh("echo 3 > /proc/sys/vm/drop_caches")
            assert mount.call(readers.outcomes, mount.folder, CACHED) == there
            assert mount.call(readers.outcomes, mount.folder, CACHED) == there
            said = mount.call(readers.outcomes, mount.folder, ["s/0009", "big/09", "none"])
            assert set(said) <= FAILS, said
            assert mount.call(readers.outcomes, mount.folder, CACHED) == there
            assert "held_bytes" in mount.sh("cat $0/.stoker-status")

        def is_well() -> bool:
            return bool(mount.call(readers.outcomes, mount.folder, ["s/0009"])[0] not in FAILS)

        wait_for(is_well, why="origin that is there again")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_who_is_killed_while_it_waits_is_gone(origin: SlowOrigin, tmp_path: Path, number: int) -> None:
    with mounted(tmp_path / "m", origin.url, "--timeout=1h") as mount:
        mount.sh("ls $0/s/0001 $0/big/05")
        origin.hold()
        for name in ("s/0001", "s/0400", "big/05"):
            # One to be opened and read, one whose name is not known, one that is large.
            before = len(origin.asked)
            with mount.looking("cat", str(mount.folder / name)) as waits:
                wait_for(lambda: len(origin.asked) > before, why="question")  # noqa: B023
                assert waits.process.poll() is None
                waits.process.send_signal(number)
                waits.process.wait(WAIT_S)
        origin.release()
        there = readers.sha256(content("s/0001", 0))
        assert mount.call(readers.outcomes, mount.folder, ["s/0001"]) == [there]


def test_many_who_wait_for_one_name_do_not_wait_for_each_other(origin: SlowOrigin, tmp_path: Path) -> None:
    """The kernel has them ask one after the other."""
    with mounted(tmp_path / "m", origin.url, TIMEOUT) as mount, contextlib.ExitStack() as stack:
        mount.sh("ls $0 > /dev/null")
        origin.hold()
        script = "for n in {1..100}; do (cat $0/s/0400 2>&1 || true) & done; wait"
        waits = stack.enter_context(mount.looking("bash", "-c", script, str(mount.folder)))
        said = waits.finish().out
        assert said.count("Input/output error") + said.count("timed out") == 100, said
        origin.release()


def test_what_is_cached_is_read_beside_many_who_wait(origin: SlowOrigin, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin.url, "--timeout=1h", "--kernel-ttl=1h", "--ttl=1h") as mount:
        read_all(mount)
        origin.hold()
        script = "for n in {1000..1199}; do cat $0/s/$n & done; wait"
        with mount.looking("bash", "-c", script, str(mount.folder)):
            wait_for(lambda: sum(name.startswith("s/1") for name in origin.asked) > 10, why="many that wait")
            mount.sh("echo 1 > /proc/sys/vm/drop_caches")
            there = [readers.sha256(content(name, 0)) for name in CACHED]
            assert mount.call(readers.outcomes, mount.folder, CACHED) == there
        origin.release()
