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
from stoker.cache.server import attending, dues, vetting
from stoker.cache.server.buckets import mark_of
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.peers import PeerRefused, Peers
from stoker.errors import CacheUnavailable, ConfigError, EnvironmentProblem, StokerError
from stoker.wire.cache_api import (
    BucketSpec,
    FleetMember,
    FleetStatus,
    Refreshed,
)
from stoker.wire.cache_errors import ErrorBody
from tests.unit.cache_fake import faked

ME = FleetMember("x", "http://x:1")


class Members:
    """A membership that says what a test puts in; an exception is raised."""

    confirmed_until = float("inf")
    lag_s = 0.0

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
        self.told: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def refresh(self, url: str, bucket: str, prefix: str, hops: int) -> Refreshed:
        await self.may_go_on.wait()
        if isinstance(said := self.odd.get(url), StokerError):
            raise said
        self.told.append(url)
        return Refreshed(0)

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
    async with asyncio.timeout(60):
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


def test_who_does_not_answer_at_all_keeps_no_server_from_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "CLAIM_S", 0.1)

    class Silent(Answering):
        async def fleet(self, url: str) -> FleetStatus:
            if url.startswith("http://old"):
                await asyncio.Event().wait()
            return await super().fleet(url)

    async def story() -> None:
        old = [replace(ME, url=f"http://old{n}:1") for n in range(6)]
        fleet = fleet_of(Members([*old, member("y")]), Silent())
        await fleet.start()
        assert names(fleet) == {"x", "y"}
        assert fleet.notes == []
        await fleet.leave()
        # One that does answer, after others that do not.
        peers = Answering()
        peers.odd |= {one.url: CacheUnavailable("away") for one in old[:5]}
        peers.odd[old[5].url] = FleetStatus("x", [], [], instance="another")
        with pytest.raises(ConfigError, match="another server named 'x' at http://old5:1"):
            await fleet_of(Members([*old, member("y")]), peers).start()

    run(story)


def test_two_servers_that_say_the_same_name_and_url_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        left = replace(ME, instance="of the start before")
        members = Members([left])
        fleet = fleet_of(members)
        await fleet.start()
        members.said.put_nowait([fleet.me, member("y")])
        await until(lambda: names(fleet) == {"x", "y"})
        assert fleet.notes == []
        members.said.put_nowait([replace(left, weight=0)])
        await until(lambda: names(fleet) == {"x"})
        assert fleet.notes == []
        for _ in range(2):
            members.said.put_nowait([left])
        members.said.put_nowait([fleet.me, member("y")])
        await until(lambda: names(fleet) == {"x", "y"})
        assert ["'x' at http://x:1, as this one does" in note for note in fleet.notes] == [True]
        assert caplog.text.count("as this one does") == 1
        assert len(members.announced) == 1, "they would tell it in turn for ever"
        await fleet.leave()

    run(story)


def test_a_folder_tells_of_another_server_that_writes_the_same_file(tmp_path: Path) -> None:
    """Even where each reads it only after it has written it itself."""

    async def story() -> None:
        one, other = FolderMembership(tmp_path, beat_s=0.2), FolderMembership(tmp_path, beat_s=99.0)
        steps = [(other,), (one, other), (one,), (other, one)]
        async with aclosing(one.members()) as seen:
            for writers, last in zip(steps, ("other", "other", "one", "other"), strict=True):
                for writer in writers:
                    await writer.announce(replace(ME, instance="one" if writer is one else "other"))
                async with asyncio.timeout(60):
                    assert [found.instance for found in await anext(seen)] == [last]
        await one.leave()
        await other.leave()

    run(story)


def test_a_refresh_misses_members_that_are_away_and_none_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dues, "GONE_MAX", 1)

    async def story() -> None:
        peers, members = Answering(), Members([member("y"), member("z")])
        fleet = fleet_of(members, peers)
        await fleet.start()
        peers.odd["http://y:1"] = CacheUnavailable("away")
        assert await fleet.refresh_all("b", "") == ["y"]
        members.said.put_nowait([fleet.me, member("z")])
        await until(lambda: names(fleet) == {"x", "z"})
        assert await fleet.refresh_all("b", "") == []
        assert fleet.dues.names == ["y"]
        del peers.odd["http://y:1"]
        members.said.put_nowait([fleet.me, member("y")])
        await until(lambda: "http://y:1" in peers.told)
        assert fleet.dues.names == []
        await fleet.refresh_all("b", "")  # z is gone
        assert fleet.dues.names == ["z"]
        members.said.put_nowait([fleet.me])  # and y: more than are remembered
        await until(lambda: names(fleet) == {"x"})
        assert fleet.dues.names == []
        await fleet.leave()

    run(story)


def test_one_who_takes_nothing_over_keeps_no_other_from_coming_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "MEETING_S", 0.05)

    async def story() -> None:
        peers, members = Answering(), Members([member("y"), member("z")])
        fleet = fleet_of(members, peers)
        met: list[str] = []

        async def meet(member: FleetMember, said: FleetStatus) -> None:
            met.append(member.name)
            if member.name == "y":
                await asyncio.Event().wait()

        fleet.vetting.on_meeting = meet
        await fleet.start()
        await until(lambda: names(fleet) == {"x", "y", "z"})
        peers.may_go_on.clear()
        refreshing = asyncio.ensure_future(fleet.refresh_all("b", ""))  # y and z owe an answer
        for _ in range(2):
            fleet.lost("z", CacheUnavailable("away"))
            await until(lambda: fleet.status().down == [])
        assert met == ["y", "z", "z", "z"]
        peers.may_go_on.set()
        assert await refreshing == []
        await fleet.leave()

    run(story)


def test_the_same_bucket_at_another_s3_server_is_another_origin() -> None:
    marks = {
        mark_of(BucketSpec(f"s3://b/p?{query}"), "s3://b/p")
        for query in ("endpoint=http://one:1", "endpoint=http://two:1", "region=x", "secret_access_key=1")
    }
    assert len(marks) == 3, "keys and regions tell nothing apart"


def test_who_joins_after_a_write_is_to_ask_again() -> None:
    """It may have asked before the write, when it was a member for nobody yet that could have told it."""

    async def story() -> None:
        members, peers = Members([member("y")]), Answering()
        fleet = fleet_of(members, peers)
        await fleet.start()
        await until(lambda: names(fleet) == {"x", "y"})
        assert peers.told == []
        await fleet.refresh_all("b", "k")
        assert peers.told == ["http://y:1"]
        members.said.put_nowait([ME, member("y"), member("z")])
        await until(lambda: peers.told == ["http://y:1", "http://z:1"])
        await fleet.leave()

    run(story)
