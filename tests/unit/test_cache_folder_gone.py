"""A folder origin whose folder is gone has failed: nobody is told that its files are not there."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.errors import ObjectNotFound, OriginError
from stoker.testing.cache_origin import listed, streamed
from tests.e2e.cache_helpers import client_of, fill, served

pytestmark = pytest.mark.real


async def body(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


async def keys(origin: LocalOrigin, prefix: str = "") -> list[str]:
    return [info.key for info in await listed(origin, prefix, None, 1000)]


def run(origin: LocalOrigin, test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await test()
        finally:
            await origin.close()

    asyncio.run(whole())


@pytest.mark.parametrize("kind", [LocalOrigin, WritableLocalOrigin])
def test_where_the_folder_is_gone_nothing_is_said_of_its_files(
    tmp_path: Path, kind: type[LocalOrigin]
) -> None:
    objects = fill(tmp_path / "o", ["a", "dir/b"])
    origin = kind(str(tmp_path / "o"))

    async def test() -> None:
        info = await origin.stat("a")
        (tmp_path / "o").rename(tmp_path / "away")
        for key in ("a", "dir/b", "none", "dir/"):
            if key == "dir/" and kind is LocalOrigin:
                continue  # no key of an object here, whatever lies in the folder
            with pytest.raises(OriginError, match="is gone: No such file or directory; mount it again"):
                await origin.stat(key)
        with pytest.raises(OriginError):
            await origin.read("a", 0, 1, info.version)
        with pytest.raises(OriginError):
            await streamed(origin, "a", 0, 1000, info.version)
        for prefix in ("", "dir/", "none/"):
            with pytest.raises(OriginError):
                await keys(origin, prefix)
        (tmp_path / "away").rename(tmp_path / "o")
        assert await origin.stat("a") == info
        assert await keys(origin) == sorted(objects)
        with pytest.raises(ObjectNotFound):
            await origin.stat("none")

    run(origin, test)


def test_where_the_folder_is_gone_nothing_is_removed(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["a"])
    origin = WritableLocalOrigin(str(tmp_path / "o"))

    async def test() -> None:
        (tmp_path / "o").rename(tmp_path / "away")
        with pytest.raises(OriginError):
            await origin.delete("a")
        (tmp_path / "away").rename(tmp_path / "o")
        assert await keys(origin) == ["a"]

    run(origin, test)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on which something can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount(folder):
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    while subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True).returncode == 0:
        pass


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=True)


def mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("below", ["", "data"])
def test_where_it_is_not_mounted_any_more_nothing_is_said_and_nothing_written(disk: Path, below: str) -> None:
    """Also where the bare folder below the mount has one of that name."""
    folder = disk / below
    unmount(disk)
    folder.mkdir(exist_ok=True)
    assert mount(disk)
    fill(folder, ["a"])
    origin = WritableLocalOrigin(str(folder))

    async def test() -> None:
        assert await keys(origin) == ["a"]
        unmount(disk)
        assert folder.is_dir()
        with pytest.raises(OriginError, match=f"nothing is mounted at {disk} any more; mount it again"):
            await origin.stat("a")
        for asked in (
            keys(origin),
            origin.delete("a"),
            origin.put("b", body(b"b")),
            origin.put("dir/", body(b"")),
        ):
            with pytest.raises(OriginError):
                await asked
        assert list(folder.iterdir()) == [], "it would lie below the mount, where nobody finds it"
        assert mount(disk)
        fill(folder, ["c"])
        assert await keys(origin) == ["c"], "another time it is another file system by its number"
        await origin.put("d", body(b"d"))
        with pytest.raises(ObjectNotFound):
            await origin.stat("a")

    run(origin, test)


def test_what_is_mounted_later_is_what_is_meant(disk: Path) -> None:
    unmount(disk)
    origin = LocalOrigin(str(disk))

    async def test() -> None:
        assert await keys(origin) == []
        assert mount(disk)
        fill(disk, ["a"])
        assert await keys(origin) == ["a"]
        unmount(disk)
        with pytest.raises(OriginError):
            await keys(origin)

    run(origin, test)


def test_what_is_known_goes_on_being_served_while_the_folder_is_gone(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["a", "b"])
    config = tmp_path / "cache.toml"
    config.write_text(f'[buckets.b]\norigin_url = "{tmp_path}/o"\nttl_s = 0\nstale_if_error_s = 600\n')
    with served(tmp_path / "d", {}, "--config", str(config)) as server, client_of(server) as client:
        assert client.read("b", "a") == objects["a"]
        (tmp_path / "o").rename(tmp_path / "away")
        assert client.read("b", "a") == objects["a"]
        for asked in (lambda: client.read("b", "b"), lambda: client.list_objects("b")):
            with pytest.raises(OriginError):
                asked()
        (tmp_path / "away").rename(tmp_path / "o")
