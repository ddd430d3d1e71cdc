"""`stoker mount` where whoever has started it has closed its streams."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stoker.cache.mount.places import MountPlace, mounted_on
from tests.e2e.mounting import MOUNT_MARKS, ROOT, Looking, abort, run_beside
from tests.e2e.run_helpers import own_environment, wait_for

pytestmark = MOUNT_MARKS
SCRIPT = 'exec "$@"'
STOKER = (sys.executable, "-m", "stoker.cli.main")


@pytest.mark.parametrize("way", ["foreground", "background"])
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_it_mounts_without_its_streams(tmp_path: Path, closed: str, way: str) -> None:
    for name in ("origin", "mount"):
        (tmp_path / name).mkdir()
    (tmp_path / "origin" / "a").write_text("it is there")
    folder, environment = tmp_path / "mount", own_environment(tmp_path)
    command = (*STOKER, "mount", str(tmp_path / "origin"), str(folder), f"--cache-dir={tmp_path}/kept")
    words = ("bash", "-c", f"{SCRIPT} {closed}", "bash", *command)
    try:
        if way == "background":
            done = run_beside(folder, *words, "--daemon", environment=environment)
            assert (done.code, done.err) == (0, "")
            read_and_end(folder, environment)
        else:
            with Looking(folder, *words, environment=environment) as holding:
                place = MountPlace(str(folder))
                wait_for(
                    lambda: holding.has_ended() or ((info := place.info()) and info.is_ready), why="mount"
                )
                assert not holding.has_ended(), holding.finish().text
                streams = [os.readlink(f"/proc/{holding.process.pid}/fd/{number}") for number in range(3)]
                assert streams.count("/dev/null") == closed.count("&-")
                read_and_end(folder, environment)
                assert holding.finish().code == 0
    finally:
        abort(folder)


def read_and_end(folder: Path, environment: dict[str, str]) -> None:
    assert run_beside(folder, "cat", str(folder / "a")).out == "it is there"
    assert run_beside(folder, *STOKER, "umount", str(folder), environment=environment).code == 0
    assert mounted_on(str(folder)) is None


def test_what_goes_wrong_is_not_said_to_who_reads_the_output(tmp_path: Path) -> None:
    words = (
        "bash",
        "-c",
        f"cd {ROOT}; {SCRIPT} 2>&-",
        "bash",
        *STOKER,
        "mount",
        f"{tmp_path}/none",
        str(tmp_path),
    )
    done = run_beside(tmp_path, *words, environment=own_environment(tmp_path))
    assert (done.code, done.out, done.err) == (2, "", "")
