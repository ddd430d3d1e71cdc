"""What every origin must do. Subclass OriginConformance in a test module and say how to fill one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import pytest

from stoker.cache.origin.port import Origin
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.wire.cache_api import ObjectInfo

T = TypeVar("T")

OBJECTS: Mapping[str, bytes] = {
    "a": b"one",
    "dir.txt": b"sorts before dir/",
    "dir/b": bytes(range(256)) * 40,
    "dir/c": b"",
    "dir/sub/d e+f%20ü.bin": b"odd name",
    "dir0": b"sorts after dir/",
    "z": b"last",
}


class OriginConformance:
    """The suite. Keys of the objects in OBJECTS; `open_filled` may be called once per test."""

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        """An origin that holds exactly these objects."""
        raise NotImplementedError

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        """Replace an object behind the origin's back."""
        raise NotImplementedError

    def run(self, test: Callable[[Origin], Awaitable[T]]) -> T:
        """Run an async test against a filled origin and close it."""

        async def whole() -> T:
            origin = self.open_filled(OBJECTS)
            try:
                return await test(origin)
            finally:
                await origin.close()

        return asyncio.run(whole())

    def test_stat_gives_size_and_a_stable_version(self) -> None:
        async def test(origin: Origin) -> None:
            for key, data in OBJECTS.items():
                info = await origin.stat(key)
                assert (info.key, info.size_bytes) == (key, len(data))
                assert info.version
                assert await origin.stat(key) == info

        self.run(test)

    @pytest.mark.parametrize(
        "key", ["missing", "dir", "dir/", "dir/missing", "a/b", "", "../a", "dir/../a", "./a", "x//y"]
    )
    def test_what_is_not_an_object_is_not_found(self, key: str) -> None:
        async def test(origin: Origin) -> None:
            with pytest.raises(ObjectNotFound):
                await origin.stat(key)
            # Some servers look at the version before they look for the object.
            with pytest.raises((ObjectNotFound, ObjectChanged)):
                await origin.read(key, 0, 1, "v")

        self.run(test)

    def test_read_gives_exactly_the_range_and_counts_it(self) -> None:
        async def test(origin: Origin) -> None:
            data = OBJECTS["dir/b"]
            info = await origin.stat("dir/b")
            before = origin.counters.bytes_read
            for start, stop in [(0, len(data)), (0, 1), (100, 5000), (len(data) - 1, len(data))]:
                assert await origin.read("dir/b", start, stop, info.version) == data[start:stop]
            assert origin.counters.bytes_read - before == len(data) + 1 + 4900 + 1
            odd = await origin.stat("dir/sub/d e+f%20ü.bin")
            assert await origin.read(odd.key, 0, 8, odd.version) == b"odd name"

        self.run(test)

    def test_reading_past_the_end_is_a_short_body(self) -> None:
        async def test(origin: Origin) -> None:
            info = await origin.stat("a")
            with pytest.raises(ShortBody):
                await origin.read("a", 0, 10, info.version)

        self.run(test)

    def test_another_version_is_refused(self) -> None:
        async def test(origin: Origin) -> None:
            info = await origin.stat("a")
            self.overwrite(origin, "a", b"two!")
            with pytest.raises(ObjectChanged):
                await origin.read("a", 0, 3, info.version)
            after = await origin.stat("a")
            assert after.version != info.version
            assert await origin.read("a", 0, 4, after.version) == b"two!"

        self.run(test)

    @pytest.mark.parametrize("limit", [1, 2, 3, 1000])
    @pytest.mark.parametrize("prefix", ["", "d", "dir", "dir/", "dir/sub/", "dir/s", "nothing", "z"])
    def test_list_is_sorted_whole_and_goes_on_after_any_key(self, prefix: str, limit: int) -> None:
        async def test(origin: Origin) -> None:
            expected = sorted(key for key in OBJECTS if key.startswith(prefix))
            for after in (None, "dir/b", "dir/bb", *expected):
                found = await listed(origin, prefix, after, limit)
                assert [info.key for info in found] == [k for k in expected if after is None or k > after]
            for info in found:
                assert info == await origin.stat(info.key)

        self.run(test)


async def listed(origin: Origin, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]:
    """All pages. An origin whose server turns out not to list in order may ask, once, to be listed again."""
    for attempt in (1, 2):
        found: list[ObjectInfo] = []
        try:
            async for page in origin.list(prefix, after, limit):
                assert 0 < len(page) <= limit
                found += page
        except OriginError:
            if attempt == 2:
                raise
            continue
        return found
    raise AssertionError("unreachable")
