"""An etcd that would fill up, and one that is full. Every test talks to real etcd processes."""

from __future__ import annotations

import asyncio
import base64
import logging
import urllib.error
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import JournalUnavailable
from stoker.job.journal import etcd_room
from stoker.job.journal.etcd import EtcdJournal
from stoker.job.journal.etcd_layout import Keys
from stoker.job.journal.open import open_journal
from stoker.testing.job_journal import entry
from stoker.wire.etcd import EtcdClient
from tests.e2e.etcd import Etcd, Member, request, running_etcd

pytestmark = pytest.mark.real

QUOTA_BYTES = 8 * 1024 * 1024
SMALL = ("--quota-backend-bytes", str(QUOTA_BYTES))
LARGE = b"x" * 300_000
LONG_S = 3600.0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Etcd]:
    """One member with little room."""
    with running_etcd(tmp_path, extra=SMALL) as running:
        yield running


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def put_until_full(member: Member, *, anew: bool) -> list[bytes]:
    """Write by other means than the journal's until etcd refuses; the keys. `anew`: each time the same one."""
    keys: list[bytes] = []
    with pytest.raises(urllib.error.HTTPError) as refused:  # noqa: PT012 - until it is full
        while True:
            keys.append(b"/other/%d" % (0 if anew else len(keys)))
            request(member.endpoint, "kv/put", {"key": b64(keys[-1]), "value": b64(LARGE)})
    assert b"space exceeded" in refused.value.read()
    return keys


def empty_by_hand(member: Member) -> None:
    """What the operator is told to do."""
    revision = request(member.endpoint, "kv/range", {"key": b64(b"x")})["header"]["revision"]
    request(member.endpoint, "kv/compaction", {"revision": revision, "physical": True})
    request(member.endpoint, "maintenance/defragment", {})
    for alarm in request(member.endpoint, "maintenance/alarm", {"action": "GET"})["alarms"]:
        request(member.endpoint, "maintenance/alarm", {"action": "DEACTIVATE", **alarm})


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def is_there(member: Member, key: bytes, revision: int) -> bool:
    """Whether etcd still knows the key as it was then."""
    try:
        request(member.endpoint, "kv/range", {"key": b64(key), "revision": revision})
    except urllib.error.HTTPError as error:
        if b"compacted" in error.read():
            return False
        raise
    return True


@pytest.mark.parametrize(
    ("compact_after_s", "revisions", "size_bytes", "is_kept"),
    [
        (None, 0, 0, True),
        (LONG_S, 1000, 1_000_000, True),
        (0.0, 1000, 1_000_000, False),
        (LONG_S, 3, 1_000_000, False),
        (LONG_S, 1000, 3000, False),
    ],
    ids=["never", "not yet", "by time", "by revisions", "by bytes"],
)
def test_old_revisions_are_forgotten(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compact_after_s: float | None,
    revisions: int,
    size_bytes: int,
    is_kept: bool,
) -> None:
    monkeypatch.setattr(etcd_room, "COMPACT_AFTER_REVISIONS", revisions)
    monkeypatch.setattr(etcd_room, "COMPACT_AFTER_BYTES", size_bytes)

    async def test(etcd: Etcd) -> None:
        (member,) = etcd.members
        client, keys = EtcdClient([member.endpoint]), Keys("/stoker", "j")
        journal = EtcdJournal(client, keys, compact_after_s=compact_after_s)
        await journal.lead("127.0.0.1:1", ttl_s=60.0)
        await journal.write({"a": b"0"})
        _, revision = await client.get(keys.head)
        for number in range(8):
            await journal.write({"a": b"%d" % number, "b": b"x" * 1000})
        assert is_there(member, keys.head, revision) == is_kept
        assert (await journal.load())["a"] == b"7"
        await journal.close()

    with running_etcd(tmp_path) as etcd:
        asyncio.run(test(etcd))


@pytest.mark.parametrize("members", [1, 3])
def test_an_etcd_that_filled_up_is_emptied_and_the_job_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, members: int
) -> None:
    count = 4 * QUOTA_BYTES // len(LARGE)

    async def test(etcd: Etcd) -> None:
        journal = open_journal(etcd.url, "j")
        leadership = await journal.lead("127.0.0.1:1", ttl_s=60.0)
        for number in range(count):
            await journal.write({"n": b"%d" % number, "large": LARGE}, [entry(number)])
        assert await journal.load() == {"n": b"%d" % (count - 1), "large": LARGE}
        assert [e["number"] for e in await journal.read_entries()] == list(range(count))
        assert leadership.lost is None
        await journal.close()

    with running_etcd(tmp_path, members=members, extra=SMALL) as etcd:
        asyncio.run(test(etcd))
    assert sum("takes writes again" in record.getMessage() for record in caplog.records) > 1
    assert errors(caplog) == []


def test_the_next_master_empties_an_etcd_that_is_full(small: Etcd) -> None:
    put_until_full(small.members[0], anew=True)

    async def test() -> None:
        journal = open_journal(small.url, "j")
        await asyncio.wait_for(journal.lead("127.0.0.1:1", ttl_s=60.0), 60.0)
        await journal.write({"a": b"1"})
        await journal.close()

    asyncio.run(test())


def test_where_something_else_compacts_the_operator_is_told_what_to_do(
    small: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        journal = open_journal(f"{small.url}?compact_s=off", "j")
        await journal.lead("127.0.0.1:1", ttl_s=60.0)
        kept = 0
        with pytest.raises(JournalUnavailable, match="alarm disarm"):  # noqa: PT012 - until it is full
            for number in range(1000):
                await journal.write({"n": b"%d" % number, "large": LARGE}, [entry(number)])
                kept = number
        assert kept > 3
        with pytest.raises(JournalUnavailable):
            await journal.write({"n": b"again"})
        empty_by_hand(small.members[0])
        await journal.write({"n": b"after"}, [entry(kept + 1)])
        assert (await journal.load())["n"] == b"after"
        assert [e["number"] for e in await journal.read_entries()] == list(range(kept + 2))
        await journal.close()

    asyncio.run(test())
    (said,) = errors(caplog)
    assert "nothing is compacted from here (compact_s=off)" in said
    assert "etcdctl alarm disarm" in said


class CountingClient(EtcdClient):
    """Real requests to a real etcd; counts those for one member alone."""

    def __init__(self, endpoint: str) -> None:
        super().__init__([endpoint])
        self.asked: Counter[str] = Counter()

    async def call_at(self, url: str, path: str, request: Any, answer: type[Any], **how: Any) -> Any:
        self.asked[path] += 1
        return await super().call_at(url, path, request, answer, **how)


@pytest.mark.parametrize("every_s", [0.0, LONG_S])
def test_an_etcd_full_of_what_is_in_use_is_the_operators(
    small: Etcd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(etcd_room, "MAKE_EVERY_S", every_s)
    (member,) = small.members

    async def test() -> None:
        client = CountingClient(member.endpoint)
        journal = EtcdJournal(client, Keys("/stoker", "j"))
        await journal.lead("127.0.0.1:1", ttl_s=60.0)
        keys = put_until_full(member, anew=False)
        with pytest.raises(JournalUnavailable, match="alarm disarm"):  # noqa: PT012 - what is left is filled
            for number in range(100):
                await journal.write({f"large {number}": LARGE})
        tried = client.asked["maintenance/defragment"]
        assert tried > 0
        for _ in range(3):
            with pytest.raises(JournalUnavailable, match="alarm disarm"):
                await journal.write({"large": LARGE})
        assert client.asked["maintenance/defragment"] == tried, "nothing more could be gained by it"
        for key in keys:
            request(member.endpoint, "kv/deleterange", {"key": b64(key)})
        empty_by_hand(member)
        await journal.write({"n": b"after"})
        assert (await journal.load())["n"] == b"after"
        await journal.close()

    asyncio.run(test())
    (said,) = errors(caplog)
    assert "removing old revisions was not enough" in said
    assert "etcdctl defrag --cluster" in said
    assert "takes writes again" in caplog.text
