"""What members of a fleet have still to be told, while they are being told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stoker.cache.server.dues import Dues
from stoker.cache.server.peers import Peers
from stoker.errors import CacheUnavailable
from stoker.wire.cache_api import Refreshed


class Waiting(Peers):
    """Each question waits for its answer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: list[asyncio.Future[Refreshed]] = []

    async def refresh(self, url: str, bucket: str, prefix: str, hops: int) -> Refreshed:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


class World:
    def __init__(self) -> None:
        self.peers = Waiting()
        self.lost: list[str] = []
        self.dues = Dues(self.peers, lambda name, error: self.lost.append(name))

    async def owe(self, prefix: str = "") -> tuple[int, asyncio.Task[None]]:
        """Have a member told; returns while it is asked."""
        number = self.dues.owe(["y"], "b", prefix)
        task = asyncio.ensure_future(self.dues.pay("y", "http://y:1"))
        await asyncio.sleep(0)
        return number, task


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test(World())

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_who_answers_has_heard_of_nothing_that_came_after_the_question() -> None:
    async def test(world: World) -> None:
        number, first = await world.owe()
        later, second = await world.owe()
        world.peers.asked[0].set_result(Refreshed(1))
        await first
        assert world.dues.missed("b", "", number) == [], "it has heard of this one"
        assert world.dues.missed("b", "", later) == ["y"]
        world.peers.asked[1].set_exception(CacheUnavailable("gone"))
        await second
        assert world.lost == ["y"]
        assert world.dues.names == ["y"]
        last = asyncio.ensure_future(world.dues.pay("y", "http://y:1"))
        await asyncio.sleep(0)
        world.peers.asked[2].set_result(Refreshed(1))
        await last
        assert world.dues.names == []

    run(test)


def test_a_later_answer_stands_for_an_earlier_question() -> None:
    async def test(world: World) -> None:
        number, first = await world.owe()
        later, second = await world.owe()
        world.peers.asked[1].set_result(Refreshed(1))
        await second
        assert world.dues.names == []
        world.peers.asked[0].set_exception(CacheUnavailable("gone"))
        await first
        assert world.dues.missed("b", "", number) == world.dues.missed("b", "", later) == []

    run(test)


def test_what_was_told_is_kept_no_longer() -> None:
    async def test(world: World) -> None:
        world.dues.owe(["y"], "b", "")
        world.dues.begin("y", "http://y:1")
        world.dues.begin("y", "http://y:1")
        await asyncio.sleep(0)
        (question,) = world.peers.asked
        assert list(world.dues._paying) == ["y"]
        (task,) = world.dues._paying.values()
        question.set_result(Refreshed(1))
        await task
        await asyncio.sleep(0)
        assert world.dues.names == []
        assert not world.dues._paying
        await world.dues.close()

    run(test)
