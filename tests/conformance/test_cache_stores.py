"""Every store passes the same suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cache.store.disk import DiskStore
from stoker.cache.store.memory import MemoryStore
from stoker.cache.store.port import Store
from stoker.testing.cache_store import StoreConformance


class TestMemory(StoreConformance):
    is_durable = False

    def open_store(self) -> Store:
        return MemoryStore()


class TestDisk(StoreConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cache"

    def open_store(self) -> Store:
        return DiskStore(self.path)
