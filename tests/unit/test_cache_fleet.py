"""A server's part in its fleet: what it makes of odd members, of odd answers, and of what it cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.fleet.folder import FolderMembership
from stoker.cache.server import attending
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.peers import PeerRefused, Peers
from stoker.errors import CacheUnavailable, ConfigError, EnvironmentProblem, StokerError
from stoker.wire.cache_api import ErrorBody, FleetMember, FleetStatus
from tests.unit.cache_fake import faked

ME = FleetMember("x", "http://x:1")


class Members:
    """A membership that says what a test puts in; an exception is raised."""

    def __init__(self, *said: Sequence[FleetMember] | Exception) -> None:
        self.said: asyncio.Queue[Sequence[FleetMember] | Exception] = asyncio.Queue()
        for one in said:
            self.said.put_nowait(one)
        self.announced: list[FleetMember] = []
        self.refusals = 0

    @property
    def problem(self) -> str | None:
        return None

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        while True:
            said = await self.said.get()
            if isinstance(said, Exception):
                raise said
            yield said

    async def announce(self, me: FleetMember) -> None:
        self.announced.append(me)
        if self.refusals:
            self.refusals -= 1
            raise EnvironmentProblem("not now")

    async def leave(self) -> None:
        pass


class Answering(Peers):
    """All answer who they are, but those of `odd`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.odd: dict[str, FleetStatus | StokerError] = {}

    async def fleet(self, url: str) -> FleetStatus:
        said = self.odd.get(url)
        if isinstance(said, StokerError):
            raise said
        return said or FleetStatus(url.removeprefix("http://").removesuffix(":1"), [], [], instance=url)


def member(name: str) -> FleetMember:
    return FleetMember(name, f"http://{name}:1")


def fleet_of(members: Members, peers: Peers | None = None) -> Fleet:
    return Fleet(ME, members, peers or Answering(), SystemClock(), Rng(1))


@asynccontextmanager
async def asking() -> AsyncGenerator[Peers, None]:
    """Peers whose connections are closed at the end."""
    peers = Peers(None)
    try:
        yield peers
    finally:
        await peers.close()
        await asyncio.sleep(0.01)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  it is told by nobody
            await asyncio.sleep(0.01)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    asyncio.run(main())


def names(fleet: Fleet) -> set[str]:
    return {one.name for one in fleet.status().members}


def test_what_is_no_text_is_no_member_and_hides_no_other(tmp_path: Path) -> None:
    good = {"member": {"name": "y", "url": "http://y:1"}, "beat": 1}
    (tmp_path / "a.member").write_bytes(b'{"member":{"name":"\xff","url":"http://a:1"},"beat":1}')
    (tmp_path / "y.member").write_bytes(msgspec.json.encode(good))

    async def story() -> None:
        async with aclosing(FolderMembership(tmp_path).members()) as seen:
            assert await anext(seen) == [member("y")]

    run(story)


@pytest.mark.parametrize("url", ["http://a..b:80", f"http://{'a' * 70}.x:80", "http://a\x00b:80"])
def test_a_url_that_cannot_be_is_one_that_does_not_answer(url: str) -> None:
    async def story() -> None:
        with pytest.raises(CacheUnavailable):
            await Peers(None).fleet(url)

    run(story)


def test_a_member_whose_answer_is_no_text_cannot_be_used() -> None:
    async def story() -> None:
        with faked(GET_fleet=msgspec.Raw(b"\x81\xa4name\xa1\xff")) as server:
            async with asking() as peers:
                with pytest.raises(StokerError, match="is not understood"):
                    await peers.fleet(server.url)

    run(story)


def test_something_unforeseen_ends_neither_joining_nor_watching() -> None:
    async def story() -> None:
        members = Members(RuntimeError("a defect"), [member("y")], RuntimeError("another"))
        fleet = fleet_of(members)
        failures: list[BaseException] = []
        fleet.on_failure = failures.append
        await fleet.start()
        await until(lambda: names(fleet) == {"x", "y"} and members.said.empty())
        await until(lambda: any("cannot be used: another" in note for note in fleet.notes))
        members.said.put_nowait([ME, member("y"), member("z")])
        await until(lambda: names(fleet) == {"x", "y", "z"})
        assert fleet.notes == []
        assert failures == []
        await fleet.leave()

    run(story)


def test_a_server_whose_disk_refuses_is_not_away() -> None:
    async def story() -> None:
        no_disk, leaving = ErrorBody("environment", "cannot write"), ErrorBody("unavailable", "it leaves")
        with faked(GET_fleet=no_disk, GET_summary=leaving) as server:
            async with asking() as peers:
                with pytest.raises(EnvironmentProblem, match="cannot write"):
                    await peers.fleet(server.url)
                with pytest.raises(CacheUnavailable, match="is leaving, or has no room"):
                    await peers.summary(server.url)

    run(story)


def test_a_server_that_its_membership_has_lost_tells_of_itself_until_it_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attending, "RETRY_FIRST_S", 0.01)

    async def story() -> None:
        members = Members([])
        fleet = fleet_of(members)
        await fleet.start()
        assert len(members.announced) == 1
        members.refusals = 3
        members.said.put_nowait([member("y")])
        await until(lambda: len(members.announced) == 5)
        assert names(fleet) == {"x", "y"}
        await fleet.leave()

    run(story)


def test_who_has_started_anew_is_asked_anew_who_it_is() -> None:
    async def story() -> None:
        members = Members([member("y")])
        fleet = fleet_of(members)
        met: list[str] = []

        async def meet(member: FleetMember, said: FleetStatus) -> None:
            met.append(member.instance)

        fleet.vetting.on_meeting = meet
        await fleet.start()
        assert members.announced[0].instance == fleet.vetting.instance
        for instance in ("first", "first", "second"):
            members.said.put_nowait([fleet.me, replace(member("y"), instance=instance)])
        members.said.put_nowait([fleet.me])
        await until(lambda: names(fleet) == {"x"})
        assert met == ["", "first", "second"]
        await fleet.leave()

    run(story)


def test_who_answers_at_the_old_url_and_knows_no_token_does_not_keep_a_server_from_coming_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attending, "CLAIM_S", 1.0)
    old = replace(ME, url="http://old:1")

    async def story() -> None:
        peers = Answering()
        peers.odd[old.url] = PeerRefused("it refuses our token")
        members = Members([old, member("y")], [member("y")])
        fleet = fleet_of(members, peers)
        await fleet.start()
        assert names(fleet) == {"x", "y"}
        await fleet.leave()
        with pytest.raises(ConfigError, match="another server named 'x' at http://old:1"):
            await fleet_of(Members([old, member("y")]), peers).start()

    run(story)
