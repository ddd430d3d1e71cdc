"""Who is the master: campaigns, takeovers, resignations and the agents' view of them, against real etcd processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from stoker.errors import JournalDamaged, JournalUnavailable, LeadershipLost
from stoker.job.journal.etcd_layout import Keys
from stoker.job.journal.leadership import EtcdLeadership, EtcdLocator, Leader
from stoker.job.journal.open import open_journal, open_locator
from stoker.testing.job_journal import entry
from stoker.wire.etcd import EtcdClient
from tests.conformance.journal_cable import Cable
from tests.conformance.journal_helpers import writing
from tests.conformance.journal_writer import number_of
from tests.conformance.test_journal_etcd import b64, put
from tests.e2e.etcd import Etcd, request, running_etcd

pytestmark = pytest.mark.real

_numbers = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def new_job() -> str:
    return f"led-{next(_numbers)}"


@contextlib.asynccontextmanager
async def candidate(endpoint: str, job: str, *, ttl_s: float = 6.0) -> AsyncGenerator[EtcdLeadership, None]:
    """Leadership to campaign for; given up at the end."""
    client = EtcdClient([endpoint])
    leadership = EtcdLeadership(client, Keys("/stoker", job), ttl_s=ttl_s)
    try:
        yield leadership
    finally:
        await leadership.resign()
        await client.close()


def test_a_killed_master_is_followed(etcd: Etcd) -> None:
    job = new_job()

    async def test() -> None:
        with writing(etcd.url, job, ttl_s=6.0) as writer:
            await asyncio.to_thread(writer.wait_for_batches, 20)
            journal = open_journal(etcd.url, job)
            campaign = asyncio.create_task(journal.lead("127.0.0.1:2", ttl_s=6.0))
            await asyncio.sleep(8.0)
            assert not campaign.done()
            writer.process.send_signal(signal.SIGKILL)
            said = await asyncio.to_thread(writer.rest)
            async with asyncio.timeout(60):
                leadership = await campaign
            number = number_of(await journal.load())
            assert int(said[-1]) <= number <= int(said[-1]) + 1
            assert leadership.epoch > 0
            assert leadership.lost is None
            await journal.write({f"r{i}": b"-1 " for i in range(3)}, [entry(1)])
            assert number_of(await journal.load()) == -1
            await journal.close()

    asyncio.run(test())


def test_a_stopped_master_never_writes_again(etcd: Etcd) -> None:
    job = new_job()

    async def test() -> None:
        with writing(etcd.url, job) as writer:
            await asyncio.to_thread(writer.wait_for_batches, 20)
            journal = open_journal(etcd.url, job)
            campaign = asyncio.create_task(journal.lead("127.0.0.1:2", ttl_s=10.0))
            writer.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(60):
                await campaign
            number = number_of(await journal.load())
            entries = len(await journal.read_entries())
            await journal.write({"mine": b"-1"}, [entry(1)])
            writer.process.send_signal(signal.SIGCONT)
            said = await asyncio.to_thread(writer.rest)
            assert said[-1] == "lost"
            assert all(int(line) <= number for line in said[:-1])
            records = await journal.load()
            assert records.pop("mine") == b"-1"
            assert number_of(records) == number
            assert len(await journal.read_entries()) == entries + 1
            await journal.close()

    asyncio.run(test())


def test_who_resigns_is_followed_at_once(etcd: Etcd) -> None:
    """With a lease of ten minutes nobody would follow within the time if the lease had to run out, or if the
    successor only looked every half minute."""
    job = new_job()
    endpoint = etcd.members[0].endpoint

    async def test() -> None:
        async with candidate(endpoint, job, ttl_s=600.0) as one, candidate(endpoint, job, ttl_s=600.0) as two:
            await one.campaign("127.0.0.1:1")
            campaign = asyncio.create_task(two.campaign("127.0.0.1:2"))
            await asyncio.sleep(0.3)
            assert not campaign.done()
            await one.resign()
            async with asyncio.timeout(25):
                await campaign
            assert two.epoch > one.epoch
            assert two.lost is None
            assert one.lost is not None
            assert await one.wait_lost() == one.lost
            with pytest.raises(LeadershipLost):
                one.check()

    asyncio.run(test())


def test_a_candidate_that_gives_up_leaves_nothing(etcd: Etcd) -> None:
    job = new_job()
    endpoint = etcd.members[0].endpoint

    async def test() -> None:
        async with (
            candidate(endpoint, job, ttl_s=600.0) as one,
            candidate(endpoint, job, ttl_s=600.0) as two,
            candidate(endpoint, job, ttl_s=600.0) as three,
        ):
            await one.campaign("127.0.0.1:1")
            campaigns = [asyncio.create_task(c.campaign(f"127.0.0.1:{n}")) for n, c in ((2, two), (3, three))]
            await asyncio.sleep(0.2)
            campaigns[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await campaigns[0]
            await one.resign()
            async with asyncio.timeout(60):
                await campaigns[1]
            assert two.lost is not None
            assert three.lost is None

    asyncio.run(test())


def test_among_many_candidates_one_leads_at_a_time(etcd: Etcd) -> None:
    job = new_job()
    leading: set[int] = set()
    order: list[int] = []

    async def run(number: int) -> None:
        async with candidate(etcd.members[0].endpoint, job, ttl_s=30.0) as leadership:
            await leadership.campaign(f"127.0.0.1:{number}")
            assert not leading
            leading.add(number)
            order.append(leadership.epoch)
            await asyncio.sleep(0.05)
            leading.discard(number)

    async def test() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(run(number) for number in range(1, 9)))

    asyncio.run(test())
    assert order == sorted(set(order))
    assert len(order) == 8


@pytest.mark.parametrize("mode", ["cut", "deaf"])
def test_a_master_that_is_cut_off_stops_before_another_begins(etcd: Etcd, mode: str) -> None:
    job = new_job()
    story: list[str] = []

    async def lose(leadership: EtcdLeadership) -> None:
        why = await leadership.wait_lost()
        story.append("lost")
        assert "could not be renewed" in why

    async def win(leadership: EtcdLeadership) -> None:
        await leadership.campaign("127.0.0.1:2")
        story.append("won")

    async def test() -> None:
        endpoint = etcd.members[0].endpoint
        async with (
            Cable(endpoint) as cable,
            candidate(endpoint, job) as other,
            candidate(cable.endpoint, job) as cut_off,
        ):
            await cut_off.campaign("127.0.0.1:1")
            await asyncio.sleep(7.0)
            assert cut_off.lost is None
            cable.mode = mode
            async with asyncio.timeout(60):
                await asyncio.gather(lose(cut_off), win(other))
            with pytest.raises(LeadershipLost):
                cut_off.check()
            cable.mode = ""

    asyncio.run(test())
    assert story == ["lost", "won"]


def test_a_master_whose_key_is_deleted_knows_at_once(etcd: Etcd) -> None:
    job = new_job()

    async def test() -> None:
        journal = open_journal(etcd.url, job)
        leadership = await journal.lead("127.0.0.1:1", ttl_s=600.0)
        await journal.write({"a": b"1"})
        body = {"key": b64(Keys("/stoker", job).master)}
        await asyncio.to_thread(request, etcd.members[0].endpoint, "kv/deleterange", body)
        async with asyncio.timeout(60):
            assert "deleted" in await leadership.wait_lost()
        with pytest.raises(LeadershipLost):
            await journal.write({"a": b"2"})
        assert await journal.load() == {"a": b"1"}
        await journal.close()

    asyncio.run(test())


def test_a_master_may_campaign_again_after_a_loss(tmp_path: Path) -> None:
    async def test(etcd: Etcd) -> None:
        (member,) = etcd.members
        journal = open_journal(etcd.url, "j")
        first = await journal.lead("127.0.0.1:1", ttl_s=6.0)
        await journal.write({"a": b"1"}, [entry(0)])
        member.send(signal.SIGKILL)
        async with asyncio.timeout(60):
            await first.wait_lost()
        with pytest.raises(LeadershipLost):
            await journal.write({"a": b"2"})
        with pytest.raises(JournalUnavailable):
            await journal.lead("127.0.0.1:1", ttl_s=2.0)
        member.start()
        async with asyncio.timeout(60):
            second = await journal.lead("127.0.0.1:1", ttl_s=10.0)
        assert second.epoch > first.epoch
        assert await journal.load() == {"a": b"1"}
        await journal.write({"a": b"3"}, [entry(1)])
        assert [e["number"] for e in await journal.read_entries()] == [0, 1]
        await journal.close()

    with running_etcd(tmp_path) as etcd:
        asyncio.run(test(etcd))


def test_a_standby_outlives_an_outage_of_etcd(tmp_path: Path) -> None:
    async def test(etcd: Etcd) -> None:
        (member,) = etcd.members
        async with (
            candidate(member.endpoint, "j", ttl_s=600.0) as one,
            candidate(member.endpoint, "j") as two,
        ):
            await one.campaign("127.0.0.1:1")
            campaign = asyncio.create_task(two.campaign("127.0.0.1:2"))
            await asyncio.sleep(0.2)
            member.send(signal.SIGKILL)
            await asyncio.sleep(1.0)
            member.start()
            await asyncio.to_thread(etcd.wait_healthy)
            assert not campaign.done()
            await one.resign()
            async with asyncio.timeout(60):
                await campaign

    with running_etcd(tmp_path) as etcd:
        asyncio.run(test(etcd))


def test_locators_follow_the_master(etcd: Etcd) -> None:
    job = new_job()
    endpoint = etcd.members[0].endpoint

    async def test() -> None:
        locator = open_locator(etcd.url, job)
        locating = asyncio.create_task(locator.locate())
        await asyncio.sleep(0.3)
        assert not locating.done()
        async with contextlib.aclosing(locator.changes()) as changes, asyncio.timeout(60):
            assert await anext(changes) is None
            async with candidate(endpoint, job, ttl_s=600.0) as one:
                await one.campaign("10.0.0.1:29400")
                assert await locating == "10.0.0.1:29400"
                assert await anext(changes) == Leader("10.0.0.1:29400", one.epoch)
                assert await locator.locate() == "10.0.0.1:29400"
            async with candidate(endpoint, job, ttl_s=600.0) as two:
                await two.campaign("10.0.0.2:29400")
                seen = await anext(changes)
                if seen is None:
                    seen = await anext(changes)
                assert seen == Leader("10.0.0.2:29400", two.epoch)
            assert await anext(changes) is None
        await locator.close()

    asyncio.run(test())


def test_a_locator_outlives_a_member_that_falls_silent(tmp_path: Path) -> None:
    """The member that is watched is stopped: its connections stay open and say nothing."""

    async def test(etcd: Etcd) -> None:
        leader = await asyncio.to_thread(etcd.leader)
        silent = next(m for m in etcd.members if m is not leader)
        order = [silent.endpoint, *(m.endpoint for m in etcd.members if m is not silent)]
        client = EtcdClient(order)
        locator = EtcdLocator(client, Keys("/stoker", "j"))
        async with contextlib.aclosing(locator.changes()) as changes, candidate(order[1], "j") as one:
            assert await anext(changes) is None
            change = asyncio.create_task(anext(changes))
            await asyncio.sleep(0.3)
            silent.send(signal.SIGSTOP)
            await one.campaign("127.0.0.1:1")
            async with asyncio.timeout(60):
                assert await change == Leader("127.0.0.1:1", one.epoch)
        await locator.close()

    with running_etcd(tmp_path, members=3) as etcd:
        asyncio.run(test(etcd))


def test_a_locator_waits_for_etcd(tmp_path: Path) -> None:
    async def test(etcd: Etcd) -> None:
        (member,) = etcd.members
        async with candidate(member.endpoint, "j", ttl_s=600.0) as one:
            await one.campaign("127.0.0.1:1")
            member.send(signal.SIGKILL)
            locator = open_locator(etcd.url, "j")
            locating = asyncio.create_task(locator.locate())
            await asyncio.sleep(0.5)
            member.start()
            async with asyncio.timeout(60):
                assert await locating == "127.0.0.1:1"
            await locator.close()

    with running_etcd(tmp_path) as etcd:
        asyncio.run(test(etcd))


def test_a_key_that_names_no_endpoint_is_refused(etcd: Etcd) -> None:
    job = new_job()
    put(etcd.members[0], Keys("/stoker", job).master, b"\xff\xfe")

    async def test() -> None:
        locator = open_locator(etcd.url, job)
        with pytest.raises(JournalDamaged, match="delete it"):
            await locator.locate()
        await locator.close()

    asyncio.run(test())
