"""What uploads in parts must do at every origin. Subclass UploadConformance as WritableConformance."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from stoker.cache.origin.writing_port import WritableOrigin
from stoker.errors import (
    BadParts,
    NoSuchUpload,
    ObjectNotFound,
    OriginReadOnly,
    PreconditionFailed,
    WrongBodyLength,
)
from stoker.testing.cache_origin import listed
from stoker.testing.cache_origin_writable import MIB, Trouble, WritableOrigins, body, content, cut, keys_of


class UploadConformance(WritableOrigins):
    """The suite."""

    def test_an_upload_in_parts(self) -> None:
        data = random.Random(3).randbytes(2 * self.part_bytes + 5)
        cuts = cut(data, self.part_bytes)

        async def test(origin: WritableOrigin) -> None:
            old = await origin.put("dir/k", body(b"old"), 3)
            upload = await origin.begin_upload("dir/k")
            tags = {}
            for number in (30, 1, 2):
                part = cuts[{1: 0, 2: 1, 30: 2}[number]]
                tags[number] = await origin.put_part(
                    "dir/k", upload, number, body(*cut(part, MIB)), len(part)
                )
            assert await listed(origin, "", None, 1000) == [old]
            if not self.forgets:
                await origin.close()
                origin = self.open_empty()
            uploads = await origin.list_uploads("dir/")
            assert [(found.key, found.upload_id) for found in uploads] == [("dir/k", upload)]
            parts = await origin.list_parts("dir/k", upload)
            assert [(part.number, part.size_bytes) for part in parts] == [
                (1, self.part_bytes),
                (2, self.part_bytes),
                (30, 5),
            ]
            assert {part.number: part.etag.strip('"') for part in parts} == {
                n: tags[n].strip('"') for n in tags
            }
            assert [part.number for part in await origin.list_parts("dir/k", upload, 1, 1)] == [2]
            info = await origin.complete_upload("dir/k", upload, sorted(tags.items()))
            assert await origin.stat("dir/k") == info
            assert await content(origin, "dir/k") == data
            assert await keys_of(origin) == ["dir/k"]
            assert await origin.list_uploads() == []
            if not self.forgets:
                await origin.close()

        self.run(test)

    def test_a_part_that_is_put_again_is_the_last_one(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            upload = await origin.begin_upload("k")
            tags = [await origin.put_part("k", upload, 7, body(data), 3) for data in (b"one", b"two", b"six")]
            await asyncio.sleep(self.tick_s)
            again = await origin.put_part("k", upload, 7, body(b"one"), 3)
            assert again.strip('"') == tags[0].strip('"')
            assert [part.etag.strip('"') for part in await origin.list_parts("k", upload)] == [
                again.strip('"')
            ]
            await origin.complete_upload("k", upload, [(7, again)])
            assert await content(origin, "k") == b"one"

        self.run(test)

    def test_parts_that_fail_are_none(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            upload = await origin.begin_upload("k")
            with pytest.raises(Trouble):
                await origin.put_part("k", upload, 1, body(b"one", fails=True), 3)
            for size_bytes in (2, 4):
                with pytest.raises(WrongBodyLength):
                    await origin.put_part("k", upload, 1, body(b"one"), size_bytes)
            assert await origin.list_parts("k", upload) == []
            for number in (0, -1, 10_001):
                with pytest.raises(BadParts):
                    await origin.put_part("k", upload, number, body(b"one"), 3)
            await origin.abort_upload("k", upload)

        self.run(test)

    def test_completing_what_is_not_there(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            upload = await origin.begin_upload("k")
            tag = await origin.put_part("k", upload, 1, body(b"one"), 3)
            other = await origin.put_part("k", upload, 2, body(b"two"), 3)
            for parts in (
                [],
                [(2, other), (1, tag)],
                [(1, tag), (1, tag)],
                [(1, other)],
                [(1, tag), (3, tag)],
            ):
                with pytest.raises(BadParts):
                    await origin.complete_upload("k", upload, parts)
            with pytest.raises(ObjectNotFound):
                await origin.stat("k")
            await origin.complete_upload("k", upload, [(2, other)])
            assert await content(origin, "k") == b"two"

        self.run(test)

    def test_an_upload_that_has_ended_or_never_was(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            done, given_up = await origin.begin_upload("k"), await origin.begin_upload("k")
            tag = await origin.put_part("k", done, 1, body(b"one"), 3)
            await origin.put_part("k", given_up, 1, body(b"two"), 3)
            await origin.complete_upload("k", done, [(1, tag)])
            await origin.abort_upload("k", given_up)
            for upload in (done, given_up, "0" * 32, "../../k", "", "x"):
                with pytest.raises(NoSuchUpload):
                    await origin.put_part("k", upload, 2, body(b"two"), 3)
                with pytest.raises(NoSuchUpload):
                    await origin.list_parts("k", upload)
                # Some servers remember for a while what has ended, and say again that it has.
                with (
                    pytest.raises(NoSuchUpload) if upload not in (done, given_up) else suppress(NoSuchUpload)
                ):
                    await origin.complete_upload("k", upload, [(1, tag)])
                with (
                    pytest.raises(NoSuchUpload) if upload not in (done, given_up) else suppress(NoSuchUpload)
                ):
                    await origin.abort_upload("k", upload)
            alive = await origin.begin_upload("k")
            with pytest.raises(NoSuchUpload):
                await origin.put_part("other", alive, 1, body(b"two"), 3)
            assert await content(origin, "k") == b"one"

        self.run(test)

    def test_conditions_of_uploads(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            upload = await origin.begin_upload("k")
            tag = await origin.put_part("k", upload, 1, body(b"one"), 3)
            if not origin.capabilities.has_conditions:
                with pytest.raises(OriginReadOnly):
                    await origin.complete_upload("k", upload, [(1, tag)], if_none_match=True)
                return
            old = await origin.put("k", body(b"old"), 3)
            with pytest.raises(PreconditionFailed):
                await origin.complete_upload("k", upload, [(1, tag)], if_none_match=True)
            with pytest.raises(PreconditionFailed):
                await origin.complete_upload("k", upload, [(1, tag)], if_match='"another"')
            assert await origin.stat("k") == old
            await origin.complete_upload("k", upload, [(1, tag)], if_match=old.version)
            assert await content(origin, "k") == b"one"

        self.run(test)

    def test_uploads_are_listed_by_key_and_given_up_by_age(self) -> None:
        async def test(origin: WritableOrigin) -> None:
            keys = ["a", "dir/b", "dir/b", "dir/c ü", "e"]
            begun = {(key, await origin.begin_upload(key)) for key in keys}
            await origin.put_part("a", next(upload for key, upload in begun if key == "a"), 1, body(b"x"), 1)
            uploads = await origin.list_uploads()
            assert {upload[:2] for upload in uploads} == begun
            assert [upload.key for upload in uploads] == keys
            assert [upload.key for upload in await origin.list_uploads("dir/")] == keys[1:4]
            first = await origin.list_uploads("dir/", limit=1)
            rest = await origin.list_uploads("dir/", first[0][:2])
            assert [upload[:2] for upload in first + rest] == [upload[:2] for upload in uploads[1:4]]
            now = max(upload.begun_at for upload in uploads)
            assert await origin.clean_up(now, 3600) == 0
            assert await origin.clean_up(now + 7200, 3600) == len(keys)
            assert await origin.list_uploads() == []

        self.run(test)
