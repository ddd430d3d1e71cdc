"""`stoker mount` and `stoker umount` as people type them: what goes wrong is said, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from stoker.cache.mount.places import FILE_SYSTEM, MountPlace, mounted_on
from stoker.cache.mount.places import mounted as all_mounted
from stoker.errors import CacheUnavailable, ConfigError, EnvironmentProblem
from tests.e2e import mount_readers as readers
from tests.e2e.cache_helpers import served
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, Mount, mounted, run_beside
from tests.e2e.run_helpers import Finished, wait_for

pytestmark = MOUNT_MARKS
CONFIG, ENVIRONMENT, UNAVAILABLE = (
    kind.exit_code for kind in (ConfigError, EnvironmentProblem, CacheUnavailable)
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    readers.make(folder, small=3, large=1)
    return folder


@pytest.fixture(scope="module")
def mount(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("m"), origin) as made:
        yield made


def nothing_is_mounted_below(folder: Path) -> bool:
    return not [one for one in all_mounted() if one.folder.startswith(f"{folder}/")]


@pytest.mark.parametrize(
    ("source", "options", "code", "words"),
    [
        ("{tmp}/none", (), CONFIG, "neither an URL .* nor a folder that is there"),
        ("{origin}/s/000", (), CONFIG, "neither an URL .* nor a folder that is there"),
        ("file://{tmp}/none", (), CONFIG, "the origin folder '.*/none' is not there"),
        ("xyz://a/b", (), CONFIG, "cannot open the origin xyz://a/b"),
        ("s3://b?endpoint=http://127.0.0.1:1", ("--timeout=3s",), UNAVAILABLE, "s3://b: "),
        ("stoker://b", (), CONFIG, "say where its cache server is: --endpoint"),
        ("stoker://b", ("--endpoint=http://127.0.0.1:1", "--timeout=2s"), UNAVAILABLE, "no cache server answers"),
        ("", (), CONFIG, "SOURCE is empty"),
        ("{origin}", ("--cache-dir=",), CONFIG, "--cache-dir is empty"),
        ("{origin}", ("--capacity=many",), CONFIG, "--capacity: 'many' is not a size"),
        ("{origin}", ("--ttl=soon",), CONFIG, "--ttl: 'soon' is not a duration"),
        ("{origin}", ("--cache-ttl=soon",), CONFIG, "--cache-ttl: 'soon' is not a duration"),
        ("stoker://b", ("--endpoint=http://127.0.0.1:1", "--cache-ttl=1s"), CONFIG, "--cache-ttl is of a cache that"),
        ("{origin}", ("--file-mode=999",), CONFIG, "--file-mode 999: give rights"),
        ("{origin}", ("-o", "no_such=1"), CONFIG, "-o no_such=1: there is no such option"),
    ],
)  # fmt: skip
def test_what_cannot_be_mounted_is_said(
    mount: Mount, origin: Path, tmp_path: Path, source: str, options: tuple[str, ...], code: int, words: str
) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    done = mount.command("mount", source.format(tmp=tmp_path, origin=origin), str(folder), *options)
    assert done.code == code, done.text
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("stoker: ")
    assert re.search(words, done.err), done.err
    assert nothing_is_mounted_below(tmp_path)


def test_one_cache_has_one_mount(mount: Mount, origin: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    kept = str(mount.base / "kept")
    done = mount.command("mount", str(origin), str(tmp_path / "mount"), "--cache-dir", kept)
    assert done.code == ENVIRONMENT, done.text
    assert f"{kept} is in use by another cache server or mount" in done.err
    assert "--cache-dir of `stoker mount`" in done.err


def test_that_nothing_is_there_is_said(origin: Path, tmp_path: Path) -> None:
    words = "there is nothing below "
    (tmp_path / "none").mkdir()
    with mounted(tmp_path / "here", tmp_path / "none") as mount:
        assert words in mount.log
        folder = tmp_path / "mount"
        folder.mkdir()
        options = ("--daemon", "--json", "--cache-dir", str(tmp_path / "other"))
        done = mount.command("mount", str(tmp_path / "none"), str(folder), *options)
        holder = psutil.Process(json.loads(done.out)["pid"])
        try:
            assert f"{words}{tmp_path}/none (yet): {folder} is empty" in done.err
            assert mount.command("umount", str(folder)).code == 0
        finally:
            force(folder, holder)
    with mounted(tmp_path / "there", origin) as mount:
        assert words not in mount.log


@pytest.mark.parametrize("way", ["server", "fleet"])
def test_an_object_is_no_folder(mount: Mount, origin: Path, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    with served(tmp_path / "server", {"b": f"file://{origin}"}) as server:
        where = ["--endpoint", server.url, *(["--cache-dir", f"{tmp_path}/near"] if way == "fleet" else [])]
        done = mount.command("mount", "stoker://b/s/000", str(folder), *where)
        words = "stoker: stoker://b/s/000 is an object: mount the folder that it lies in\n"
        assert (done.code, done.err) == (CONFIG, words)
        # What is there begins so, and lies not below it.
        with mounted(tmp_path / "m", "stoker://b/s/00", *where, cache=False) as empty:
            assert f"there is nothing below stoker://b/s/00 (yet): {empty.folder} is empty" in empty.log
    assert nothing_is_mounted_below(tmp_path)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("", "wants a token"),
        ("environment", "does not know the token of STOKER_CACHE_TOKEN"),
        ("file", "does not know the token of --token-file {tmp}/token"),
    ],
)
def test_a_token_that_is_not_known_is_said(
    mount: Mount, origin: Path, tmp_path: Path, way: str, words: str
) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "token").write_text("another-token\n")
    said = [f"--token-file={tmp_path}/token"] if way == "file" else []
    environment = {"STOKER_CACHE_TOKEN": "another-token" if way == "environment" else ""}
    with served(tmp_path / "server", {"b": f"file://{origin}"}, "--token", "right-token") as server:
        where = (str(tmp_path / "mount"), "--endpoint", server.url, *said)
        for options in (
            (),
            ("--daemon",),
            (f"--cache-dir={tmp_path}/near",),
            (f"--cache-dir={tmp_path}/near", "--writable"),
        ):
            done = mount.command("mount", "stoker://b", *where, *options, environment=environment)
            assert done.code == UNAVAILABLE, done.text
            assert f"stoker: the cache at {server.url} {words.format(tmp=tmp_path)}" in done.err
            assert "say --token-file FILE, or set STOKER_CACHE_TOKEN" in done.err
    assert nothing_is_mounted_below(tmp_path)


@pytest.mark.parametrize("way", ["--cache-ttl=0s", "-ocache_ttl=0s"])
def test_how_long_its_own_cache_believes_names_is_said(tmp_path: Path, way: str) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "a").write_text("old")
    with mounted(tmp_path / "m", origin, "--kernel-ttl=0s", "--ttl=0s", "--absent-ttl=0s", way) as mount:
        assert mount.sh("ls $0; cat $0/a") == "a\nold"
        (origin / "a").write_text("new")
        (origin / "b").touch()
        wait_for(lambda: mount.sh("ls $0; cat $0/a") == "a\nb\nnew", WAIT_S, "what is new")


def test_a_bucket_that_is_not_there_is_said(mount: Mount, origin: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with served(tmp_path / "server", {"b": f"file://{origin}"}) as server:
        where = (str(tmp_path / "mount"), "--endpoint", server.url)
        done = mount.command("mount", "stoker://none", *where)
        in_background = mount.command("mount", "stoker://none", *where, "--daemon")
    for said in (done, in_background):
        assert (said.code, said.err) == (UNAVAILABLE, "stoker: no bucket 'none'; there are: b\n")
    assert nothing_is_mounted_below(tmp_path)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("none", CONFIG, "none is not there: make it first"),
        ("none/deep", ENVIRONMENT, "none is not there"),
        ("file", CONFIG, "file is no folder"),
        ("full", CONFIG, "full is not empty (y, …)"),
        ("disk", CONFIG, "(tmpfs) is mounted on"),
    ],
)
def test_a_folder_that_cannot_be_used_is_said(
    mount: Mount, origin: Path, tmp_path: Path, name: str, code: int, words: str
) -> None:
    (tmp_path / "file").touch()
    for made in ("full", "disk"):
        (tmp_path / made).mkdir()
    (tmp_path / "full" / "y").touch()
    if name == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "disk"], check=True)
    try:
        done = mount.command("mount", str(origin), str(tmp_path / name))
        assert (done.code, words in done.err) == (code, True), done.text
        assert not [
            one
            for one in all_mounted()
            if one.folder == str(tmp_path / name) and one.file_system == FILE_SYSTEM
        ]
    finally:
        if name == "disk":
            subprocess.run(["umount", tmp_path / "disk"], check=True)


def test_one_folder_has_one_mount(mount: Mount, origin: Path) -> None:
    for options in ((), ("--nonempty",)):
        done = mount.command("mount", str(origin), str(mount.folder), *options)
        assert done.code == ENVIRONMENT
        assert f"stoker umount {mount.folder}` ends that" in done.err
    assert mount.sh("ls $0") == "l\ns\n"
    listed = mount.command("mount", "--json")
    (found,) = [one for one in json.loads(listed.out) if one["folder"] == str(mount.folder)]
    assert (found["folder"], found["source"], found["pid"]) == (
        str(mount.folder),
        str(origin),
        mount.holder.pid,
    )


def test_a_folder_is_the_same_by_a_link(mount: Mount, origin: Path, tmp_path: Path) -> None:
    folder, link = tmp_path / "mount", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("mount")
    holder = in_background(mount, origin, link)
    try:
        for name in (folder, link):
            again = mount.command("mount", str(origin), str(name))
            assert (again.code, f"umount {folder}` ends that" in again.err) == (ENVIRONMENT, True), again.text
        assert run_beside(folder, "ls", str(folder)).out == "l\ns\n"
        assert mount.command("umount", str(link)).code == 0
        assert mounted_on(str(folder)) is None
        wait_for(lambda: not holder.is_running(), why="end of the holder")
    finally:
        force(folder, holder)


def test_a_mount_is_found_from_every_environment(origin: Path, tmp_path: Path) -> None:
    """As that of a service is from a login."""
    with mounted(tmp_path / "m", origin) as mount:
        other = partial(mount.command, environment={"XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)})
        done = other("mount", str(origin), str(mount.folder))
        assert (done.code, f"umount {mount.folder}` ends that" in done.err) == (ENVIRONMENT, True), done.text
        assert f"on {mount.folder} (mounted, process {mount.holder.pid})" in other("mount").out
        assert mount.sh("ls $0") == "l\ns\n"
        assert other("umount", str(mount.folder)).code == 0
        assert mount.holder.wait(WAIT_S) == 0
        assert not MountPlace(str(mount.folder)).path.exists(), "nothing is left of it"


def test_a_mount_of_which_nothing_is_known_is_not_taken_away(origin: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "m", origin) as mount:
        (MountPlace(str(mount.folder)).path / "lock").unlink()
        done = mount.command("mount", str(origin), str(mount.folder))
        assert (done.code, f"stoker umount --lazy {mount.folder}` takes" in done.err) == (ENVIRONMENT, True)
        assert f"on {mount.folder} (by a process that is not known here)" in mount.command("mount").out
        assert mount.sh("ls $0") == "l\ns\n"
        with mount.look(readers.read_when_told, mount.folder / "l/0", [1000]) as reader:
            assert reader.line() == "opened"
            assert mount.command("umount", str(mount.folder)).code == ENVIRONMENT, "somebody has a file open"
            assert mount.command("umount", "--lazy", str(mount.folder)).code == 0
            assert reader.tell() == readers.sha256((origin / "l/0").read_bytes()[:1000])
        assert mount.holder.wait(WAIT_S) == 0


@pytest.mark.parametrize("words", ["nofail,users", "rw,exec"])
def test_programs_are_run_from_it_where_that_is_not_refused(tmp_path: Path, words: str) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "program").write_text("#!/bin/sh\necho it runs\n")
    with mounted(tmp_path / "m", origin, "--file-mode=555", "-o", words) as mount:
        done = mount.run("sh", "-c", f"{mount.folder}/program")
        assert (done.out, "Permission denied" in done.err) == (
            ("it runs\n", False) if "exec" in words else ("", True)
        ), done.text


def test_umount_of_what_is_no_mount_is_refused(mount: Mount, tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "nothing is mounted on"), (Path("/proc"), "(proc) is mounted on /proc")):
        done = mount.command("umount", str(folder))
        assert (done.code, words in done.err) == (CONFIG, True), done.text
    assert os.path.ismount("/proc")


def in_background(base: Mount, origin: Path, folder: Path, *options: str) -> psutil.Process:
    done = base.command("mount", str(origin), str(folder), "--daemon", "--json", *options)
    assert done.code == 0, done.text
    return psutil.Process(json.loads(done.out)["pid"])


def force(folder: Path, holder: psutil.Process) -> None:
    subprocess.run(["umount", "--force", "--lazy", folder], check=False, capture_output=True)
    if holder.is_running():
        holder.kill()


def test_a_mount_in_the_background_until_it_is_ended(mount: Mount, origin: Path, tmp_path: Path) -> None:
    """In a folder whose name has everything, while somebody works in it."""
    folder = tmp_path / "with a space, ü and \\ too"
    folder.mkdir()
    holder = in_background(mount, origin, folder)
    try:
        there = readers.sha256((origin / "l/0").read_bytes())
        said = run_beside(folder, "sha256sum", f"{folder}/l/0")
        assert said.out.removeprefix("\\").split()[0] == there
        busy = subprocess.Popen(["sleep", "1000"], cwd=folder)
        try:
            refused = mount.command("umount", str(folder))
            assert refused.code == ENVIRONMENT
            assert f"used by {busy.pid} (sleep 1000)" in refused.err
            assert "--lazy" in refused.err
            assert mounted_on(str(folder)) is not None
        finally:
            busy.kill()
            busy.wait()
        assert mount.command("umount", f"{tmp_path}/../{tmp_path.name}/{folder.name}").code == 0
        assert mounted_on(str(folder)) is None
        wait_for(lambda: not holder.is_running(), why="end of the holder")
    finally:
        force(folder, holder)


def test_a_lazy_end_leaves_those_who_read(mount: Mount, origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    holder = in_background(mount, origin, folder)
    try:
        with mount.look(readers.read_when_told, folder / "l/0", [1000, 4_000_000]) as reader:
            assert reader.line() == "opened"
            assert mount.command("umount", "--lazy", str(folder)).code == 0
            assert mounted_on(str(folder)) is None
            data = (origin / "l/0").read_bytes()
            assert reader.tell() == readers.sha256(data[:1000])
            again: Finished = mount.command("mount", str(origin), str(folder), "--daemon")
            assert again.code == ENVIRONMENT
            assert f"process {holder.pid} goes on for those who have files open there" in again.err
            assert reader.tell() == readers.sha256(data[1000:])
        wait_for(lambda: not holder.is_running(), why="end of the holder")
    finally:
        force(folder, holder)


def test_umount_of_util_linux_and_a_signal_end_it(mount: Mount, origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    for end in ("umount", "signal"):
        holder = in_background(mount, origin, folder)
        try:
            if end == "umount":
                subprocess.run(["umount", folder], check=True)
            else:
                holder.send_signal(signal.SIGTERM)
            wait_for(lambda: not holder.is_running(), why="end of the holder")  # noqa: B023
            assert mounted_on(str(folder)) is None
        finally:
            force(folder, holder)
