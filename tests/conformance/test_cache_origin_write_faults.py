"""Writers that are killed, disks that are full, owners that cannot be given, many processes at once."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.cache.origin import local_files
from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.port import STAGING, Origin
from stoker.cache.origin.s3_writing import WritableS3Origin
from stoker.cache.origin.writing_port import Attributes, Owner
from stoker.errors import BadKey, ConfigError, ObjectNotFound, OriginFull, OriginReadOnly, WriteDenied
from stoker.testing.cache_origin import listed
from stoker.testing.cache_origin_writable import MIB, body, content, cut, keys_of
from tests.conformance.origin_writer import COUNTS
from tests.s3_server import BUCKET, KEYS, s3_server

WRITER = "tests.conformance.origin_writer"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do that")


def writer(what: str, url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **KEYS}
    command = [sys.executable, "-m", WRITER, what, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def kill_in_mid_write(what: str, url: str) -> None:
    child = writer(what, url)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "writing\n"
        child.kill()
        child.wait()


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, 120))


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


# -- killed writers --------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("what", ["known", "unknown", "part"])
@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_writer_that_is_killed_leaves_what_was_there(what: str, scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}"

    async def before() -> None:
        origin = open_writable_origin(url)
        await origin.put("old", body(b"old"), 3)
        await origin.close()

    async def after() -> None:
        origin = open_writable_origin(url)
        for reader in (origin, LocalOrigin(str(tmp_path)), FsspecOrigin(f"local://{tmp_path}")):
            assert [info.key for info in await listed(reader, "", None, 10)] == ["old"]
        assert await content(origin, "old") == b"old"
        assert any(STAGING in name for name in files_of(tmp_path)), "or it was not killed while it wrote"
        left = 2 if what == "part" else 1  # the upload, and the part of it that was being written
        assert await origin.clean_up(time.time(), 3600.0) == 0
        assert await origin.clean_up(time.time() + 7200.0, 3600.0) == left
        assert [name for name in files_of(tmp_path) if not name.endswith("/lock")] == ["old"]
        await origin.put("old", body(b"newer"), 5)
        assert await content(origin, "old") == b"newer"
        await origin.close()

    run(before())
    kill_in_mid_write(what, url)
    run(after())


@pytest.mark.real
@pytest.mark.parametrize("what", ["known", "unknown", "part"])
def test_a_writer_to_s3_that_is_killed_leaves_what_was_there(what: str, s3_endpoint: str) -> None:
    url = f"s3://{BUCKET}/killed/{what}?endpoint={s3_endpoint}"

    async def before() -> None:
        origin = open_writable_origin(url, KEYS)
        await origin.put("old", body(b"old"), 3)
        await origin.close()

    async def after() -> None:
        origin = open_writable_origin(url, KEYS)
        assert await keys_of(origin) == ["old"]
        assert await content(origin, "old") == b"old"
        assert len(await origin.list_uploads()) == (what != "known")
        assert await origin.clean_up(time.time() + 7200.0, 3600.0) == (what != "known")
        assert await origin.list_uploads() == []
        await origin.close()

    run(before())
    kill_in_mid_write(what, url)
    run(after())


# -- many processes --------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_no_write_under_a_condition_is_lost_among_processes(
    kind: str, tmp_path: Path, s3_endpoint: str
) -> None:
    url = str(tmp_path) if kind == "folder" else f"s3://{BUCKET}/counted?endpoint={s3_endpoint}"

    async def before() -> None:
        origin = open_writable_origin(url, KEYS)
        await origin.put("number", body(b"%06d" % 0), 6)
        await origin.close()

    async def after() -> None:
        origin = open_writable_origin(url, KEYS)
        assert int(await content(origin, "number")) == 3 * COUNTS
        await origin.close()

    run(before())
    children = [writer("count", url) for _ in range(3)]
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(200) == 0
    run(after())


# -- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.real
@needs_root
@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_full_disk_leaves_what_was_there_and_no_rubbish(small_disk: Path, scheme: str) -> None:
    async def story() -> None:
        origin = open_writable_origin(f"{scheme}://{small_disk}")
        old = await origin.put("old", body(*[bytes(MIB)] * 1), MIB)
        for _ in range(3):
            with pytest.raises(OriginFull, match="make room"):
                await origin.put("old", body(*[b"n" * MIB] * 4), 4 * MIB)
        upload = await origin.begin_upload("old")
        with pytest.raises(OriginFull):
            await origin.put_part("old", upload, 1, body(*[b"n" * MIB] * 4), 4 * MIB)
        assert await origin.list_parts("old", upload) == []
        await origin.abort_upload("old", upload)
        assert await listed(origin, "", None, 10) == [old]
        assert await content(origin, "old") == bytes(MIB)
        assert [name for name in files_of(small_disk) if not name.endswith("/lock")] == ["old"]
        await origin.put("old", body(b"n" * MIB), MIB)
        await origin.close()

    run(story())


@pytest.mark.real
@needs_root
def test_what_is_read_only_says_so(small_disk: Path) -> None:
    async def story() -> None:
        origin = open_writable_origin(str(small_disk))
        await origin.put("old", body(b"old"), 3)
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(OriginReadOnly, match="mount it for writing"):
            await origin.put("old", body(b"new"), 3)
        assert await content(origin, "old") == b"old"
        await origin.close()

    run(story())


@pytest.mark.real
@needs_root
def test_another_file_system_below_is_not_written_to_in_part(small_disk: Path) -> None:
    async def story() -> None:
        origin = open_writable_origin(str(small_disk.parent))
        with pytest.raises(OriginReadOnly, match="bucket of its own"):
            await origin.put("small/a", body(b"one"), 3)
        assert files_of(small_disk) == []
        assert await keys_of(origin) == []
        await origin.close()

    run(story())


@needs_root
def test_what_is_written_belongs_to_its_owner(tmp_path: Path) -> None:
    async def story() -> None:
        origin = WritableLocalOrigin(str(tmp_path))
        await origin.put("new/folder/a", body(b"one"), 3, attributes=Attributes(owner=Owner(12345, 54321)))
        for path in ("new", "new/folder", "new/folder/a"):
            found = (tmp_path / path).stat()
            assert (found.st_uid, found.st_gid) == (12345, 54321)
        # What replaces a file takes its owner and permissions, if no other owner is named.
        (tmp_path / "new/folder/a").chmod(0o640)
        await origin.put("new/folder/a", body(b"two"), 3)
        found = (tmp_path / "new/folder/a").stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 54321, 0o640)
        upload = await origin.begin_upload("b", Attributes(owner=Owner(1, 2)))
        tag = await origin.put_part("b", upload, 1, body(b"one"), 3)
        await origin.complete_upload("b", upload, [(1, tag)])
        assert ((tmp_path / "b").stat().st_uid, (tmp_path / "b").stat().st_gid) == (1, 2)
        await origin.close()

    run(story())


@pytest.mark.real
@needs_root
def test_a_folder_of_another_user_is_not_written_to(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    child = writer("user", str(tmp_path))
    said, _ = child.communicate(timeout=60)
    assert said.startswith("WriteDenied"), said
    assert "for user 65534" in said
    assert files_of(tmp_path) == []


def test_an_owner_that_cannot_be_given_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call fails here as it does for who is not root."""

    def refused(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    async def story() -> None:
        origin = WritableLocalOrigin(str(tmp_path))
        monkeypatch.setattr(os, "fchown", refused)
        with pytest.raises(WriteDenied):
            await origin.put("a", body(b"one"), 3, attributes=Attributes(owner=Owner(1, 1)))
        assert [name for name in files_of(tmp_path) if not name.endswith("/lock")] == []
        await origin.close()

    run(story())


def test_a_link_that_leads_out_is_not_written_through(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (inside / "out").symlink_to(outside)
    (inside / "in").symlink_to(inside / "real")
    (inside / "real").mkdir()

    async def story() -> None:
        origin = WritableLocalOrigin(str(inside))
        for key in ("out/a", "out/new/a"):
            with pytest.raises(BadKey, match="leads out"):
                await origin.put(key, body(b"one"), 3)
            await origin.delete(key)
        assert list(outside.iterdir()) == []
        await origin.put("in/a", body(b"one"), 3)
        assert (inside / "real/a").read_bytes() == b"one"
        (outside / "kept").write_bytes(b"kept")
        await origin.delete("out/kept")
        assert (outside / "kept").exists()
        (inside / "link").symlink_to(outside / "kept")
        await origin.put("link", body(b"one"), 3)
        assert (outside / "kept").read_bytes() == b"kept"
        await origin.close()

    run(story())


def test_what_is_being_written_is_hidden_from_who_reads_a_folder_above(tmp_path: Path) -> None:
    async def story() -> None:
        origin = (
            WritableLocalOrigin(str(tmp_path / "below")) if (tmp_path / "below").mkdir() is None else None
        )
        assert origin is not None
        await origin.begin_upload("a")
        above: list[Origin] = [LocalOrigin(str(tmp_path)), FsspecOrigin(f"local://{tmp_path}")]
        staged = next(name for name in files_of(tmp_path) if STAGING in name)
        for reader in above:
            assert await listed(reader, "", None, 10) == []
            assert await listed(reader, f"below/{STAGING}/", None, 10) == []
            with pytest.raises(ObjectNotFound):
                await reader.stat(staged)
        await origin.close()

    run(story())


def test_a_version_is_never_that_of_what_it_replaces(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"old")
    before = old.stat()
    file = local_files.NewFile(str(tmp_path))
    file.open()
    file.write(b"new")
    os.utime(file.fd, ns=(before.st_mtime_ns, before.st_mtime_ns))
    local_files.renew(file, before)
    assert os.fstat(file.fd).st_mtime_ns > before.st_mtime_ns
    file.drop()


# -- S3 --------------------------------------------------------------------------------------------------------------


def small_requests(url: str) -> WritableS3Origin:
    """Whose PUTs are no longer than 25 MiB."""
    origin = open_writable_origin(url, KEYS)
    assert isinstance(origin, WritableS3Origin)
    origin._put_bytes_max = 25 * MIB
    return origin


@pytest.mark.real
def test_what_is_too_long_for_one_request_goes_in_several(s3_endpoint: str) -> None:
    data = os.urandom(MIB) * 26

    async def story() -> None:
        origin = small_requests(f"s3://{BUCKET}/large?endpoint={s3_endpoint}")
        given = Attributes("text/plain", {"a": "b"})
        info = await origin.put("a", body(*cut(data, 700_000)), len(data), attributes=given)
        assert info == await origin.stat("a")
        assert info.version.strip('"').endswith("-1"), "an upload in parts"
        copied = await origin.copy("a", "b")
        assert copied.version.strip('"').endswith("-6")
        for key in ("a", "b"):
            assert await content(origin, key) == data
            assert (await origin.describe(key)).attributes == given
        assert await origin.list_uploads() == []
        await origin.close()

    run(story())


@pytest.mark.real
def test_who_may_not_write_is_told_so(s3_endpoint: str) -> None:
    async def story() -> None:
        for keys in ({**KEYS, "AWS_SECRET_ACCESS_KEY": "wrong"}, {}):
            origin = open_writable_origin(f"s3://{BUCKET}/x?endpoint={s3_endpoint}", keys)
            for parts in ([bytes(MIB)] * 10, [b"one"]):
                with pytest.raises(WriteDenied, match="look at the keys"):
                    await origin.put("k", body(*parts), sum(map(len, parts)))
            with pytest.raises(WriteDenied):
                await origin.delete("k")
            with pytest.raises(WriteDenied):
                await origin.begin_upload("k")
            await origin.close()

    run(story())


@pytest.mark.real
def test_keys_in_prefixes_are_deleted_a_thousand_at_a_time(s3_endpoint: str) -> None:
    async def story() -> None:
        origin = open_writable_origin(f"s3://{BUCKET}/many?endpoint={s3_endpoint}", KEYS)
        keys = [f"k{number:05d}" for number in range(1100)]
        for first in range(40):
            await origin.put(keys[first * 27], body(b"x"), 1)
        assert await origin.delete_many(keys) == {}
        assert await keys_of(origin) == []
        await origin.close()

    run(story())


def test_what_cannot_be_written_to_is_not_opened_for_it(tmp_path: Path) -> None:
    for url, environment in (
        ("http://127.0.0.1:1/data", {}),
        (f"file://{tmp_path}?stoker_mbps=1", {}),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1", {"HTTP_PROXY": "http://proxy"}),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1", {"AWS_ACCESS_KEY_ID": "AK"}),
    ):
        with pytest.raises(ConfigError):
            open_writable_origin(url, environment)
