"""What every origin that can be written to must do. Subclass WritableConformance in a test module and say how to open
one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from stoker.cache.origin.writing_port import Attributes, WritableOrigin
from stoker.errors import (
    BadKey,
    ObjectChanged,
    ObjectNotFound,
    OriginReadOnly,
    PreconditionFailed,
    WriteRefused,
    WrongBodyLength,
)
from stoker.testing.cache_origin import LARGE, listed
from stoker.testing.cache_origin_writable import MIB, Trouble, WritableOrigins, body, content, cut, keys_of

ODD_KEYS = (
    "dir/sub/d e+f%20ü.bin",
    "a&b<c>'d\"",
    "~x(1)!*;,$@:=",
    "plus+percent%2Fhash#question?",
    "\U0001f980/é",
)
BAD_KEYS = (
    "",
    "/",
    "dir/",
    "/a",
    "a//b",
    "../a",
    "dir/../a",
    "./a",
    "a\0b",
    "\ud800",
    ".stoker-writes/x",
    "x" * 5000,
)


class WritableConformance(WritableOrigins):
    """The suite of objects that are put, copied and deleted; see `cache_origin_uploads.py` for those in parts."""

    # -- put ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("is_announced", [True, False])
    @pytest.mark.parametrize(
        ("size_bytes", "part_bytes"), [(0, 1), (1, 1), (100_000, 777), (len(LARGE), 300_000)]
    )
    def test_what_is_put_is_what_is_read(self, size_bytes: int, part_bytes: int, is_announced: bool) -> None:
        async def test(origin: WritableOrigin) -> None:
            data = LARGE[:size_bytes]
            before = origin.counters.bytes_written
            info = await origin.put(
                "dir/a", body(*cut(data, part_bytes)), size_bytes if is_announced else None
            )
            assert origin.counters.bytes_written - before == size_bytes
            assert (info.key, info.size_bytes) == ("dir/a", size_bytes)
            assert await origin.stat("dir/a") == info
            assert (await origin.describe("dir/a")).info == info
            assert await content(origin, "dir/a") == data
            assert await listed(origin, "", None, 1000) == [info]

        self.run(test)

    def test_empty_parts_and_bytearrays_are_parts(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            await origin.put("a", body(b"", bytearray(b"on"), b"", b"e", b""), 3)
            assert await content(origin, "a") == b"one"

        self.run(test)

    def test_odd_names(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            for key in ODD_KEYS:
                info = await origin.put(key, body(key.encode()))
                assert await origin.stat(key) == info
                assert await content(origin, key) == key.encode()
            assert await keys_of(origin) == sorted(ODD_KEYS)
            for key in ODD_KEYS[::2]:
                await origin.delete(key)
            assert await keys_of(origin) == sorted(ODD_KEYS[1::2])
            assert await origin.delete_many(ODD_KEYS) == {}
            assert await keys_of(origin) == []

        self.run(test)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_what_could_not_be_read_again_is_not_written(self, key: str) -> None:
        async def test(origin: WritableOrigin) -> None:
            with pytest.raises(BadKey):
                await origin.put(key, body(b"one"), 3)
            with pytest.raises(BadKey):
                await origin.begin_upload(key)
            await origin.put("a", body(b"one"), 3)
            with pytest.raises(BadKey):
                await origin.copy("a", key)
            assert await keys_of(origin) == ["a"]

        self.run(test)

    def test_each_content_has_a_version_of_its_own(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            versions = set()
            for number in range(self.versions):
                info = await origin.put("a", body(b"%03d" % number), 3)
                assert await origin.stat("a") == info
                versions.add(info.version)
            assert len(versions) == self.versions
            with pytest.raises(ObjectChanged):
                await origin.read("a", 0, 3, next(iter(versions - {info.version})))
            assert await content(origin, "a") == b"%03d" % (self.versions - 1)

        self.run(test)

    @pytest.mark.parametrize("parts", [[], [b"new"], [b"n" * 400_000, b"e" * 400_000, b"w" * 400_000]])
    @pytest.mark.parametrize("is_announced", [True, False])
    def test_a_body_that_fails_leaves_what_was_there(self, parts: list[bytes], is_announced: bool) -> None:
        """Also one that fails only after its last byte, as one whose checksum is another does."""

        async def test(origin: WritableOrigin) -> None:
            old = await origin.put("old", body(b"old"), 3)
            for key in ("old", "new", "folder/new"):
                with pytest.raises(Trouble):
                    await origin.put(
                        key, body(*parts, fails=True), sum(map(len, parts)) if is_announced else None
                    )
            assert await listed(origin, "", None, 1000) == [old]
            assert await content(origin, "old") == b"old"
            with pytest.raises(ObjectNotFound):
                await origin.stat("new")

        self.run(test)

    @pytest.mark.parametrize("size_bytes", [0, 1, 2, 4, 2_000_000])
    def test_a_body_of_another_length_leaves_what_was_there(self, size_bytes: int) -> None:
        async def test(origin: WritableOrigin) -> None:
            old = await origin.put("old", body(b"old"), 3)
            for parts in ([b"new"], [b"n", b"ew"]):
                for key in ("old", "new"):
                    with pytest.raises(WrongBodyLength):
                        await origin.put(key, body(*parts), size_bytes)
            assert await listed(origin, "", None, 1000) == [old]
            assert await content(origin, "old") == b"old"

        self.run(test)

    def test_a_cancelled_put_leaves_what_was_there(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            async def endless() -> AsyncGenerator[bytes, None]:
                for _ in range(3):
                    yield bytes(500_000)
                at_work.set()
                await asyncio.sleep(3600)

            old = await origin.put("old", body(b"old"), 3)
            for size_bytes in (None, 8_000_000):
                at_work = asyncio.Event()
                task = asyncio.create_task(origin.put("old", endless(), size_bytes))
                await at_work.wait()
                assert await listed(origin, "", None, 1000) == [old]
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await listed(origin, "", None, 1000) == [old]
            assert await content(origin, "old") == b"old"
            assert (await origin.put("old", body(b"newer"), 5)).size_bytes == 5

        self.run(test)

    def test_of_many_who_put_at_once_one_wins_and_nobody_sees_a_mixture(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            size = 700_000
            await origin.put("a", body(bytes([255]) * size), size)
            is_over = False

            async def watch() -> int:
                looks = 0
                while not is_over or not looks:
                    await asyncio.sleep(0)
                    try:
                        data = await content(origin, "a")
                    except ObjectChanged:
                        continue
                    except ObjectNotFound:
                        if origin.capabilities.is_atomic:
                            raise
                        continue
                    assert len(data) == size
                    assert len(set(data)) == 1
                    looks += 1
                return looks

            async def put(number: int) -> None:
                await origin.put("a", body(*[bytes([number]) * 100_000] * 7), size if number % 2 else None)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(put(number) for number in range(12)))
            is_over = True
            assert await watching
            assert len(set(await content(origin, "a"))) == 1
            assert await keys_of(origin) == ["a"]

        self.run(test)

    def test_memory_is_bounded_by_what_is_on_its_way(self) -> None:
        """Of a large body no more parts are taken than are sent."""

        async def test(origin: WritableOrigin) -> None:
            if self.forgets:
                pytest.skip("it keeps all in memory")
            size, ahead = self.large_bytes, 0

            async def coming() -> AsyncGenerator[bytes, None]:
                nonlocal ahead
                for at in range(0, size, MIB):
                    ahead = max(ahead, at - (origin.counters.bytes_written - before))
                    yield bytes(MIB)

            for announced in (size, None):
                before, ahead = origin.counters.bytes_written, 0
                await origin.put("a", coming(), announced)
                assert ahead <= size // 2

        self.run(test)

    # -- conditions, attributes ---------------------------------------------------------------------------------

    def test_conditions(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            if not origin.capabilities.has_conditions:
                with pytest.raises(OriginReadOnly):
                    await origin.put("a", body(b"1"), 1, if_none_match=True)
                with pytest.raises(OriginReadOnly):
                    await origin.put("a", body(b"1"), 1, if_match="v")
                return
            with pytest.raises((ObjectNotFound, PreconditionFailed)):
                await origin.put("a", body(b"0"), 1, if_match='"v"')
            first = await origin.put("a", body(b"1"), 1, if_none_match=True)
            with pytest.raises(PreconditionFailed):
                await origin.put("a", body(b"2"), 1, if_none_match=True)
            with pytest.raises(PreconditionFailed):
                await origin.put("a", body(b"2"), 1, if_match='"v"')
            assert await content(origin, "a") == b"1"
            second = await origin.put("a", body(b"22"), 2, if_match=first.version)
            with pytest.raises(PreconditionFailed):
                await origin.put("a", body(b"3"), 1, if_match=first.version)
            assert await origin.stat("a") == second

        self.run(test)

    def test_of_many_who_replace_one_version_one_does(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            if not origin.capabilities.has_conditions:
                pytest.skip("it knows no conditions")

            async def put(number: int, **condition: object) -> bool:
                try:
                    await origin.put("a", body(b"%02d" % number), 2, **condition)  # type: ignore[arg-type]
                except PreconditionFailed:
                    return False
                return True

            done = await asyncio.gather(*(put(number, if_none_match=True) for number in range(10)))
            assert sum(done) == 1
            first = await origin.stat("a")
            done = await asyncio.gather(*(put(number + 10, if_match=first.version) for number in range(10)))
            assert sum(done) == 1
            assert await content(origin, "a") == b"%02d" % (10 + done.index(True))

        self.run(test)

    def test_attributes_are_kept_as_it_says(self) -> None:
        given = Attributes("text/x-odd; charset=utf-8", {"mtime": "1.5", "colour": "blue and green"})

        async def test(origin: WritableOrigin) -> None:
            can = origin.capabilities
            for key in ("a", "b"):
                await origin.put(key, body(b"one"), 3, attributes=given)
            await origin.copy("a", "c")
            await origin.copy("a", "d", attributes=Attributes("image/png", {"other": "1"}))
            upload = await origin.begin_upload("e", given)
            tag = await origin.put_part("e", upload, 1, body(b"one"), 3)
            await origin.complete_upload("e", upload, [(1, tag)])
            for key in ("a", "b", "c", "e"):
                kept = (await origin.describe(key)).attributes
                assert not can.keeps_content_type or kept.content_type == given.content_type
                assert not can.keeps_metadata or kept.metadata == given.metadata
            changed = (await origin.describe("d")).attributes
            assert not can.keeps_content_type or changed.content_type == "image/png"
            assert not can.keeps_metadata or changed.metadata == {"other": "1"}
            await origin.put("a", body(b"two"), 3)
            assert (await origin.describe("a")).attributes.metadata == {}
            with pytest.raises(ObjectNotFound):
                await origin.describe("missing")

        self.run(test)

    # -- delete, copy -------------------------------------------------------------------------------------------

    def test_deleting(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            keys = ["a", "dir/b", "dir/c", "dir/sub/d", "e"]
            for key in keys:
                await origin.put(key, body(key.encode()))
            for _ in range(2):
                await origin.delete("a")
            await origin.delete("missing/and/more")
            await origin.delete("dir/b/more")
            with pytest.raises(ObjectNotFound):
                await origin.stat("a")
            assert await origin.delete_many(["dir/b", "dir/missing", "e"]) == {}
            assert await origin.delete_many([]) == {}
            assert await keys_of(origin) == ["dir/c", "dir/sub/d"]
            assert await content(origin, "dir/c") == b"dir/c"
            await origin.delete("dir")
            assert await keys_of(origin) == ["dir/c", "dir/sub/d"]

        self.run(test)

    def test_where_all_objects_are_deleted_others_can_be(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            await origin.put("a/b/c", body(b"1"))
            await origin.put("a/d", body(b"2"))
            await origin.delete_many(["a/b/c", "a/d"])
            await origin.put("a", body(b"3"))
            assert await keys_of(origin) == ["a"]
            await origin.delete("a")
            await origin.put("a/b", body(b"4"))
            assert await keys_of(origin) == ["a/b"]

        self.run(test)

    def test_an_object_beside_others_that_begin_with_its_name_is_one_or_is_refused(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            await origin.put("a", body(b"1"))
            await origin.put("f/g", body(b"2"))
            there = {"a": b"1", "f/g": b"2"}
            for key in ("a/b", "a/b/c", "f"):
                try:
                    await origin.put(key, body(b"3"), 1)
                    there[key] = b"3"
                except BadKey:
                    pass
            for key, data in there.items():
                assert await content(origin, key) == data

        self.run(test)

    def test_copying(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            first = await origin.put("dir/a ü+%", body(LARGE), len(LARGE))
            await origin.put("empty", body())
            info = await origin.copy("dir/a ü+%", "other/b")
            assert await origin.stat("other/b") == info
            assert info.size_bytes == len(LARGE)
            assert await content(origin, "other/b") == LARGE
            assert (await origin.copy("empty", "other/b")).size_bytes == 0
            assert (await origin.copy("dir/a ü+%", "c", first.version)).size_bytes == len(LARGE)
            with pytest.raises(ObjectNotFound):
                await origin.copy("missing", "d")
            await origin.put("dir/a ü+%", body(b"new"))
            with pytest.raises(ObjectChanged):
                await origin.copy("dir/a ü+%", "d", first.version)
            await origin.copy("dir/a ü+%", "dir/a ü+%", attributes=Attributes("text/plain"))
            assert await content(origin, "dir/a ü+%") == b"new"
            assert await keys_of(origin) == ["c", "dir/a ü+%", "empty", "other/b"]

        self.run(test)

    def test_refusals_are_no_failures_of_the_origin(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            with pytest.raises(WriteRefused):
                await origin.put("../a", body(b"1"), 1)
            async with aclosing(body(b"one")) as parts:
                await origin.put("a", parts)
            assert await content(origin, "a") == b"one"

        self.run(test)
