"""Listings page by page: who asks for the next page has it without all being gone through again."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from stoker.cache.origin.cursors import KEPT_MAX, Cursors
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.port import Origin

NAMES = [f"f/{number // 40}/{number:03d}" for number in range(200)]


async def page_of(origin: Origin, after: str | None, limit: int = 20) -> list[str]:
    async with aclosing(origin.list("f/", after, limit)) as pages:
        async for page in pages:
            return [info.key for info in page]
    return []


async def all_pages(origin: Origin, limit: int = 20) -> list[str]:
    """As a server asks: each page by itself."""
    found: list[str] = []
    after = None
    while page := await page_of(origin, after, limit):
        found += page
        after = page[-1]
    return found


def folder_of(path: Path) -> LocalOrigin:
    for name in NAMES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    return LocalOrigin(str(path))


def test_a_folder_is_gone_through_once_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = folder_of(tmp_path)
    scanned: list[str] = []
    scan = os.scandir

    def counted(path: str) -> object:
        scanned.append(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", counted)
    assert asyncio.run(all_pages(origin)) == NAMES
    assert len(scanned) == len(set(scanned)) == 6


def test_two_that_list_a_folder_take_nothing_of_each_other(tmp_path: Path) -> None:
    async def story() -> None:
        origin = folder_of(tmp_path)
        first = await page_of(origin, None)
        assert await page_of(origin, None) == first == NAMES[:20]
        assert await page_of(origin, first[-1], 30) == NAMES[20:50]
        assert await page_of(origin, first[-1], 30) == NAMES[20:50]
        assert await page_of(origin, NAMES[49]) == NAMES[50:70]
        await origin.close()

    asyncio.run(story())


def test_what_comes_later_to_a_folder_is_in_the_next_listing(tmp_path: Path) -> None:
    async def story() -> None:
        origin = folder_of(tmp_path)
        first = await page_of(origin, None)
        (tmp_path / "f/0/0000").write_bytes(b"x")
        (tmp_path / NAMES[25]).write_bytes(b"changed")
        (tmp_path / NAMES[26]).unlink()
        async with aclosing(origin.list("f/", first[-1], 20)) as pages:
            infos = await anext(pages)
        assert [info.key for info in infos] == [*NAMES[20:26], *NAMES[27:41]]
        assert infos[5].size_bytes == 7, "each page says what is there when it is asked for"
        assert (await page_of(origin, None))[:2] == ["f/0/000", "f/0/0000"]
        await origin.close()
        assert not origin._lists

    asyncio.run(story())


def test_few_rests_are_kept() -> None:
    async def story() -> None:
        kept: Cursors[int] = Cursors()
        for number in range(KEPT_MAX + 1):
            kept.keep("p", str(number), number)
        assert len(kept) == KEPT_MAX
        assert [kept.take("p", after) for after in ("0", "1", "1", None)] == [None, 1, None, None]
        kept.clear()
        assert len(kept) == 0

    asyncio.run(story())
