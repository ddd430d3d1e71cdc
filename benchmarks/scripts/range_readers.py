"""`range_readers.py HOST PORT TARGET SIZE_BYTES CONNECTIONS`: reads ranges of 8 MiB as fast as they come.

Each connection in a thread of its own, until standard input ends; every line that comes in is answered with the bytes
that were read so far.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _serving import Asker

RANGE_BYTES = 8 << 20


def main() -> None:
    """Read until standard input ends."""
    host, port, target, size_bytes, connections = sys.argv[1:]
    askers = [Asker((host, int(port))) for _ in range(int(connections))]

    def read(asker: Asker) -> None:
        chance = random.Random(id(asker))
        while True:
            first = chance.randrange(int(size_bytes) // RANGE_BYTES) * RANGE_BYTES
            asker.ask(target, "GET", f"Range: bytes={first}-{first + RANGE_BYTES - 1}")

    for asker in askers:
        threading.Thread(target=read, args=(asker,), daemon=True).start()
    for _ in sys.stdin:
        print(sum(asker.body_bytes for asker in askers), flush=True)
    os._exit(0)  # the others are in the midst of reading


if __name__ == "__main__":
    main()
