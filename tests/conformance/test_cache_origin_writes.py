"""Every origin that can be written to passes the same suite; S3 against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.memory_writing import WritableMemoryOrigin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.testing.cache_origin_writes import WritableConformance


class TestMemory(WritableConformance):
    forgets = True

    def open_empty(self) -> WritableOrigin:
        return WritableMemoryOrigin("m")


class TestLocal(WritableConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_empty(self) -> WritableOrigin:
        return WritableLocalOrigin(str(self.path))
