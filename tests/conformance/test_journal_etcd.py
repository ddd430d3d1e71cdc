"""The journal in etcd: the suite, and what only etcd can meet. Every test talks to real etcd processes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.cli.main import main
from stoker.errors import JournalDamaged, JournalUnavailable, LeadershipLost
from stoker.job.journal import etcd_layout
from stoker.job.journal.durable import Entry, Journal
from stoker.job.journal.etcd import EtcdJournal
from stoker.job.journal.etcd_layout import Keys
from stoker.job.journal.open import open_journal
from stoker.testing.job_journal import DurableJournalConformance, check_batches, entry
from stoker.wire.etcd import EtcdClient
from tests.conformance.journal_cable import Cable
from tests.conformance.journal_helpers import check_killed_writers
from tests.e2e.etcd import Etcd, Member, request, running_etcd

pytestmark = pytest.mark.real

_numbers = itertools.count()
T = Any


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One member, for all tests that do it no harm."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def new_job() -> str:
    return f"job-{next(_numbers)}"


def keys_below(member: Member, prefix: bytes) -> list[bytes]:
    """The keys in etcd, seen by other means than the journal's."""
    end = etcd_layout.end_of(prefix)
    body = {"key": b64(prefix), "range_end": b64(end), "keys_only": True, "limit": 0}
    return [base64.b64decode(kv["key"]) for kv in request(member.endpoint, "kv/range", body).get("kvs", [])]


def put(member: Member, key: bytes, value: bytes) -> None:
    request(member.endpoint, "kv/put", {"key": b64(key), "value": b64(value)})


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class TestEtcd(DurableJournalConformance):
    @pytest.fixture(autouse=True)
    def job(self, etcd: Etcd) -> None:
        self.url, self.name = etcd.url, new_job()

    def open_journal(self) -> Journal:
        return open_journal(self.url, self.name)


NAMES = st.sampled_from(["a", "b", "c/d", ""]) | st.text(max_size=5)
CHANGES = st.dictionaries(NAMES, st.none() | st.binary(max_size=50), max_size=5)
ENTRIES = st.lists(st.builds(Entry, st.floats(0, 1e9), st.text(max_size=3), st.text(max_size=9), st.just({})))


@given(batches=st.lists(st.tuples(CHANGES, ENTRIES), max_size=6))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_against_a_dictionary(etcd: Etcd, batches: list[tuple[dict[str, bytes | None], list[Entry]]]) -> None:
    async def test() -> None:
        journal = open_journal(etcd.url, new_job())
        try:
            await journal.lead("127.0.0.1:1")
            await check_batches(journal, batches)
        finally:
            await journal.close()

    asyncio.run(test())


def test_a_killed_writer_leaves_whole_batches(etcd: Etcd) -> None:
    job = new_job()
    shapes = [(3, 100, 30), (300, 100, 4), (3, 900_000, 3), (300, 5000, 2), (2, 10, 100)]
    check_killed_writers(etcd.url, job, lambda: open_journal(etcd.url, job), shapes, Rng(3))


def test_jobs_and_prefixes_are_apart(etcd: Etcd) -> None:
    async def test() -> None:
        places = [
            (f"{etcd.url}{prefix}", job) for prefix in ("", "/other/place") for job in ("x", "x.y", "xy")
        ]
        for number, (url, job) in enumerate(places):
            journal = open_journal(url, job)
            await journal.lead("127.0.0.1:1")
            await journal.write({"r": b"%d" % number}, [entry(number)])
            await journal.close()
        for number, (url, job) in enumerate(places):
            journal = open_journal(url, job)
            assert await journal.load() == {"r": b"%d" % number}
            assert [e["number"] for e in await journal.read_entries()] == [number]
            await journal.close()

    asyncio.run(test())
    assert b"/stoker/jobs/x.y/journal/head" in keys_below(etcd.members[0], b"/stoker/")


def test_only_a_leader_writes(etcd: Etcd) -> None:
    async def test() -> None:
        journal = open_journal(etcd.url, new_job())
        with pytest.raises(LeadershipLost):
            await journal.write({"a": b"1"})
        assert await journal.load() == {}
        await journal.lead("127.0.0.1:1")
        await journal.write({"a": b"1"})
        await journal.close()
        with pytest.raises(LeadershipLost):
            await journal.write({"a": b"2"})
        await journal.close()

    asyncio.run(test())


# -- a death between two transactions of one batch ------------------------------------------------------------


class DyingClient(EtcdClient):
    """Real requests to a real etcd, until the process "dies": before or after the transaction of that number."""

    def __init__(self, endpoint: str, dies_at: int, *, done: bool) -> None:
        super().__init__([endpoint])
        self.left, self.done, self.transactions = dies_at, done, 0

    async def call(self, path: str, request: Any, answer: type[Any], **how: Any) -> Any:
        if path != "kv/txn":
            return await super().call(path, request, answer, **how)
        self.transactions += 1
        self.left -= 1
        if self.left == 0 and not self.done:
            raise asyncio.CancelledError
        result = await super().call(path, request, answer, **how)
        if self.left == 0:
            raise asyncio.CancelledError
        return result


OLD: dict[str, bytes | None] = {"r0": b"old", "r1": b"x" * 500_000, "r2": b"gone soon"}
NEW: dict[str, bytes | None] = dict.fromkeys(("r2",))
NEW |= {f"r{i}": b"new %d" % i for i in range(3, 260)} | {"r0": b"new", "r1": b"new", "big": b"y" * 1_200_000}


async def die_in_a_batch(endpoint: str, job: str, dies_at: int, *, done: bool) -> bool:
    """Write OLD, then die within NEW; whether the whole of NEW was written without dying."""
    client = DyingClient(endpoint, 0, done=done)
    journal = EtcdJournal(client, Keys("/stoker", job))
    try:
        await journal.lead("127.0.0.1:1", ttl_s=30.0)
        await journal.write(OLD, [entry(0)])
        client.left = dies_at
        await journal.write(NEW, [entry(1 + i) for i in range(150)])
        return True
    except asyncio.CancelledError:
        return False
    finally:
        client.left = 0
        await journal.close()


@pytest.mark.parametrize("done", [False, True])
def test_a_death_between_any_two_transactions_leaves_all_or_nothing(etcd: Etcd, done: bool) -> None:
    expected_new = {**OLD, **NEW}
    del expected_new["r2"]
    endpoint = etcd.members[0].endpoint
    seen = []

    async def one(dies_at: int) -> bool:
        job = new_job()
        finished = await die_in_a_batch(endpoint, job, dies_at, done=done)
        looker = open_journal(etcd.url, job)
        records, entries = await looker.load(), await looker.read_entries()
        is_new = records == expected_new
        assert is_new or records == OLD
        assert [e["number"] for e in entries] == list(range(151 if is_new else 1))
        await looker.close()
        successor = open_journal(etcd.url, job)
        await successor.lead("127.0.0.1:2")
        assert await successor.load() == records
        await successor.write({"r1": b"small now", "big": None}, [entry(500)])
        assert await successor.load() == {n: v for n, v in records.items() if n != "big"} | {
            "r1": b"small now"
        }
        assert [e["seq"] for e in await successor.read_entries()] == list(range(1, len(entries) + 2))
        await successor.close()
        assert keys_below(etcd.members[0], Keys("/stoker", job).pieces) == []
        seen.append(is_new)
        return finished

    dies_at = 1
    while not asyncio.run(one(dies_at)):
        dies_at += 1
    assert dies_at > 6
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


# -- lost and late messages ----------------------------------------------------------------------------------


def cabled(cable: Cable, job: str, **how: Any) -> EtcdJournal:
    """A journal whose only endpoint is at the other end of the cable."""
    return EtcdJournal(EtcdClient([cable.endpoint], timeout_s=2.0), Keys("/stoker", job), **how)


def test_a_lost_answer_doubles_nothing(etcd: Etcd) -> None:
    async def test() -> None:
        async with Cable(etcd.members[0].endpoint) as cable:
            journal = cabled(cable, new_job(), write_timeout_s=30.0)
            await journal.lead("127.0.0.1:1", ttl_s=60.0)
            await journal.write({"a": b"0"}, [entry(0)])
            cable.mode = "deaf"
            healing = asyncio.get_running_loop().call_later(0.5, setattr, cable, "mode", "")
            await journal.write({"a": b"1"}, [entry(1)])
            healing.cancel()
            await journal.write({"b": b"2"}, [entry(2)])
            assert await journal.load() == {"a": b"1", "b": b"2"}
            assert [e["number"] for e in await journal.read_entries()] == [0, 1, 2]
            await journal.close()

    asyncio.run(test())


def test_a_batch_given_up_for_lost_is_written_again_with_more(etcd: Etcd) -> None:
    async def test() -> None:
        async with Cable(etcd.members[0].endpoint) as cable:
            journal = cabled(cable, new_job(), write_timeout_s=5.0)
            await journal.lead("127.0.0.1:1", ttl_s=60.0)
            await journal.write({"a": b"0"}, [entry(0)])
            cable.mode = "deaf"
            with pytest.raises(JournalUnavailable):
                await journal.write({"a": b"1"}, [entry(1)])
            cable.mode = ""
            await journal.write({"a": b"1", "b": b"2"}, [entry(1), entry(2)])
            assert await journal.load() == {"a": b"1", "b": b"2"}
            assert [e["number"] for e in await journal.read_entries()] == [0, 1, 2]
            await journal.close()

    asyncio.run(test())


def test_a_late_request_changes_nothing(etcd: Etcd) -> None:
    """1. a write is held up on its way; 2. the same leader writes anew; 3. the first one arrives."""

    async def test() -> None:
        async with Cable(etcd.members[0].endpoint) as cable:
            journal = cabled(cable, new_job(), write_timeout_s=5.0)
            await journal.lead("127.0.0.1:1", ttl_s=60.0)
            await journal.write({"a": b"0"}, [entry(0)])
            cable.mode = "hold"
            with pytest.raises(JournalUnavailable):
                await journal.write({"a": b"old"}, [entry(1)])
            cable.mode = ""
            await journal.write({"a": b"new"}, [entry(2)])
            await cable.release()
            await asyncio.sleep(0.2)
            assert await journal.load() == {"a": b"new"}
            assert [e["number"] for e in await journal.read_entries()] == [0, 2]
            await journal.write({"a": b"newer"}, [entry(3)])
            assert [e["number"] for e in await journal.read_entries()] == [0, 2, 3]
            await journal.close()

    asyncio.run(test())


# -- etcd itself fails ---------------------------------------------------------------------------------------


def test_events_of_a_job_that_is_over_are_read_from_its_journal(
    etcd: Etcd, capsys: pytest.CaptureFixture[str]
) -> None:
    name = new_job()

    async def job() -> None:
        journal = open_journal(etcd.url, name)
        await journal.lead("127.0.0.1:1")
        await journal.write({"state": b"x"}, [entry(0), entry(1)])
        await journal.close()

    asyncio.run(job())
    assert main(["job", "events", name, "--journal", etcd.url, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["details"]["number"] for event in events] == [0, 1]
    assert main(["job", "events", "another", "--journal", etcd.url]) == 2
    assert "holds no events of a job 'another'" in capsys.readouterr().err
    assert main(["job", "events", name, "--journal", "etcd://127.0.0.1:1", "--timeout", "1s"]) != 0
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert main(["job", "events", name, "--journal", etcd.url, "--follow"]) == 2


async def write_numbers(journal: Journal, kept: list[int], count: int) -> None:
    """Write the next numbers; JournalUnavailable passes through."""
    for _ in range(count):
        number = len(kept)
        await journal.write({"n": b"%d" % number, f"n{number % 5}": b"x"}, [entry(number)])
        kept.append(number)


async def check_numbers(journal: Journal, kept: list[int]) -> None:
    assert (await journal.load())["n"] == b"%d" % kept[-1]
    assert [e["number"] for e in await journal.read_entries()] == kept


def test_etcd_is_killed_and_comes_back_with_its_data(tmp_path: Path) -> None:
    async def test(etcd: Etcd) -> None:
        (member,) = etcd.members
        journal = EtcdJournal(
            EtcdClient([member.endpoint], timeout_s=4.0), Keys("/stoker", "j"), write_timeout_s=4.0
        )
        leadership = await journal.lead("127.0.0.1:1", ttl_s=60.0)
        kept: list[int] = []
        for _ in range(3):
            await write_numbers(journal, kept, 20)
            member.send(signal.SIGKILL)
            with pytest.raises(JournalUnavailable, match="majority"):
                await write_numbers(journal, kept, 1)
            with pytest.raises(JournalUnavailable):
                await journal.read_entries()
            member.start()
            await asyncio.to_thread(etcd.wait_healthy)
            await write_numbers(journal, kept, 20)
            await check_numbers(journal, kept)
        assert leadership.lost is None
        await journal.close()

    with running_etcd(tmp_path) as etcd:
        asyncio.run(test(etcd))


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["leader", "the member in use"])
def test_a_cluster_that_loses_a_member_goes_on(tmp_path: Path, harm: signal.Signals, whom: str) -> None:
    async def test(etcd: Etcd) -> None:
        first = await asyncio.to_thread(etcd.leader) if whom == "leader" else etcd.members[0]
        order = [first, *(m for m in etcd.members if m is not first)]
        journal = EtcdJournal(EtcdClient([m.endpoint for m in order]), Keys("/stoker", "j"))
        leadership = await journal.lead("127.0.0.1:1", ttl_s=30.0)
        kept: list[int] = []
        await write_numbers(journal, kept, 20)
        writing = asyncio.create_task(write_numbers(journal, kept, 400))
        await asyncio.sleep(0.05)
        first.send(harm)
        await writing
        await check_numbers(journal, kept)
        assert leadership.lost is None
        await journal.close()

    with running_etcd(tmp_path, members=3) as etcd:
        asyncio.run(test(etcd))


def test_a_cluster_without_quorum_is_unavailable_and_then_goes_on(tmp_path: Path) -> None:
    async def test(etcd: Etcd) -> None:
        client = EtcdClient([m.endpoint for m in etcd.members])
        journal = EtcdJournal(client, Keys("/stoker", "j"), write_timeout_s=5.0)
        leadership = await journal.lead("127.0.0.1:1", ttl_s=60.0)
        kept: list[int] = []
        await write_numbers(journal, kept, 20)
        for member in etcd.members[:2]:
            member.send(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(JournalUnavailable):
                await write_numbers(journal, kept, 1)
        etcd.members[0].start()
        async with asyncio.timeout(60):
            while True:
                try:
                    await write_numbers(journal, kept, 20)
                    break
                except JournalUnavailable:
                    continue
        await check_numbers(journal, kept)
        assert leadership.lost is None
        await journal.close()

    with running_etcd(tmp_path, members=3) as etcd:
        asyncio.run(test(etcd))


# -- etcd stays small ----------------------------------------------------------------------------------------


def test_the_event_log_keeps_the_newest_entries(etcd: Etcd) -> None:
    count = etcd_layout.KEPT_ENTRIES + 3 * etcd_layout.TRIM_SLACK
    job = new_job()

    async def test() -> None:
        journal = open_journal(etcd.url, job)
        await journal.lead("127.0.0.1:1")
        for start in range(0, count, 700):
            await journal.write({}, [entry(n) for n in range(start, min(start + 700, count))])
        entries = await journal.read_entries()
        numbers = [e["number"] for e in entries]
        assert numbers == list(range(numbers[0], count))
        assert etcd_layout.KEPT_ENTRIES <= len(numbers) <= etcd_layout.KEPT_ENTRIES + etcd_layout.TRIM_SLACK
        assert [e["seq"] for e in entries] == [n + 1 for n in numbers]
        assert await journal.read_entries(after=5, limit=2) == entries[:2]
        assert len(keys_below(etcd.members[0], Keys("/stoker", job).entries)) == len(numbers)
        await journal.write({}, [entry(n) for n in range(count, 2 * count)])  # more at once than are kept
        assert len(await journal.read_entries()) == etcd_layout.KEPT_ENTRIES
        await journal.close()

    asyncio.run(test())


def test_a_huge_entry_keeps_its_beginning(etcd: Etcd) -> None:
    async def test() -> None:
        journal = open_journal(etcd.url, new_job())
        await journal.lead("127.0.0.1:1")
        await journal.write(
            {}, [Entry(1.0, "failed", "\0 because " * 99_999, {"traceback": "x" * 3_000_000})]
        )
        (found,) = await journal.read_entries()
        assert found["why"].startswith("\0 because \0 because ")
        assert found["left_out_bytes"] > 3_000_000
        await journal.close()

    asyncio.run(test())


# -- what somebody else put there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("journal/head", b"{", "damaged"),
        ("journal/head", b'{"next_seq":"x"}', "damaged"),
        ("journal/head", b'{"layout":2}', "newer Stoker"),
        ("journal/record/a", b"no mark", "damaged"),
        ("journal/record/a", b"", "damaged"),
        ("journal/record/a", b"#{}", "damaged"),
        ("journal/record/a", b'#{"id":"none","pieces":1,"size_bytes":5}', "damaged"),
        ("journal/record/\N{SNOWMAN}".encode()[:-1].decode("latin-1"), b"=x", "damaged"),
        ("journal/head", b'{"pending":{"id":"none","pieces":0,"size_bytes":0}}', "damaged"),
    ],
)
def test_foreign_content_is_refused(etcd: Etcd, key: str, value: bytes, says: str) -> None:
    job = new_job()
    put(etcd.members[0], f"/stoker/jobs/{job}/{key}".encode("latin-1"), value)

    async def test() -> None:
        journal = open_journal(etcd.url, job)
        await journal.lead("127.0.0.1:1")
        with pytest.raises(JournalDamaged, match=says):
            await journal.load()
        with pytest.raises(JournalDamaged, match=says):
            await journal.write({"b": b"1"})
        await journal.close()

    asyncio.run(test())


def test_a_foreign_entry_is_refused(etcd: Etcd) -> None:
    job = new_job()

    async def test() -> None:
        journal = open_journal(etcd.url, job)
        await journal.lead("127.0.0.1:1")
        await journal.write({}, [entry(1), entry(2)])
        put(etcd.members[0], Keys("/stoker", job).entry(1), b"[1]")
        with pytest.raises(JournalDamaged, match="entry"):
            await journal.read_entries()
        assert [e["number"] for e in await journal.read_entries(after=1)] == [2]
        await journal.close()

    asyncio.run(test())
