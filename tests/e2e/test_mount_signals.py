"""Signals that come while somebody waits for a mount: as on a disk, none ends a call unless it ends the program."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.storm_origin import content
from tests.e2e import mount_signalled
from tests.e2e.mount_origin import SlowOrigin
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, Looking, Mount, mounted
from tests.e2e.run_helpers import wait_for
from tests.http_servers import running

pytestmark = MOUNT_MARKS
NAME = "s/0001"


@pytest.fixture
def origin() -> Iterator[SlowOrigin]:
    made = SlowOrigin()
    with running(made):
        yield made
        made.release()


def asks(mount: Mount, origin: SlowOrigin, how: str) -> Looking:
    """Who looks at a file, and waits for an origin that says nothing."""
    origin.hold()
    looks = mount.looking(sys.executable, mount_signalled.__file__, str(mount.folder / NAME), how)
    assert looks.line() == "asks"
    wait_for(lambda: origin.asked, why="question")
    return looks


@pytest.mark.parametrize("how", ["alarms", "sent", "stopped"])
def test_signals_that_end_nobody_are_not_noticed(origin: SlowOrigin, tmp_path: Path, how: str) -> None:
    with mounted(tmp_path / "m", origin.url, "--timeout=1h") as mount, asks(mount, origin, how) as looks:
        if how == "sent":
            for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
                looks.process.send_signal(number)
        elif how == "stopped":
            looks.process.send_signal(signal.SIGSTOP)
            looks.process.send_signal(signal.SIGCONT)
        time.sleep(1.0)  # in which the daemon looks several times whether it is to end
        assert not looks.has_ended()
        origin.release()
        size_bytes = len(content(NAME, 0))
        done = looks.finish()
        assert (done.code, done.out) == (0, f"{size_bytes} {size_bytes} {how != 'stopped'}\n"), done.text


@pytest.mark.parametrize("how", ["none", "alarms"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_is_told_to_end_does_whatever_came_before(
    origin: SlowOrigin, tmp_path: Path, number: signal.Signals, how: str
) -> None:
    with mounted(tmp_path / "m", origin.url, "--timeout=1h") as mount, asks(mount, origin, how) as looks:
        time.sleep(0.5)
        assert not looks.has_ended()
        looks.process.send_signal(number)
        looks.process.wait(WAIT_S)
        done = looks.finish()
        assert done.code == -number, done.text
        assert ("KeyboardInterrupt" in done.err, done.out) == (
            (True, "interrupted\n") if number == signal.SIGINT else (False, "")
        ), done.text
        assert "InterruptedError" not in done.err, done.text
        origin.release()
