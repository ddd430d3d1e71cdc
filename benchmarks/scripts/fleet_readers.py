"""`fleet_readers.py URLS TOKEN SEED KIND COUNT SIZE_BYTES`: reads objects of the bucket `b` from a fleet, at random.

Small ones in batches, large ones in parts of 16 MiB. Answers each line of standard input with the bytes that have come
so far, and ends with it. SEED `once`: reads each object once instead, and ends.
"""

from __future__ import annotations

import os
import random
import sys
import threading

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client

BATCH = 32
PART_BYTES = 16 << 20


class Reader:
    """Reads objects of one kind and size."""

    def __init__(self, client: CacheClient, kind: str, count: int, size_bytes: int) -> None:
        self._client = client
        self._names = [f"{kind}/{number:05}" for number in range(count)]
        self._size_bytes = size_bytes
        self.bytes = 0

    def once(self) -> None:
        """Each object."""
        for first in range(0, len(self._names), BATCH):
            self._read(self._names[first : first + BATCH])

    def for_ever(self, chance: random.Random) -> None:
        """Objects by chance."""
        while True:
            self._read(chance.choices(self._names, k=1 if self._size_bytes > PART_BYTES else BATCH))

    def _read(self, names: list[str]) -> None:
        if self._size_bytes <= PART_BYTES:
            self.bytes += sum(len(data) for data in self._client.read_many("b", names))
            return
        for name in names:
            for start in range(0, self._size_bytes, PART_BYTES):
                self.bytes += len(self._client.read("b", name, start, start + PART_BYTES))


def main() -> None:
    """Read until standard input ends."""
    urls, token, seed, kind, count, size_bytes = sys.argv[1:]
    with open_client(urls, token) as client:
        reader = Reader(client, kind, int(count), int(size_bytes))
        if seed == "once":
            reader.once()
            return
        threading.Thread(target=reader.for_ever, args=(random.Random(int(seed)),), daemon=True).start()
        for _ in sys.stdin:
            print(reader.bytes, flush=True)
        os._exit(0)  # the reader is in the midst of reading


if __name__ == "__main__":
    main()
