"""Every origin that can be written to passes the same suite; S3 against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.fsspec_writing import WritableFsspecOrigin
from stoker.cache.origin.guarded_writes import GuardedWritableOrigin
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.memory_writing import WritableMemoryOrigin
from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.testing.cache_origin_uploads import UploadConformance
from stoker.testing.cache_origin_writes import WritableConformance
from tests.s3_server import BUCKET, KEYS, s3_server

MIB = 1 << 20
_numbers = itertools.count()


class TestMemory(WritableConformance, UploadConformance):
    forgets = True

    def open_empty(self) -> WritableOrigin:
        return WritableMemoryOrigin("m")


class TestLocal(WritableConformance, UploadConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_empty(self) -> WritableOrigin:
        return WritableLocalOrigin(str(self.path))


class TestGuarded(TestLocal):
    def open_empty(self) -> WritableOrigin:
        origin = WritableLocalOrigin(str(self.path))
        return GuardedWritableOrigin(origin, OriginLimits(), SystemClock(), Rng(1))


class TestFsspecFolder(TestLocal):
    def open_empty(self) -> WritableOrigin:
        return open_writable_origin(f"local://{self.path}")


class TestFsspecMemory(WritableConformance, UploadConformance):
    @pytest.fixture(autouse=True)
    def name(self) -> None:
        self.url = f"memory://writes-{next(_numbers)}"

    def open_empty(self) -> WritableOrigin:
        return WritableFsspecOrigin(self.url)


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@pytest.mark.real
@pytest.mark.timeout(240)
class TestS3(WritableConformance, UploadConformance):
    tick_s = 1.1

    @pytest.fixture(autouse=True)
    def server(self, s3_endpoint: str) -> None:
        self.url = f"s3://{BUCKET}/pre fix/{next(_numbers)}?endpoint={s3_endpoint}"

    def open_empty(self) -> WritableOrigin:
        return open_writable_origin(self.url, KEYS)

    def test_the_origin_is_told_what_its_sender_says_of_the_content(self) -> None:
        data = bytes(range(256)) * 4 * 4096

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(data), MIB):
                yield data[start : start + MIB]

        async def story() -> None:
            origin = self.open_empty()
            right = hashlib.sha256(data).hexdigest()
            info = await origin.put("right", parts(), len(data), sha256=right)
            assert (info.size_bytes, (await origin.stat("right")).version) == (len(data), info.version)
            upload = await origin.begin_upload("parts")
            tag = await origin.put_part("parts", upload, 1, parts(), len(data), sha256=right)
            await origin.complete_upload("parts", upload, [(1, tag)])
            assert (await origin.stat("parts")).size_bytes == len(data)
            await origin.close()

        asyncio.run(story())
