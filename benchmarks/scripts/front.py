"""A native front over one packed object of 1 KiB and of 100 KiB and a large one: `front.py FOLDER [--busy]`.

Prints its port; ends with standard input. `--busy`: a thread of the same interpreter computes all the time.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _web import TOKEN

from stoker._native import Files, Front, FrontSettings, Index

BLOCK_BYTES = 4 << 20


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    index, files = Index(str(folder / "index"), BLOCK_BYTES), Files(str(folder), 100)
    bucket = index.bucket("b", "")
    Path(files.path(1)).parent.mkdir(exist_ok=True)
    segment = b"the end of another object"
    for key, size_bytes in (("1KiB", 1024), ("100KiB", 100 * 1024)):
        index.learn(bucket, key, "v", size_bytes, False, 1)
        index.hold(bucket, key, "v", None, 1, len(segment), 0, 1)
        segment += os.urandom(size_bytes)
    Path(files.path(1)).write_bytes(segment)
    Path(files.path(2)).write_bytes(os.urandom(16 * BLOCK_BYTES))
    index.learn(bucket, "64MiB", "v", 16 * BLOCK_BYTES, False, 1)
    for block in range(16):
        index.hold(bucket, "64MiB", "v", block, 2, 0, 0, 1)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    front = Front(index, files, FrontSettings())
    front.listen(listener.detach())
    front.set_rules([(0, TOKEN, {"*": [""]}, "", "")], {"b": (bucket, 1e9, 0)})
    front.set_now(1)
    front.start()
    if "--busy" in sys.argv:
        threading.Thread(target=compute, daemon=True).start()
    sys.stdin.read()
    front.stop()


def compute() -> None:
    """Never gives up the interpreter's lock of its own accord."""
    while True:
        sum(range(1000))


if __name__ == "__main__":
    main()
