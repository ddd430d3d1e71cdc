"""What is left when an agent is killed: nothing of what its workers have started. Real processes and real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from stoker.platform.group_guard import GroupGuard
from stoker.platform.group_watcher import IGNORED, kill_group, started_at

pytestmark = pytest.mark.real

PARENT = """
import os, signal, subprocess, sys, time
from stoker.platform.group_guard import GroupGuard
guard = GroupGuard()
groups = []
for _ in range(2):
    leader = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; exec sleep 1000"], start_new_session=True,
                              stdout=subprocess.PIPE, text=True)
    guard.add(leader.pid)
    groups += [leader.pid, int(leader.stdout.readline())]
guard.remove(groups[0])
print(guard.pid, *groups, flush=True)
time.sleep(1000)
"""
"""Two groups of two; the first is not guarded any more."""


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def sleepers() -> Iterator[Callable[[], int]]:
    """Makes a process that leads a group, with a child; both are gone afterwards."""
    made: list[subprocess.Popen[bytes]] = []

    def make() -> int:
        made.append(subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True))
        wait_until(lambda: len(psutil.Process(made[-1].pid).children()) == 2)
        return made[-1].pid

    yield make
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def heeds_none(pid: int) -> bool:
    """Whether a process ignores what ends or stops others of a terminal."""
    with open(f"/proc/{pid}/status") as status:
        ignored = int(next(line for line in status if line.startswith("SigIgn:")).split()[1], 16)
    return all(ignored >> (number - 1) & 1 for number in IGNORED)


def test_groups_die_with_their_agent_and_no_others() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    groups: list[int] = []
    try:
        assert parent.stdout is not None
        watcher, given_up, its_child, guarded, child = map(int, parent.stdout.readline().split())
        groups = [given_up, guarded]
        assert os.getsid(watcher) == watcher, "Ctrl-C of the terminal does not reach it"
        wait_until(lambda: heeds_none(watcher))
        for number in IGNORED:
            os.kill(watcher, number)
        parent.kill()
        wait_until(lambda: not any(map(is_alive, (guarded, child, watcher))))
        assert is_alive(given_up)
        assert is_alive(its_child)
    finally:
        parent.kill()
        parent.communicate()
        for leader in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)


def test_the_watcher_goes_when_it_is_told_to_and_ends_what_is_left(sleepers: Callable[[], int]) -> None:
    guard = GroupGuard()
    assert guard.pid == 0, "without a group there is none"
    leader = sleepers()
    guard.add(leader)
    watcher = guard.pid
    family = [leader, *(child.pid for child in psutil.Process(leader).children())]
    guard.close()
    assert not psutil.pid_exists(watcher)
    wait_until(lambda: not any(map(is_alive, family)))
    guard.close()


def test_a_watcher_that_somebody_has_killed_is_replaced(sleepers: Callable[[], int]) -> None:
    guard = GroupGuard()
    first, second = sleepers(), sleepers()
    guard.add(first)
    os.kill(guard.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(guard.pid))
    guard.add(second)
    guard.close()
    wait_until(lambda: not is_alive(first) and not is_alive(second))


def test_a_group_whose_leader_is_gone_is_ended_and_one_of_another_process_is_not(
    sleepers: Callable[[], int],
) -> None:
    leader = sleepers()
    started = started_at(leader)
    kill_group(leader, str(int(started) - 1))
    assert is_alive(leader), "the id is another process's by now"
    children = [child.pid for child in psutil.Process(leader).children()]
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: not is_alive(leader))
    assert all(map(is_alive, children))
    kill_group(leader, started)
    wait_until(lambda: not any(map(is_alive, children)))


def test_a_child_whose_parent_died_before_it_could_ask_to_die_with_it_dies_at_once() -> None:
    code = "import os; from stoker.platform.local import die_with; die_with(os.getppid() + 1); print('alive')"
    orphan = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, b"")
    code = "import os; from stoker.platform.local import die_with; die_with(os.getppid()); print('alive')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert child.stdout == b"alive\n"
