"""Which signals end the wait of who has asked a mount for something."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stoker.cache.mount.signals import KEPT_MIN, Signals
from stoker.cache.mount.threads import is_ending, is_killed, process_of

HANDLED = """
import signal, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda *_: None)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_who_is_to_end_need_not_wait_and_who_only_got_a_signal_waits_on() -> None:
    ending: set[int] = set()
    signals, waiting = Signals(ending.__contains__), {2, 4, 6}
    for unique in (2, 4, 6):
        signals.asks(unique, unique * 10, waiting)
    ending |= {20, 40}
    assert signals.ending(waiting) == [], "the kernel says of whom there is something to be known"
    signals.signal(2)
    signals.signal(6)
    signals.signal(8)
    assert signals.ending(waiting) == [2]
    ending.add(60)
    assert signals.ending(waiting) == [2, 6], "of a later signal it says nothing"
    assert signals.ending({6}) == [6], "the other has its answer"
    signals.asks(6, 61, {6})
    assert signals.ending({6}) == []


def test_what_was_answered_is_forgotten() -> None:
    signals = Signals(lambda _: True)
    for unique in range(0, 100 * KEPT_MIN, 2):
        signals.asks(unique, 1, {0, unique})
        assert len(signals._threads) <= KEPT_MIN + 1
    signals.signal(0)
    assert signals.ending({0}) == [0]


@contextlib.contextmanager
def stopped(*handled: int) -> Iterator[subprocess.Popen[str]]:
    """A process that does nothing about signals as long as it is stopped."""
    command = [sys.executable, "-c", HANDLED, *(str(int(number)) for number in handled)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("number", "is_handled", "ends"),
    [
        (signal.SIGINT, True, True),
        (signal.SIGQUIT, True, True),
        (signal.SIGTERM, True, False),
        (signal.SIGALRM, True, False),
        (signal.SIGUSR1, True, False),
        (signal.SIGCHLD, True, False),
        (signal.SIGCHLD, False, False),
    ],
)
def test_signals_that_are_said_to_end_somebody(number: signal.Signals, is_handled: bool, ends: bool) -> None:
    with stopped(*([number] if is_handled else [])) as child:
        assert not is_ending(child.pid)
        child.send_signal(number)
        assert is_ending(child.pid) == ends
        assert not is_killed(child.pid)
        assert process_of(child.pid) == child.pid


def test_who_has_ended() -> None:
    with stopped() as child:
        child.send_signal(signal.SIGKILL)
        until = time.monotonic() + 30
        while not is_killed(child.pid):  # it is there until it is waited for
            assert time.monotonic() < until
            time.sleep(0.01)
    assert (is_ending(child.pid), is_killed(child.pid), process_of(child.pid)) == (False, False, 0)
    assert (is_ending(0), is_killed(0), process_of(0)) == (False, False, 0)
