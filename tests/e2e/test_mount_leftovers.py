"""What a mount that was killed leaves, a token among it, the next `stoker mount` of whatever clears away."""

from __future__ import annotations

import os
import random
from pathlib import Path

from stoker.cache.mount.places import MountPlace, mounted_on
from tests.e2e.cache_helpers import served
from tests.e2e.mounting import MOUNT_MARKS, mounted, stop
from tests.e2e.run_helpers import wait_for

pytestmark = MOUNT_MARKS


def test_what_a_mount_that_was_killed_left_is_cleared_away(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "a").write_bytes(random.Random(1).randbytes(1000))
    with (
        served(tmp_path / "server", {"b": f"file://{origin}"}, "--token", "the-token") as server,
        mounted(tmp_path / "stays", origin) as stays,
    ):
        (tmp_path / "token").write_text("the-token")
        options = (f"--endpoint={server.url}", f"--token-file={tmp_path / 'token'}")
        with mounted(tmp_path / "killed", "stoker://b", *options) as killed:
            place = MountPlace(str(killed.folder))
            daemon = killed.daemon()
            stop(daemon)
            killed.holder.kill()
            killed.holder.wait()
            # As long as it is mounted it is known what it is.
            try:
                with mounted(tmp_path / "first", origin):
                    assert place.token_path.read_text() == "the-token"
                    assert "left by a process that is gone" in stays.command("mount").out
            finally:
                daemon.resume()
        wait_for(lambda: mounted_on(str(killed.folder)) is None, why="end of the mount")
        assert {"info", "state", "token", "cache", "lock"} <= set(os.listdir(place.path))
        with mounted(tmp_path / "second", origin) as second:
            assert not place.path.exists()
            assert second.sh("cat $0/a | wc -c") == "1000\n"
            assert stays.sh("cat $0/a | wc -c") == "1000\n"
        stays.kill_daemon()
        assert stays.sh("ls $0") == "a\n"
