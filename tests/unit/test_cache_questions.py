"""Answers that come late overrule none that is newer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.origin.port import Opened
from stoker.cache.server.questions import Questions
from stoker.wire.cache_api import ObjectInfo
from tests.unit.test_cache_engine import World, run


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.randoms())
def test_the_newest_question_that_was_answered_stands(steps, random) -> None:
    questions: Questions[str] = Questions()
    open_ones: list[tuple[str, int]] = []
    newest: dict[str, int] = {}
    for key, begins in steps:
        if begins or not open_ones:
            open_ones.append((key, questions.begin(key)))
            continue
        name, number = open_ones.pop(random.randrange(len(open_ones)))
        assert questions.is_news(name, number) == (newest.get(name, 0) < number)
        newest[name] = max(newest.get(name, 0), number)
        questions.end(name)
        if not any(other == name for other, _ in open_ones):
            newest.pop(name)
    for name, _ in open_ones:
        questions.end(name)
    assert len(questions) == 0


def test_a_slow_answer_does_not_bring_an_old_version_back(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("k", b"1" * 900)
        ask, slow = world.origin.stat, asyncio.Event()

        async def late(key: str) -> ObjectInfo:
            info = await ask(key)
            await slow.wait()
            return info

        world.origin.stat = late  # type: ignore[method-assign]
        first = asyncio.create_task(world.engine.locate(world.bucket, "k"))
        await asyncio.sleep(0.01)
        world.memory.put("k", b"2" * 900)
        world.origin.stat = ask  # type: ignore[method-assign]
        known = await world.engine.locate(world.bucket, "k", is_refreshing=True)
        slow.set()
        assert await first == known, "who asked first is told what is known by now"
        assert await world.read("k") == b"2" * 900

    run(World(tmp_path), story)


def test_a_list_that_was_begun_before_does_not_either(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("k", b"1" * 900)
        old = await world.origin.stat("k")
        world.memory.put("k", b"2" * 900)
        began, go_on = asyncio.Event(), asyncio.Event()

        async def listing(prefix: str, after: str | None = None, limit: int = 1000):
            began.set()
            await go_on.wait()
            yield [old]

        ask = world.origin.stat

        async def held_back(key: str) -> ObjectInfo:
            await asyncio.sleep(0.02)
            return await ask(key)

        world.origin.list = listing  # type: ignore[method-assign]
        world.origin.stat = held_back  # type: ignore[method-assign]
        page = asyncio.create_task(world.engine.metadata.page(world.bucket, "", None, 10))
        await began.wait()
        asking = [
            asyncio.create_task(world.engine.locate(world.bucket, "k", is_refreshing=True)),
            asyncio.create_task(world.engine.locate(world.bucket, "k", begins=True)),
        ]
        known = await asking[1]
        go_on.set()
        await page
        await asking[0]
        assert (await world.engine.locate(world.bucket, "k")).version == known.version

    run(World(tmp_path), story)


def test_beginnings_are_bounded_while_the_origin_thinks(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        names = [f"n{n}" for n in range(400)]
        for name in names:
            world.memory.put(name, name.encode())
        opened, go_on = [], asyncio.Event()

        async def slow_open(key: str, stop: int) -> Opened:
            opened.append(key)
            await go_on.wait()
            return await world.memory.open(key, stop)

        world.origin.open = slow_open  # type: ignore[method-assign]
        reading = [asyncio.create_task(world.read(name, begins=True)) for name in names]
        while len(opened) < 128:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(opened) == 128
        go_on.set()
        assert await asyncio.gather(*reading) == [name.encode() for name in names]

    run(World(tmp_path, 10_000_000), story)


def test_a_page_that_many_ask_for_at_once_is_listed_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(5):
            world.memory.put(f"n{number}", b"x")
        listing, asked, go_on = world.memory.list, [], asyncio.Event()

        async def slow(prefix: str, after: str | None = None, limit: int = 1000):
            asked.append((prefix, after, limit))
            await go_on.wait()
            async for page in listing(prefix, after, limit):
                yield page

        world.origin.list = slow  # type: ignore[method-assign]
        pages = [
            asyncio.create_task(world.engine.metadata.page(world.bucket, "", None, limit))
            for limit in (3, 3, 3, 2)
        ]
        while len(asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert sorted(asked) == [("", None, 2), ("", None, 3)]
        await world.engine.metadata.refresh(world.bucket, "")
        later = asyncio.create_task(world.engine.metadata.page(world.bucket, "", None, 3))
        while len(asked) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(asked) == 3, "what was asked before a refresh is no answer after it"
        go_on.set()
        found = await asyncio.gather(*pages, later)
        assert [len(page.objects) for page in found] == [3, 3, 3, 2, 3]
        assert found[0] == found[4]

    run(World(tmp_path), story)
