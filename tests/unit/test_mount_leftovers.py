"""What mounts have left that nobody holds is cleared away, and nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from stoker import settings
from stoker.cache.mount import places
from stoker.cache.mount.leftovers import LOG_KEPT_S, clear_left
from stoker.cache.mount.places import MountPlace


@pytest.fixture
def parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    found = tmp_path / "tmp", tmp_path / "run"
    monkeypatch.setattr(settings, "_mounts_parents", lambda: found)
    monkeypatch.setattr(places, "_MOUNTS", str(tmp_path / "mountinfo"))
    (tmp_path / "mountinfo").touch()
    return found


def killed(place: MountPlace, *, log_age_s: float | None = None) -> Path:
    """As its holder leaves it; its folder."""
    assert place.take()
    (place.path / "info").write_text("a token")
    (place.path / "state").touch()
    (place.path / "cache").mkdir()
    (place.path / "cache" / "socket").touch()
    if log_age_s is not None:
        with place.open_log() as log:
            log.write(b"why")
        then = os.stat(place.log_path).st_mtime - log_age_s
        os.utime(place.log_path, (then, then))
    place.let_go()
    return place.path


@pytest.mark.usefixtures("parents")
def test_what_is_left_of_mounts_that_were_killed_is_cleared_away() -> None:
    without_log = killed(MountPlace("/a"))
    recent = killed(MountPlace("/b"), log_age_s=LOG_KEPT_S - 100)
    old = killed(MountPlace("/c"), log_age_s=LOG_KEPT_S + 100)
    clear_left()
    assert (without_log.exists(), old.exists()) == (False, False)
    assert os.listdir(recent) == ["log"]
    clear_left()
    assert (recent / "log").read_text() == "why"
    os.utime(recent / "log", (0, 0))
    clear_left()
    assert os.listdir(recent.parent) == []


def test_also_where_it_is_kept_no_more(parents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_mounts_parents", lambda: parents[::-1])
    left = killed(MountPlace("/a"))
    monkeypatch.setattr(settings, "_mounts_parents", lambda: parents)
    assert left.is_relative_to(parents[1])
    clear_left()
    assert not left.exists()


@pytest.mark.usefixtures("parents")
def test_what_is_held_or_begins_or_is_mounted_stays(tmp_path: Path) -> None:
    held = MountPlace("/held")
    assert held.take()
    (held.path / "info").touch()
    begins = MountPlace("/begins")
    killed(begins, log_age_s=2 * LOG_KEPT_S)
    mounted = killed(MountPlace("/left there"))
    (tmp_path / "mountinfo").write_text(
        "30 1 0:41 / /left\\040there rw - fuse.stoker s3://b rw,user_id=0\n31 1 0:42 / /held rw - tmpfs none rw\n"
    )
    with begins.kept():
        clear_left()
        assert sorted(os.listdir(begins.path)) == ["cache", "info", "lock", "log", "state"]
    assert sorted(os.listdir(held.path)) == ["info", "lock"]
    assert MountPlace("/left there").is_known()
    assert (mounted / "info").exists()
    clear_left()
    assert not begins.path.exists()
    held.leave()


def test_what_is_no_mounts_stays(parents: tuple[Path, Path], tmp_path: Path) -> None:
    above = parents[0] / "mounts"
    above.mkdir(parents=True)
    parents[0].chmod(0o700)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "info").touch()
    (above / ("0" * 16)).symlink_to(tmp_path / "elsewhere")
    (above / ("1" * 16)).touch()
    (above / "theirs").mkdir()
    (above / "theirs" / "info").touch()
    clear_left()
    assert sorted(os.listdir(above)) == ["0" * 16, "1" * 16, "theirs"]
    assert (tmp_path / "elsewhere" / "info").exists()
    assert (above / "theirs" / "info").exists()


@pytest.mark.usefixtures("parents")
def test_who_mounts_while_others_clear_up_is_neither_refused_nor_cleared_away() -> None:
    ended = threading.Event()

    def clear() -> None:
        while not ended.is_set():
            clear_left()

    clearing = [threading.Thread(target=clear) for _ in range(2)]
    for thread in clearing:
        thread.start()
    try:
        for number in range(300):
            place = MountPlace("/a")
            with place.kept():
                assert place.take(), number
            (place.path / "info").touch()
            assert MountPlace("/a").is_held()
            assert (place.path / "info").exists()
            assert not MountPlace("/a").take()
            place.leave() if number % 3 else place.let_go()
    finally:
        ended.set()
        for thread in clearing:
            thread.join()
