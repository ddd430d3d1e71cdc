"""The native front without the server behind it: a test says what it holds, and what its back answers."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker._native import Files, Front, FrontSettings, Index

NOW = 1000
Asked = tuple[str, bytes, dict[bytes, bytes], bytes, int, bool, int, str, str]
"""Method, target, headers, body, id of the token, whether it came by a Unix socket, how long a body is to come, the
name in the peer's certificate, and its address."""


def new_front(folder: Path, **limits: float) -> tuple[Front, Index, Files, int]:
    """One that holds nothing, in an empty folder, and the number of its bucket `data`."""
    settings = FrontSettings()
    for name, value in limits.items():
        setattr(settings, name, value)
    (folder / "000").mkdir()
    index, files = Index(str(folder / "index"), 4 << 20), Files(str(folder), 100)
    return Front(index, files, settings), index, files, index.bucket("data", "")


@contextlib.contextmanager
def answering(
    front: Front,
    listener: socket.socket,
    answer: Callable[[int, Asked], None],
    hear: Callable[[str, int, tuple[bytes, bool] | None], None] = lambda *_: None,
) -> Iterator[None]:
    """Listens until the end, with a back that hears what was asked on which connection, and what else happens there."""
    listener.setblocking(False)
    front.listen(listener.detach())
    front.set_now(NOW)
    front.start()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            select.select([front], [], [], 0.05)
            for kind, connection, asked, part in front.take(100):
                if kind == "asked" and asked is not None:
                    answer(connection, asked)
                else:
                    hear(kind, connection, part)

    back = threading.Thread(target=work)
    back.start()
    try:
        yield
    finally:
        done.set()
        back.join()
        front.stop()
