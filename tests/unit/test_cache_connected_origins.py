"""Origins over one connection: they wait for their turn, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from stoker.cache.origin import fsspec_origin
from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.errors import OriginError
from stoker.wire.cache_api import ObjectInfo


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 60))


def slow_origin(
    monkeypatch: pytest.MonkeyPatch, may_answer: threading.Event, together: list[int]
) -> FsspecOrigin:
    """Over one connection, whose answers wait. `together`: how many of its requests ran at the same time."""
    running: list[str] = []

    class Slow(MemoryFileSystem):
        protocol = "slow"

        def info(self, path: str, **options: Any) -> Any:
            running.append(path)
            together.append(len(running))
            assert may_answer.wait(60)
            running.remove(path)
            return {"name": path, "size": 1, "type": "file", "mtime": 1.0}

    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(fsspec_origin, "_CONNECTED", frozenset(("slow",)))
    return FsspecOrigin("slow://x")


def test_requests_that_wait_for_one_connection_keep_no_other_origin_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k").write_bytes(b"here")
    may_answer, together = threading.Event(), list[int]()

    async def story() -> None:
        origin = slow_origin(monkeypatch, may_answer, together)
        waiting = [asyncio.ensure_future(origin.stat(f"k{n}")) for n in range(300)]
        try:
            here = LocalOrigin(str(tmp_path))
            info = await here.stat("k")
            assert await here.read("k", 0, 4, info.version) == b"here"
            assert not any(task.done() for task in waiting)
            waiting[1].cancel()
        finally:
            may_answer.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(one, ObjectInfo) for one in found) == 299
        assert max(together) == 1
        await origin.close()
        with pytest.raises(OriginError):
            await origin.stat("k")

    run(story())


def test_who_reads_as_another_user_has_another_origin() -> None:
    urls = [fsspec_origin._shown(f"ftp://{user}:SECRET@host/p") for user in ("ann", "bob")]
    assert len({*urls, fsspec_origin._shown("ftp://host/p")}) == 3
    assert urls[0] == fsspec_origin._shown("ftp://ann:other@host/p"), "a new password is no other origin"
    assert not any("SECRET" in url or "ann" in url for url in urls)
