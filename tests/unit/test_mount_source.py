"""What a mount is shown of keys, whatever they are: found and listed alike, by servers that know folders and by older
ones that do not."""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.mount.source import CacheSource, is_name
from stoker.cache.mount.source_port import Found
from stoker.cache.server.folders import folders_page
from stoker.wire.cache_api import ObjectInfo, ObjectPage, ObjectStat
from tests.unit.cache_fake import FakeServer, faked

KNOWS, OLDER = "knows folders", "older"


class Bucket:
    """Answers as a server does, of objects whose versions are their keys."""

    def __init__(self, sizes: dict[str, int], kind: str) -> None:
        self.infos = [ObjectInfo(key, sizes[key], f"v-{key}", 12.5) for key in sorted(sizes)]
        self.keys = sorted(sizes)
        self.kind = kind
        self.server: FakeServer | None = None

    def list(self, _: bytes) -> ObjectPage:
        query = {name: one[0] for name, one in parse_qs(self._asked().query).items()}
        which = query.get("prefix", ""), query.get("after"), int(query["limit"])
        if self.kind == OLDER or "delimiter" not in query:
            return self.page(*which)
        return asyncio.run(folders_page(self._ask, query["delimiter"], *which))

    def stat(self, _: bytes) -> ObjectStat:
        key = unquote(self._asked().path).removeprefix("/-/stat/b/")
        if key not in self.keys:
            return ObjectStat(key, 0, "", 0, is_absent=True)
        found = self.infos[self.keys.index(key)]
        return ObjectStat(key, found.size_bytes, found.version, 0)

    def page(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
        first = 0 if after is None else bisect_right(self.keys, after)
        found = [info for info in self.infos[first:] if info.key.startswith(prefix)]
        return ObjectPage(found[:limit], found[limit - 1].key if len(found) > limit else None)

    async def _ask(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
        return self.page(prefix, after, limit)

    def _asked(self):  # type: ignore[no-untyped-def]
        assert self.server is not None
        return urlsplit(self.server.asked[-1][1])


@contextmanager
def shown(
    sizes: dict[str, int], kind: str = KNOWS, prefix: str = ""
) -> Iterator[tuple[CacheSource, FakeServer]]:
    bucket = Bucket(sizes, kind)
    with faked(GET_list=bucket.list, GET_stat=bucket.stat) as server, CacheClient(server.url) as client:
        bucket.server = server
        yield CacheSource(client, "b", prefix), server


def pages(source: CacheSource, path: str, limit: int) -> list[tuple[str, Found]]:
    found: list[tuple[str, Found]] = []
    after = None
    while True:
        page = source.page(path, after, limit)
        assert len(page.entries) <= limit
        found += page.entries
        if page.after is None:
            return found
        assert page.entries, "only the last page may be empty"
        after = page.after


def expected(sizes: dict[str, int], path: str) -> dict[str, bool]:
    """Whether each name right below a folder is a folder."""
    prefix = f"{path}/" if path else ""
    found: dict[str, bool] = {}
    for key, size in sizes.items():
        name, slash, _ = key.removeprefix(prefix).partition("/")
        if key.startswith(prefix) and is_name(name):
            is_file = bool(not slash and (size or not any(other.startswith(f"{key}/") for other in sizes)))
            found[name] = found.get(name, True) and not is_file
    return found


@pytest.mark.parametrize("kind", [KNOWS, OLDER])
def test_whatever_the_keys_are_they_are_found_as_they_are_listed(kind: str) -> None:
    rng = random.Random(5)
    for _ in range(6):
        parts = ["a", "b", "a-", "a.x", "ab", "", ".", "..", "é"]
        keys = {"/".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 14))} - {""}
        sizes = {key: rng.choice([0, 0, 7]) for key in keys}
        with shown(sizes, kind) as (source, _):
            folders = [""]
            for folder in folders:
                names = expected(sizes, folder)
                for limit in (1, 2, 100):
                    listed = pages(source, folder, limit)
                    assert {name: one.is_folder for name, one in listed} == names, (sizes, folder, limit)
                    assert len(listed) == len(names)
                    sort = [f"{name}/" if one.is_folder else name for name, one in listed]
                    assert sort == sorted(sort)
                for name, found in listed:
                    path = f"{folder}/{name}" if folder else name
                    assert source.find(path) == found
                    if found.is_folder:
                        folders.append(path)
                assert source.find(f"{folder}/zz" if folder else "zz") is None


@pytest.mark.parametrize("kind", [KNOWS, OLDER])
def test_what_lies_in_folders_is_stepped_over(kind: str) -> None:
    sizes = {f"p/{folder:03}/{number:03}": 1 for folder in range(50) for number in range(60)} | {"p/x": 1}
    with shown(sizes, kind, "p") as (source, server):
        assert len(source.page("", None, 1000).entries) == 51
        lists = [path for _, path in server.asked]
        assert len(lists) <= (1 if kind == KNOWS else 53)
        del server.asked[:]
        assert len(pages(source, "", 10)) == 51
        if kind == KNOWS:
            assert len(server.asked) == 6


def test_a_file_is_found_by_one_question_and_a_folder_by_two() -> None:
    with shown({"a": 1, "empty": 0, "d/x": 1}) as (source, server):
        for path, questions in [("a", 1), ("empty", 2), ("d", 2), ("nothing", 2), ("", 0), ("a//b", 0)]:
            del server.asked[:]
            source.find(path)
            assert len(server.asked) == questions, path


def test_a_page_asks_whether_an_empty_file_is_a_folder_only_where_nothing_says_so() -> None:
    sizes = {f"empty-{number}": 0 for number in range(50)} | {"a": 0, "a/x": 1, "b": 0, "b.x": 1}
    with shown(sizes) as (source, server):
        assert dict(pages(source, "", 1000))["a"].is_folder
        assert len(server.asked) == 1, "what follows says it"
        assert dict(source.page("", None, 3).entries) == {"a": Found(True), "b": source.find("b")}
        assert len(server.asked) == 1 + 2 + 2, "at its end it is asked whether there is b/"


def test_what_cannot_be_shown_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    keys = ["/lead", "a//b", "a/./b", "a/../b", "n\0l", "x" * 256, "é" * 128, "good", "y" * 255]
    with shown(dict.fromkeys(keys, 1)) as (source, _), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [name for name, _ in pages(source, "", 100)] == ["a", "good", "y" * 255]
            assert pages(source, "a", 100) == []
        assert len(caplog.records) == 1
        assert source.find("x" * 256) is source.find("é" * 128) is source.find("n\0l") is None


def test_when_a_file_was_written_is_said_alike_by_a_list_and_alone() -> None:
    with shown({"a": 1}) as (source, _):
        before = source.find("a")
        assert before is not None
        assert before.modified_s == 0.0, "the server was not told"
        ((_, listed),) = pages(source, "", 10)
        assert listed.modified_s == 12.0
        assert source.find("a") == listed
