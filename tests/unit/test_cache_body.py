"""Bodies in parts: what is granted, and what comes."""

from __future__ import annotations

import asyncio

import pytest

from stoker.cache.server.body import WINDOW_BYTES, BodyParts
from stoker.errors import WireError


class Peer:
    """Sends as much as it may, at once."""

    def __init__(self, data: bytes, part_bytes: int) -> None:
        self.data = data
        self.part_bytes = part_bytes
        self.sent_bytes = 0
        self.parts = BodyParts(len(data), self.more)

    def more(self, granted_bytes: int) -> None:
        stop = min(len(self.data), self.sent_bytes + granted_bytes)
        while self.sent_bytes < stop:
            part = self.data[self.sent_bytes : min(stop, self.sent_bytes + self.part_bytes)]
            self.sent_bytes += len(part)
            is_last = self.sent_bytes == len(self.data)
            asyncio.get_running_loop().call_soon(self.parts.take, part, is_last)


@pytest.mark.parametrize("part_bytes", [1000, 65536, WINDOW_BYTES])
@pytest.mark.parametrize("is_slow", [False, True])
def test_all_of_a_body_comes_whoever_is_slow(part_bytes: int, is_slow: bool) -> None:
    data = bytes(range(256)) * (WINDOW_BYTES // 64)

    async def read() -> tuple[bytes, int]:
        peer, got, most = Peer(data, part_bytes), bytearray(), 0
        async for part in peer.parts:
            got += part
            most = max(most, peer.sent_bytes - len(got) + len(part))
            if is_slow:
                for _ in range(3):
                    await asyncio.sleep(0)
        return bytes(got), most

    got, most = asyncio.run(asyncio.wait_for(read(), 60))
    assert got == data
    assert most <= WINDOW_BYTES, "no more waits here than was granted"


def test_a_body_that_is_too_long_is_not_gathered() -> None:
    async def read(size_bytes: int | None) -> bytes:
        peer = Peer(bytes(5000), 1000)
        peer.parts.size_bytes = size_bytes
        return await peer.parts.all(4000)

    for size_bytes in (5000, None):
        with pytest.raises(WireError, match="4000"):
            asyncio.run(read(size_bytes))
