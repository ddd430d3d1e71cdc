"""What every origin must do. Subclass OriginConformance in a test module and say how to fill one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
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

LARGE = random.Random(7).randbytes(3 * 1024 * 1024 + 7)
"""Comes in more than one part wherever streams come in parts."""


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
        "key",
        [
            "missing",
            "dir",
            "dir/",
            "dir/missing",
            "a/b",
            "",
            "../a",
            "dir/../a",
            "./a",
            "x//y",
            "a\nb",
            "\x7f",
        ],
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

    def test_a_stream_gives_exactly_the_range_in_order_and_counts_it(self) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "dir/b", LARGE)
            size = len(LARGE)
            info = await origin.stat("dir/b")
            for start, stop in [
                (0, size),
                (0, 1),
                (size - 1, size),
                (100, 2_500_000),
                (2**20 - 1, 2**20 + 1),
            ]:
                before = origin.counters.bytes_read
                parts = await streamed(origin, "dir/b", start, stop, info.version)
                assert b"".join(parts) == LARGE[start:stop]
                assert all(parts)
                assert origin.counters.bytes_read - before == stop - start
            odd = await origin.stat("dir/sub/d e+f%20ü.bin")
            assert b"".join(await streamed(origin, odd.key, 0, 8, odd.version)) == b"odd name"

        self.run(test)

    @pytest.mark.parametrize("stop", [1, 100, len(LARGE) - 1, len(LARGE), 2 * len(LARGE)])
    def test_opening_tells_the_version_and_brings_the_first_bytes(self, stop: int) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            for key in OBJECTS:
                info, stream = await origin.open(key, stop)
                assert info == await origin.stat(key)
                async with aclosing(stream) as parts:
                    got = b"".join([part async for part in parts])
                assert got == (LARGE if key == "a" else OBJECTS[key])[:stop]

        self.run(test)

    def test_what_was_opened_may_be_left_at_any_part(self) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            for taken in range(4):
                _, parts = await origin.open("a", len(LARGE))
                for _ in range(taken):
                    await anext(parts, b"")
                await parts.aclose()
                assert await anext(parts, None) is None

        self.run(test)

    @pytest.mark.parametrize("key", ["missing", "dir", "dir/missing", "a/b", "", "../a", "x//y", "a\nb"])
    def test_what_is_not_an_object_cannot_be_opened(self, key: str) -> None:
        async def test(origin: Origin) -> None:
            with pytest.raises(ObjectNotFound):
                await origin.open(key, 100)

        self.run(test)

    @pytest.mark.parametrize("key", ["missing", "dir", "dir/missing", "a/b", "", "../a", "x//y", "a\nb"])
    @pytest.mark.parametrize("size_bytes", [1, len(LARGE)])
    def test_there_is_no_stream_of_what_is_not_an_object(self, key: str, size_bytes: int) -> None:
        async def test(origin: Origin) -> None:
            with pytest.raises((ObjectNotFound, ObjectChanged)):
                await anext(origin.stream(key, 0, size_bytes, "v"))

        self.run(test)

    def test_a_stream_past_the_end_is_a_short_body(self) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "dir/b", LARGE)
            for key, size_bytes in (("a", 3), ("dir/b", len(LARGE))):
                info = await origin.stat(key)
                for more in (1, 3_000_000):
                    with pytest.raises(ShortBody):
                        await streamed(origin, key, 0, size_bytes + more, info.version)

        self.run(test)

    @pytest.mark.parametrize("after", [b"two!", LARGE[::-1] + b"."])
    def test_a_stream_of_another_version_yields_nothing(self, after: bytes) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            info = await origin.stat("a")
            self.overwrite(origin, "a", after)
            for start, stop in ((0, 3), (0, len(LARGE))):
                with pytest.raises(ObjectChanged):
                    await anext(origin.stream("a", start, stop, info.version))
            new = await origin.stat("a")
            assert b"".join(await streamed(origin, "a", 0, len(after), new.version)) == after

        self.run(test)

    @pytest.mark.parametrize("after", [b"short", LARGE[::-1] + b"."])
    def test_a_stream_amid_which_the_object_changes_is_of_one_version(self, after: bytes) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            info = await origin.stat("a")
            got = b""
            async with aclosing(origin.stream("a", 0, len(LARGE), info.version)) as parts:
                got += await anext(parts)
                self.overwrite(origin, "a", after)
                try:
                    async for part in parts:
                        got += part
                    assert len(got) == len(LARGE), "it ended without an error"
                except (ObjectChanged, OriginError):  # it may still be sent as it was, or not
                    pass
            assert LARGE.startswith(got)

        self.run(test)

    def test_a_stream_may_be_left_at_any_part(self) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            info = await origin.stat("a")
            for taken in (0, 1, 2):
                stream = origin.stream("a", 0, len(LARGE), info.version)
                for _ in range(taken):
                    await anext(stream, b"")
                await stream.aclose()
                assert await anext(stream, None) is None
            assert b"".join(await streamed(origin, "a", 0, len(LARGE), info.version)) == LARGE

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


async def streamed(origin: Origin, key: str, start: int, stop: int, version: str) -> list[bytes]:
    """All parts of a stream. Raises what it raises."""
    async with aclosing(origin.stream(key, start, stop, version)) as parts:
        return [bytes(part) async for part in parts]


async def fails(origin: Origin, key: str, version: str) -> None:
    """Whatever it is asked now is an OriginError."""
    for asked in (origin.stat(key), origin.read(key, 0, 3, version), listed(origin, "", None, 10)):
        with pytest.raises(OriginError):
            await asked


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
