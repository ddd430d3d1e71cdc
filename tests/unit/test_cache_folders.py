"""What is right below a prefix: as an origin that knows folders tells it, and as lists of all objects have it."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from stoker.cache.origin import local
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.writing_port import nothing
from stoker.cache.server.folders import folders_page
from stoker.wire.cache_api import ObjectPage


async def by_lists(origin: WritableLocalOrigin, prefix: str, limit: int) -> tuple[list[str], list[str]]:
    async def ask(prefix: str, after: str | None, limit: int) -> ObjectPage:
        async with aclosing(origin.list(prefix, after, limit)) as pages:
            async for found in pages:
                return ObjectPage(found, found[-1].key if len(found) == limit else None)
        return ObjectPage([])

    objects: list[str] = []
    folders: list[str] = []
    after: str | None = None
    while True:
        page = await folders_page(ask, "/", prefix, after, limit)
        objects += [info.key for info in page.objects]
        folders += page.folders or []
        after = page.after
        if after is None:
            return objects, folders


async def by_folder(origin: WritableLocalOrigin, prefix: str, limit: int) -> tuple[list[str], list[str]]:
    objects: list[str] = []
    folders: list[str] = []
    after: str | None = None
    while True:
        page = await origin.folder(prefix, after, limit)
        assert page is not None
        assert len(page.objects) + len(page.folders) <= limit
        for info in page.objects:
            assert info.version == (await origin.stat(info.key)).version
        objects += [info.key for info in page.objects]
        folders += page.folders
        after = page.after
        if after is None:
            return objects, folders


@pytest.mark.parametrize("rescanned_max", [0, local.RESCANNED_MAX])
def test_a_folder_tells_what_its_lists_tell(
    tmp_path: Path, rescanned_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESCANNED_MAX", rescanned_max)

    async def check() -> None:
        rng = random.Random(3)
        for world in range(12):
            root = tmp_path / str(world)
            root.mkdir()
            origin = WritableLocalOrigin(str(root))
            names = ["a", "b", "a-", "a.x", "ab", "b-b"]
            for _ in range(rng.randint(0, 25)):
                path = root / "/".join(rng.choices(names, k=rng.randint(1, 3)))
                kind = rng.choice(["file", "file", "folder", "marker"])
                if path.exists() or any(above.is_file() for above in path.parents):
                    continue
                if kind == "marker":
                    await origin.put(f"{path.relative_to(root)}/", nothing(), 0)
                elif kind == "folder":
                    path.mkdir(parents=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"x")
            for prefix in ("", "a", "a/", "b", "a-/", "ab/b/", "b-", "nothing/", "a/a"):
                expected = await by_lists(origin, prefix, 1000)
                for limit in (1, 2, 100):
                    found = await by_folder(origin, prefix, limit)
                    assert found == expected, (prefix, limit, sorted(map(str, root.rglob("*"))))
            await origin.close()

    asyncio.run(check())


def test_what_is_in_folders_is_not_looked_through(tmp_path: Path) -> None:
    for folder in range(20):
        (tmp_path / f"{folder:02}").mkdir()
        for number in range(50):
            (tmp_path / f"{folder:02}/{number}").write_bytes(b"x")

    async def check() -> None:
        origin = WritableLocalOrigin(str(tmp_path))
        page = await origin.folder("", None, 1000)
        assert page is not None
        assert (page.objects, page.folders, page.after) == ([], [f"{n:02}/" for n in range(20)], None)
        assert origin.counters.requests == 1
        await origin.close()

    asyncio.run(check())
