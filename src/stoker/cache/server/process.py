"""A cache server as a child process: settings come as one JSON line on stdin, the endpoint goes to stdout.

The server stops when stdin ends or its parent dies, whichever is noticed first: a forked sibling may keep
the pipe open, and a parent that is killed closes nothing by hand.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from stoker.cache.server.serving import serve
from stoker.cache.server.settings import Listening, ServerSettings
from stoker.errors import StokerError
from stoker.settings import environment
from stoker.wire.cache_api import BucketSpec


class ChildConfig(msgspec.Struct, frozen=True):
    """What the parent says."""

    folder: str
    capacity_bytes: int
    host: str
    port: int
    unix_path: str | None
    buckets: dict[str, BucketSpec]
    tokens: list[str]


class Announcement(msgspec.Struct, frozen=True):
    """What the child says: where it listens, or why it does not."""

    endpoint: str = ""
    unix_path: str | None = None
    error: str = ""
    exit_code: int = 0


def main() -> int:
    """Serve until the parent lets go."""
    parent = os.getppid()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildConfig)
    settings = ServerSettings(
        folder=Path(config.folder),
        capacity_bytes=config.capacity_bytes,
        host=config.host,
        port=config.port,
        unix_path=config.unix_path,
        buckets=config.buckets,
        tokens=config.tokens,
        environment=environment(),
    )
    try:
        serve(settings, _announce, lambda stopping: _watch_parent(parent, stopping))
    except StokerError as error:
        _say(Announcement(error=str(error), exit_code=error.exit_code))
        return error.exit_code
    return 0


def _announce(listening: Listening) -> None:
    _say(Announcement(listening.endpoint, listening.unix_path))


def _say(announcement: Announcement) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(announcement) + b"\n")
    sys.stdout.buffer.flush()


def _watch_parent(parent: int, stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def on_stdin() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stopping.set()

    loop.add_reader(stdin, on_stdin)
    try:
        parent_fd = os.pidfd_open(parent)
    except OSError:
        stopping.set()
        return
    loop.add_reader(parent_fd, stopping.set)
    if os.getppid() != parent:
        stopping.set()


if __name__ == "__main__":
    sys.exit(main())
