"""Put a block, or a part of one, into a response."""

from __future__ import annotations

from stoker.cache.layout import BlockSpan
from stoker.cache.server.engine import Engine, Pointer
from stoker.cache.server.port import Answer
from stoker.cache.store.shelf import HOT_BLOCK_BYTES_MAX, Held
from stoker.errors import CorruptBlock


async def send_block(
    engine: Engine, pointer: Pointer, span: BlockSpan, block: Held | bytes, answer: Answer
) -> None:
    """Write the span's bytes. A held block that turns out to be gone is fetched. Raises as `Engine.fetch`."""
    size_bytes = span.stop - span.start
    if isinstance(block, Held):
        shelf = engine.shelf
        # Between the lookup and now the loop may have turned and evicted it.
        held = shelf.find(block.block)
        try:
            if held is None or not (held.is_verified or held.size_bytes <= HOT_BLOCK_BYTES_MAX):
                block = await engine.fetch(pointer, span.index)
            elif held.size_bytes <= HOT_BLOCK_BYTES_MAX:
                block = shelf.bytes_of(held)
            else:
                file = shelf.file_of(held)
                if file is not None:
                    shelf.pin(held)
                    answer.file(file, span.start, size_bytes, lambda: shelf.unpin(held))
                    return
                block = shelf.bytes_of(held)
        except CorruptBlock:
            block = await engine.fetch(pointer, span.index)
    answer.data(block if size_bytes == len(block) else block[span.start : span.stop])
