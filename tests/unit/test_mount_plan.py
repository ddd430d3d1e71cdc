"""What `stoker mount` makes of what it is told, and how it says what it found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from stoker.cache.mount import device, holding, places
from stoker.cache.mount.holder import HolderConfig
from stoker.cache.mount.places import BucketPlace, MountInfo, MountPlace, mounted_on
from stoker.cli import mount
from stoker.cli.main import build_parser
from stoker.cli.main import main as stoker
from stoker.cli.mount_plan import plan, take_away
from stoker.cli.mount_words import take_options
from stoker.errors import ConfigError, EnvironmentProblem


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TOKEN", "CAPACITY", "CA", "CERT", "CERT_KEY"):
        monkeypatch.delenv(f"STOKER_CACHE_{name}", raising=False)
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))


def planned(source: str | Path, folder: str | Path, *options: str) -> HolderConfig:
    """What `stoker mount` would hold."""
    arguments = build_parser().parse_args(["mount", str(source), str(folder), *options])
    take_options(arguments)
    return plan(arguments, str(folder))


def test_mounts_with_any_bytes_in_their_names_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "mountinfo"
    lines.write_bytes(b"30 1 0:41 / /\xff\r\x1b[2Jx rw - fuse.stoker \xc3\xbc rw,user_id=4294967294\n")
    monkeypatch.setattr(places, "_MOUNTS", str(lines))
    assert stoker(["mount"]) == 0
    assert capsys.readouterr().out == "ü on /\\xff\\r\\x1b[2Jx (another user's)\n"
    assert stoker(["mount", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["source"]) == ("/\\xff\r\x1b[2Jx", "ü")


def test_a_mount_waits_for_nothing_that_lies_in_it(tmp_path: Path) -> None:
    for name in ("m", "origin/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("m")
    origin, folder, own = tmp_path / "origin", tmp_path / "m", tmp_path / "cache"
    for source, there, options, words in (
        (origin, folder, (f"--cache-dir={folder}/cache",), "the cache, .*/m/cache, .*say --cache-dir"),
        (origin, folder, (f"--cache-dir={tmp_path}/link/a/b",), "the cache, .*/m/a/b, "),
        (origin, folder, (f"--cache-dir={tmp_path}",), "the cache, "),
        ("s3://bucket", tmp_path, (), "the cache, "),
        (
            "s3://bucket",
            own,
            ("--writable", f"--cache-dir={tmp_path}/kept"),
            "what is written .*STOKER_CACHE_DIR",
        ),
        (origin, origin, (), "the origin, .*mount it on a folder elsewhere"),
        (origin, origin / "deep", (), "the origin, "),
        ("/", folder, (), "the origin, "),
        (f"file://{tmp_path}/%6Drigin/../link/x", folder, (), "the origin, "),
        ("s3://bucket", "/", ("--cache-ttl=1s",), "what is kept of a mount"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(source, there, *options)
    for source, there, options in (
        (origin, folder, (f"--cache-dir={folder}-cache",)),
        (origin, tmp_path / "origin 2", ("--writable",)),
        ("s3://bucket/", own, (f"--cache-dir={tmp_path}/kept",)),
    ):
        assert planned(source, there, *options).folder == str(there)


@pytest.mark.parametrize("way", ["option", "fstab", "environment"])
def test_paths_are_where_the_command_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The holder in the background works elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_CACHE_DIR", "kept")
    monkeypatch.setenv("STOKER_CACHE_CERT", "certificates/mine.pem")
    monkeypatch.setenv("STOKER_CACHE_CERT_KEY", "certificates/mine.key")
    if way == "environment":
        monkeypatch.setenv("STOKER_CACHE_CA", "certificates/ca.pem")
    options = {"option": ["--ca", "certificates/ca.pem"], "fstab": ["-o", "ca=certificates/ca.pem"]}.get(
        way, []
    )
    fleet = planned("stoker://b", tmp_path / "m", "--endpoint=https://host:1", *options)
    assert fleet.place.tls.names == tuple(
        f"{tmp_path}/certificates/{name}" for name in ("ca.pem", "mine.pem", "mine.key")
    )
    assert Path(fleet.staging_path).parent == tmp_path / "kept" / "staging"
    near = planned("stoker://b", tmp_path / "m", "--endpoint=https://host:1", "--cache-dir=near", *options)
    assert near.embedded is not None
    assert near.embedded.directory == f"{tmp_path}/near"
    assert near.embedded.origin_url == f"stoker+https://host:1/b?ca_file={tmp_path}/certificates/ca.pem"
    plain = planned("stoker://b", tmp_path / "m", "--endpoint=http://host:1")
    assert plain.place.tls.ca == ("" if way != "environment" else f"{tmp_path}/certificates/ca.pem")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cache-dir=/tmp/\udcff",), "cache-dir .*: give a name that is UTF-8"),
        (("-o", "cache_dir=/tmp/\udcff"), "cache-dir .*: give a name that is UTF-8"),
        ((f"--ttl={'9' * 400}",), "--ttl .*: give at most ten years"),
        (("--timeout=3651d",), "--timeout 3651d: give at most ten years"),
        ((f"--cache-ttl={'9' * 400}d",), "--cache-ttl .*: give at most ten years"),
        ((f"--capacity={'9' * 400}",), "--capacity .*: no disk is that large"),
        (("--capacity=0",), "--capacity: 0 is too little: give at least 20 MB"),
        (("-o", "capacity=1KB"), "--capacity: 1KB is too little: give at least 20 MB"),
        (("--capacity=19.9MB",), "--capacity: 19.9MB is too little"),
        ((f"--uid={'9' * 5000}",), "--uid .*: give a number"),
        (("--names-max=999",), "--names-max 999: give at least 1000"),
        (("-o", "names_max=many"), "--names-max many: give a number"),
    ],
)
def test_what_nobody_can_mean_is_said(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned("s3://bucket", tmp_path / "m", *options)
    assert planned("s3://bucket", tmp_path / "m", "--ttl=3650d").settings.ttl_s == 315_360_000
    named = planned("s3://bucket", tmp_path / "m", "--names-max=3000000").settings
    assert (named.nodes_max, named.known_max) == (3_000_000, 1_500_000)


def test_names_that_are_no_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "\udcff"
    source.mkdir()
    with pytest.raises(ConfigError, match=r"source .*: give a name that is UTF-8"):
        planned(source, tmp_path / "m")
    monkeypatch.chdir(source)
    monkeypatch.setenv("STOKER_CACHE_DIR", "kept")
    with pytest.raises(ConfigError, match=r"STOKER_CACHE_DIR .*: give a name that is UTF-8"):
        planned("s3://bucket", tmp_path / "m")
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SOURCE .*: give a name that is UTF-8"):
        planned(".", tmp_path / "m", f"--cache-dir={tmp_path}/kept")


def test_a_token_is_written_by_who_holds_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was ended lazily holds it while it goes on: who comes meanwhile leaves its token alone."""
    folder = tmp_path / "m"
    folder.mkdir()
    monkeypatch.setenv("STOKER_CACHE_TOKEN", "second")
    options = ("--endpoint=http://127.0.0.1:1", f"--cache-dir={tmp_path}/kept")
    place = MountPlace(str(folder))
    config = planned("stoker://b", folder, *options)
    assert config.embedded is not None
    assert config.embedded.origin_url == f"stoker+http://127.0.0.1:1/b?token_file={place.token_path}"
    assert not place.path.exists(), "to plan writes nothing"
    assert place.take()
    try:
        place.keep_token("first")
        assert stoker(["mount", "stoker://b", str(folder), *options]) != 0
        assert "is being mounted" in capsys.readouterr().err
        assert place.token_path.read_text() == "first"
        assert place.token_path.stat().st_mode & 0o777 == 0o600
    finally:
        place.leave()
    assert not place.path.exists()


def test_the_token_of_a_mount_is_there_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    monkeypatch.setenv("STOKER_CACHE_TOKEN", "mine")
    place, found = MountPlace(str(folder)), []
    place.path.mkdir(mode=0o700, parents=True)
    place.token_path.write_text("of one that was killed")

    def run(_: holding.Holder) -> int:
        found.append((place.is_held(), place.token_path.read_text()))
        return 0

    monkeypatch.setattr(holding.Holder, "run", run)
    config = planned("stoker://b", folder, "--endpoint=http://h:1", f"--cache-dir={tmp_path}/kept")
    holder = MountPlace(str(folder))
    assert holding.hold(config, holder, lambda _: None) == 0
    assert found == [(True, "mine")]
    holder.leave()


def test_what_is_empty_is_not_the_folder_that_one_works_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (("mount", "", "m"), "SOURCE is empty"),
        (("mount", "/", ""), "DIR is empty"),
        (("mount", "--reload", ""), "DIR is empty"),
        (("umount", ""), "DIR is empty"),
    ):
        assert stoker(list(words)) == ConfigError.exit_code
        assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--cache-dir is empty"):
        planned("s3://bucket", tmp_path / "m", "--cache-dir=")


def test_who_ends_a_mount_is_not_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "mountinfo"
    lines.write_text(f"30 1 0:41 / {tmp_path} rw - fuse.stoker s3://b rw,user_id={os.getuid()}\n")
    monkeypatch.setattr(places, "_MOUNTS", str(lines))

    def refuse(folder: str, is_lazy: bool) -> None:
        raise device.MountBusy(f"{folder} is in use")

    monkeypatch.setattr(device, "unmount", refuse)
    with open(lines), subprocess.Popen(["sleep", "1000"], cwd=tmp_path) as other:
        try:
            assert stoker(["umount", str(tmp_path)]) == EnvironmentProblem.exit_code
        finally:
            other.kill()
    said = capsys.readouterr().err
    assert f"used by {other.pid} (sleep 1000): end that first" in said


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MountPlace:
    """What a holder that was killed has left, on a list of mounts that says so."""
    place = MountPlace(str(tmp_path))
    place.path.mkdir(mode=0o700, parents=True)
    for name in ("lock", "info", "token", "state"):
        (place.path / name).touch()
    lines = tmp_path / "mountinfo"
    lines.write_text(f"30 1 0:41 / {tmp_path} rw - fuse.stoker s3://b rw,user_id={os.getuid()}\n")
    monkeypatch.setattr(places, "_MOUNTS", str(lines))
    return place


def test_of_a_mount_that_was_left_nothing_stays(
    tmp_path: Path, left: MountPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, bool]] = []
    monkeypatch.setattr(device, "unmount", lambda folder, is_lazy: ended.append((folder, is_lazy)))
    assert stoker(["umount", str(tmp_path)]) == 0
    assert ended == [(str(tmp_path), True)]
    assert not left.path.exists()


def test_a_mount_that_was_left_and_cannot_be_ended_is_still_known(
    tmp_path: Path, left: MountPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str, is_lazy: bool) -> None:
        raise EnvironmentProblem(f"cannot unmount {folder}")

    monkeypatch.setattr(device, "unmount", refuse)
    assert stoker(["umount", str(tmp_path)]) == EnvironmentProblem.exit_code
    assert (left.is_known(), left.is_held(), (left.path / "info").exists()) == (True, False, True)
    assert left.take()
    left.leave()


def test_what_is_mounted_since_is_not_taken_away(
    tmp_path: Path, left: MountPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = mounted_on(str(tmp_path))
    assert there is not None
    ended: list[str] = []
    monkeypatch.setattr(device, "unmount", lambda folder, is_lazy: ended.append(folder))
    take_away(there._replace(number="0:40"), left)
    assert ended == []


def test_who_reloads_waits_for_another_daemon_that_answers_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = MountPlace(str(tmp_path))
    fleet = BucketPlace(endpoint="", bucket="", prefix="")

    def said(daemon_pid: int, *, answers: bool) -> MountInfo:
        return MountInfo(
            folder=str(tmp_path),
            source="",
            pid=1,
            place=fleet,
            is_ready=True,
            daemon_pid=daemon_pid,
            answers=answers,
        )

    coming = [said(7, answers=True), None, said(8, answers=False), said(8, answers=True)]
    monkeypatch.setattr(place, "info", lambda: coming.pop(0))
    holder = os.pidfd_open(os.getpid())
    try:
        mount._wait_for_next(place, holder, 7)
        assert not coming
        monkeypatch.setattr(place, "info", lambda: said(8, answers=False))
        monkeypatch.setattr(mount, "_RELOADED_S", 0.05)
        with pytest.raises(EnvironmentProblem, match="has no new daemon that answers after"):
            mount._wait_for_next(place, holder, 7)
    finally:
        os.close(holder)
