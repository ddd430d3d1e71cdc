"""A store in this process's memory: for tests, and for servers without a disk."""

from __future__ import annotations

from stoker.cache.layout import BlockId
from stoker.cache.store.port import Folder, Loaded, OpenFile, StoredPointer
from stoker.errors import CorruptBlock


class MemoryStore:
    """A dictionary of blocks; nothing survives it."""

    def __init__(self) -> None:
        self._blocks: dict[BlockId, bytes] = {}

    def load(self) -> Loaded:
        return Loaded((), (), {}, [])

    def charge_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def write(self, block: BlockId, data: bytes, crc: int) -> None:
        self._blocks[block] = data

    def read(self, block: BlockId, start: int, stop: int) -> bytes:
        data = self._blocks.get(block)
        if data is None or stop > len(data):
            raise CorruptBlock(f"{block} is not in the store")
        return data[start:stop]

    def open(self, block: BlockId) -> OpenFile | None:
        return None

    def folder(self) -> Folder | None:
        return None

    def path_of(self, block: BlockId) -> bytes:
        raise NotImplementedError("there are no files")

    def delete(self, block: BlockId) -> None:
        self._blocks.pop(block, None)

    def save_pointer(self, pointer: StoredPointer) -> None:
        pass

    def drop_pointer(self, bucket: str, key: str) -> None:
        pass

    def save_origin(self, bucket: str, url: str) -> None:
        pass

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        self._blocks.clear()
