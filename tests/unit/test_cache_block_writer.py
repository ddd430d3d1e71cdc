"""Blocks that are written by the native thread."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest

from stoker._native import Writer, crc32c
from stoker.cache.store.block_writer import BlockWriter


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)


def test_many_are_written_each_where_it_belongs(tmp_path: Path) -> None:
    blocks = [os.urandom(1 + number * 997) for number in range(200)]

    async def story() -> None:
        writer = BlockWriter()
        for _ in range(2):
            found = await asyncio.gather(
                *(
                    writer.write(opened(tmp_path / "f"), number << 20, data)
                    for number, data in enumerate(blocks)
                )
            )
            assert found == [crc32c(data) for data in blocks]

    descriptors = len(os.listdir("/proc/self/fd"))
    asyncio.run(story())
    with open(tmp_path / "f", "rb") as file:
        for number, data in enumerate(blocks):
            file.seek(number << 20)
            assert file.read(len(data)) == data
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # others' may have been closed meanwhile


def test_what_cannot_be_written_says_why_and_disturbs_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        writer = BlockWriter()
        read_only = os.open(tmp_path, os.O_RDONLY)
        (bad, good) = await asyncio.gather(
            writer.write(read_only, 0, b"x"),
            writer.write(opened(tmp_path / "f"), 0, b"y"),
            return_exceptions=True,
        )
        assert isinstance(bad, OSError)
        assert bad.errno == errno.EBADF
        assert good == crc32c(b"y")

    asyncio.run(story())


def test_who_is_cancelled_leaves_it_to_be_written(tmp_path: Path) -> None:
    async def story() -> None:
        writer = BlockWriter()
        data = bytearray(os.urandom(50_000_000))
        task = asyncio.ensure_future(writer.write(opened(tmp_path / "f"), 0, data))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(BufferError):
            data.append(1)  # it is held on to as long as it is read
        assert await writer.write(opened(tmp_path / "g"), 0, b"after") == crc32c(b"after")
        assert (tmp_path / "f").read_bytes() == data
        data.append(1)

    asyncio.run(story())


def test_once_a_writer_is_gone_all_is_written(tmp_path: Path) -> None:
    writer = Writer()
    data = os.urandom(300_000)
    for number in range(50):
        writer.write(number, opened(tmp_path / "f"), number * len(data), data)
    with pytest.raises(ValueError, match="being written"):
        writer.write(0, -1, 0, data)
    del writer
    assert (tmp_path / "f").read_bytes() == data * 50


def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path) -> None:
    async def story() -> None:
        writer = BlockWriter()
        with pytest.raises(OSError, match="too large"):
            await writer.write(opened(tmp_path / "f"), 0, bytes(200_000))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        asyncio.run(story())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
