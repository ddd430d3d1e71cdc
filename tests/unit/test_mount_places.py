"""Where mounts are, and what is kept of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker import settings
from stoker.cache.mount import places
from stoker.cache.mount.places import FILE_SYSTEM, MountPlace, full_path, mounted, mounted_on
from stoker.errors import ConfigError, EnvironmentProblem


def test_the_path_of_a_folder_has_no_links(tmp_path: Path) -> None:
    real = tmp_path / "real" / "deep"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(real)
    (tmp_path / "real" / "relative").symlink_to("../absolute")
    (tmp_path / "to_nothing").symlink_to("real/none")
    for name in ("real/deep", "link/deep", "absolute", "real/relative", "link/relative", "real/../absolute/"):
        assert full_path(f"{tmp_path}/{name}") == str(real), name
    assert full_path(f"{tmp_path}/to_nothing") == f"{tmp_path}/real/none"
    assert full_path("/") == "/"


def test_a_link_to_itself_has_no_path(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name in ("a", "a/deeper"):
        with pytest.raises(EnvironmentProblem, match="name the folder itself"):
            full_path(f"{tmp_path}/{name}")
    with pytest.raises(EnvironmentProblem, match="none is not there"):
        full_path(f"{tmp_path}/none/a")


def test_what_is_kept_of_a_mount_is_where_every_environment_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = MountPlace(str(tmp_path))
    assert place.take()
    try:
        for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
            monkeypatch.setenv(name, str(tmp_path))
        again = MountPlace(str(tmp_path))
        assert (again.path, again.is_held(), again.take()) == (place.path, True, False)
        assert settings.mounts_dir().stat().st_uid == os.getuid()
        assert settings.mounts_dir().parent.stat().st_mode & 0o077 == 0
    finally:
        place.leave()


@pytest.fixture
def parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """As /run/stoker-0, where there is no /run yet, and /tmp/stoker-0."""
    in_run, in_tmp = tmp_path / "run" / "7" / "stoker", tmp_path / "tmp"

    def found() -> tuple[Path, Path]:
        return (in_run, in_tmp) if settings._is_own_folder(in_run.parent) else (in_tmp, in_run)

    monkeypatch.setattr(settings, "_mounts_parents", found)
    return in_run, in_tmp


def test_a_mount_is_found_also_by_who_has_another_folder_for_it(
    parents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_run, in_tmp = parents
    place = MountPlace("/m")
    assert place.take()
    assert place.path.is_relative_to(in_tmp)
    in_run.parent.mkdir(parents=True)
    again = MountPlace("/m")
    assert (again.path, again.is_held(), again.take()) == (place.path, True, False)
    other = MountPlace("/other")
    assert other.path.is_relative_to(in_run)
    assert other.take()
    place.leave()
    assert MountPlace("/m").path.is_relative_to(in_run)

    monkeypatch.setattr(settings, "_is_own_folder", lambda path: False)  # and not any more
    assert MountPlace("/m").path.is_relative_to(in_tmp)
    assert (MountPlace("/other").path, MountPlace("/other").is_held()) == (other.path, True)
    other.let_go()  # as one that was killed
    found = MountPlace("/other")
    assert (found.path, found.is_known(), found.is_held()) == (other.path, True, False)


def test_one_folder_has_one_holder_wherever_each_keeps_it(parents: tuple[Path, Path]) -> None:
    in_run, _ = parents
    first = MountPlace("/m")
    in_run.parent.mkdir(parents=True)
    second = MountPlace("/m")
    assert second.path != first.path
    assert first.take()
    assert not second.take()
    assert not second.is_known(), "it leaves nothing behind"
    first.leave()
    assert second.take()
    second.leave()


def test_mounts_of_a_user_outlast_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes /run/user/UID away when the user logs out; what was kept there before is found."""
    uid = 1_000_000 + os.getpid()
    in_tmp, in_run = Path(f"/tmp/stoker-{uid}"), Path(f"/run/user/{uid}/stoker")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(settings, "_is_own_folder", lambda path: True)
    assert settings._mounts_parents() == (in_tmp, in_run)
    in_tmp.mkdir(mode=0o700)
    try:  # by another user, who keeps nobody from mounting
        assert settings._mounts_parents() == (in_run, in_tmp)
    finally:
        in_tmp.rmdir()
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert settings._mounts_parents() == (Path("/run/stoker-0"), Path("/tmp/stoker-0"))
    monkeypatch.setattr(settings, "_is_own_folder", lambda path: False)
    assert settings._mounts_parents() == (Path("/tmp/stoker-0"), Path("/run/stoker-0"))


def can_be_cleared(path: Path) -> bool:
    """By systemd-tmpfiles, which does as this does."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def test_who_cleans_tmp_leaves_what_is_held_alone(tmp_path: Path) -> None:
    place, another = MountPlace(str(tmp_path)), MountPlace(str(tmp_path))
    with place.kept():
        assert not can_be_cleared(place.path), "it is about to be taken"
    assert not place.path.exists(), "nothing came of it"
    assert place.take()
    place.log_path.touch()
    assert not can_be_cleared(place.path)
    assert not another.take()
    with another.kept():
        pass
    assert not can_be_cleared(place.path)
    place.let_go()
    assert can_be_cleared(place.path)
    assert another.take()
    assert not can_be_cleared(place.path)
    another.leave()
    assert can_be_cleared(place.path)
    place.log_path.unlink()
    place.path.rmdir()


def test_who_takes_it_waits_for_who_clears_it_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = MountPlace(str(tmp_path))
    place.path.mkdir(parents=True)
    clearing = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(clearing, fcntl.LOCK_EX)
    waited: list[float] = []

    def cleared(seconds: float) -> None:
        waited.append(seconds)
        place.path.rmdir()
        os.close(clearing)

    # Its own clock: threads that other tests have left may sleep, too.
    monkeypatch.setattr(places, "time", SimpleNamespace(sleep=cleared, monotonic=time.monotonic))
    assert place.take()
    assert len(waited) == 1
    assert (place.is_held(), can_be_cleared(place.path)) == (True, False)
    place.leave()


def test_where_others_may_write_no_mount_is_looked_for(parents: tuple[Path, Path]) -> None:
    in_run, in_tmp = parents
    place = MountPlace("/m")
    assert place.take()
    in_tmp.chmod(0o755)
    in_run.parent.mkdir(parents=True)
    assert MountPlace("/m").path.is_relative_to(in_run)
    place.leave()


def test_what_is_kept_may_be_cleared_away_meanwhile(tmp_path: Path) -> None:
    """As /run/user/UID is when the user logs out, and /tmp by who must."""
    place = MountPlace(str(tmp_path))
    assert place.take()
    shutil.rmtree(place.path)
    place.leave()
    assert place.take()
    place.leave()


def test_a_place_that_was_left_can_be_taken(tmp_path: Path) -> None:
    place = MountPlace(str(tmp_path))
    assert place.take()
    (place.path / "state").mkdir()
    (place.path / "token").touch()
    assert place.is_known()
    place.leave()
    assert not place.path.exists()
    assert (place.is_known(), place.is_held()) == (False, False)
    assert place.take()
    assert MountPlace(str(tmp_path)).is_held()
    place.log_path.touch()
    place.leave()
    assert os.listdir(place.path) == ["log"]
    place.log_path.unlink()
    place.path.rmdir()


def test_paths_of_mounts_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "mountinfo"
    lines.write_bytes(
        b"30 1 0:41 / /a\rb rw - fuse.stoker s3://b\rc rw,user_id=0\n"
        b"a line of three\n"
        b"31 1 0:42 / /\xff\\040\x0b\xe2\x80\xa8 rw - fuse.stoker source rw,user_id=7\n"
    )
    monkeypatch.setattr(places, "_MOUNTS", str(lines))
    assert list(mounted()) == [
        ("/a\rb", "0:41", FILE_SYSTEM, "s3://b\rc", 0),
        ("/\udcff \x0b\u2028", "0:42", FILE_SYSTEM, "source", 7),
    ]
    assert mounted_on("/a\rb") is not None


def test_who_looks_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, another, looking = (MountPlace(str(tmp_path)) for _ in range(3))
    place.path.mkdir(mode=0o700, parents=True)
    (place.path / "lock").touch()  # as of a holder that was killed
    close = os.close
    found: list[bool] = []

    def closing(fd: int) -> None:
        monkeypatch.setattr(os, "close", close)
        found.extend((another.is_held(), place.take(), another.is_held()))  # while somebody looks
        close(fd)

    monkeypatch.setattr(os, "close", closing)
    assert not looking.is_held()
    try:
        assert found == [False, True, True]
        assert not another.take()
    finally:
        place.leave()


def test_a_folder_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for name in (folder, tmp_path / "link"):
        with pytest.raises(ConfigError, match="take a folder whose path is UTF-8"):
            full_path(str(name))
