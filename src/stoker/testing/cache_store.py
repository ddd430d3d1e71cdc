"""What every store must do. Subclass StoreConformance in a test module and say how to open one."""

from __future__ import annotations

import zlib

import pytest

from stoker.cache.layout import BlockId
from stoker.cache.store.port import Store
from stoker.errors import CorruptBlock


class StoreConformance:
    """The suite. A store that is not durable sets `is_durable` to False."""

    is_durable = True

    def open_store(self) -> Store:
        """Open the store of this test; called again after `close`, it is the same store."""
        raise NotImplementedError

    def opened(self) -> Store:
        """The store, loaded."""
        store = self.open_store()
        store.load()
        return store

    def test_what_is_written_is_read(self) -> None:
        store = self.opened()
        block, data = BlockId("b", "k/ü", "v 1", 3), bytes(range(256)) * 50
        store.write(block, data, zlib.crc32(data))
        assert store.read(block, 0, len(data)) == data
        assert store.read(block, 7, 99) == data[7:99]
        store.close()

    def test_what_is_not_there_or_too_short_is_corrupt(self) -> None:
        store = self.opened()
        block = BlockId("b", "k", "v", 0)
        with pytest.raises(CorruptBlock):
            store.read(block, 0, 1)
        store.write(block, b"abc", zlib.crc32(b"abc"))
        with pytest.raises(CorruptBlock):
            store.read(block, 0, 4)
        store.delete(block)
        store.delete(block)
        with pytest.raises(CorruptBlock):
            store.read(block, 0, 1)
        store.close()

    def test_blocks_that_differ_in_any_part_are_different(self) -> None:
        store = self.opened()
        blocks = [BlockId(*parts) for parts in [("b", "k", "v", 0), ("c", "k", "v", 0), ("b", "l", "v", 0)]]
        blocks += [BlockId("b", "k", "w", 0), BlockId("b", "k", "v", 1), BlockId("bk", "", "v", 0)]
        for number, block in enumerate(blocks):
            store.write(block, b"%d" % number, 0)
        assert [store.read(block, 0, 1) for block in blocks] == [b"%d" % n for n in range(len(blocks))]
        store.close()

    def test_it_never_charges_less_than_the_content(self) -> None:
        store = self.opened()
        assert all(store.charge_bytes(size) >= size for size in (0, 1, 4095, 4096, 4097, 10**7))
        store.close()

    def test_the_index_survives(self) -> None:
        if not self.is_durable:
            pytest.skip("this store does not claim to be durable")
        store = self.opened()
        kept, dropped = BlockId("b", "kept", "v", 0), BlockId("b", "dropped", "v", 0)
        for block in (dropped, kept):
            store.write(block, b"abc", zlib.crc32(b"abc"))
        store.delete(dropped)
        store.save_origin("b", "memory://b")
        store.close()
        again = self.open_store()
        loaded = again.load()
        assert [tuple(stored) for stored in loaded.blocks] == [(kept, 3, zlib.crc32(b"abc"))]
        assert loaded.origins == {"b": "memory://b"}
        assert loaded.notes == []
        assert again.read(kept, 0, 3) == b"abc"
        again.close()
