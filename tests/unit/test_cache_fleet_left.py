"""A member that leaves while it is being asked something."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker.cache.server.peers import Block
from stoker.errors import CacheUnavailable
from stoker.wire.cache_api import HeldAnswer
from tests.unit.test_cache_fleet import Answering, Members, fleet_of, member, names, run, until


class Hanging(Answering):
    """Whoever is asked what it holds says nothing, and is given up when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_given_up = asyncio.Event()

    async def held(self, url: str, bucket: str, blocks: Sequence[Block]) -> HeldAnswer:
        await self.is_given_up.wait()
        raise CacheUnavailable(f"{url} is silent")


def test_who_has_left_before_it_is_given_up_is_no_trouble() -> None:
    async def story() -> None:
        members = Members([member("y"), member("z")])
        peers = Hanging()
        fleet = fleet_of(members, peers)
        await fleet.start()
        asked = asyncio.ensure_future(fleet.ask_all(lambda url: peers.held(url, "b", [])))
        await asyncio.sleep(0)
        members.said.put_nowait([member("y")])
        await until(lambda: names(fleet) == {"x", "y"})
        peers.is_given_up.set()
        assert await asked == ([], ["y", "z"])
        assert fleet.status().down == ["y"]
        assert [trouble.name for trouble in fleet.status().troubles] == ["y"]
        await fleet.leave()

    run(story)
