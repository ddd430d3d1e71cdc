"""What an announcer tells a cache that knows little, or forgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stoker.cache.client import orders
from stoker.cache.client.client import CacheClient
from stoker.data.announcer import Announcer
from stoker.data.coming_reads import ComingRecords
from stoker.data.formats.port import Reads
from stoker.data.loader_plan import Pass, Plan
from stoker.wire.cache_orders import Announced, Announcement

RECORDS = 500
PASS = Pass(1, RECORDS, 7, 0, True, 0, 16, 0, 1)


class Numbered:
    """Records that are objects of their own."""

    fingerprint = "numbered"

    def __len__(self) -> int:
        return RECORDS

    def read(self, numbers: Any) -> list[Any]:
        raise AssertionError("nothing is read")

    def reads(self, numbers: npt.NDArray[np.int64]) -> Reads:
        keys = [f"k{number}" for number in range(RECORDS)]
        return Reads(keys, numbers, np.zeros(len(numbers), np.int64), np.ones(len(numbers), np.int64))


class Cache:
    """As a server answers."""

    def __init__(self, reads_max: int = 10**9) -> None:
        self.reads_max = reads_max
        self.messages = 0
        self.plan, self.keys, self.cursor = -1, 0, 0
        self.reads: list[int] = []

    def announce(self, client: CacheClient, bucket: str, said: Announcement) -> Announced:
        self.messages += 1
        if said.plan > self.plan:
            self.plan, self.reads = said.plan, []
        if said.first_key == self.keys:
            self.keys += len(said.keys)
        numbers = np.frombuffer(said.reads, "<u4").tolist()
        if said.start <= len(self.reads) and said.start + len(numbers) <= self.reads_max:
            self.reads = self.reads[: said.start] + numbers if numbers else self.reads
        self.cursor = said.cursor
        return Announced(self.keys, len(self.reads), self.plan)


@pytest.fixture
def announcer(monkeypatch: pytest.MonkeyPatch) -> Announcer:
    made = Announcer(Numbered(), CacheClient("http://127.0.0.1:9"), "b", "loader", "group")
    monkeypatch.setattr(made, "_thread", object())  # each step is taken here
    return made


def told(announcer: Announcer, known: Announced | None) -> Announced | None:
    for _ in range(100):
        known, has_more = announcer.step(known)
        if not has_more:
            return known
    raise AssertionError("it never ends")


def order(epoch: int) -> list[int]:
    plan = Plan(PASS._replace(epoch=epoch))
    return [record for step in range(plan.steps) for record in plan.records(step)]


def test_a_cache_is_told_of_two_epochs_and_how_far_they_are_read(
    announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache()
    monkeypatch.setattr(orders, "announce", cache.announce)
    announcer.follow(PASS)
    known = told(announcer, None)
    assert (cache.reads, cache.keys) == (order(0) + order(1), RECORDS)
    announcer.read(3, 5)
    announcer.follow(PASS._replace(number=2, epoch=1))
    known = told(announcer, known)
    assert cache.reads == order(0) + order(1) + order(2)
    assert cache.cursor == RECORDS


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_cache_that_was_away_is_told_what_it_has_forgotten(
    announcer: Announcer, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    cache = Cache()
    monkeypatch.setattr(orders, "announce", cache.announce)
    announcer.follow(PASS)
    told(announcer, None)
    announcer.follow(PASS._replace(number=2, epoch=1))
    announcer.read(2, 2)
    if is_forgotten:
        cache = Cache()
        monkeypatch.setattr(orders, "announce", cache.announce)
    before = cache.messages
    told(announcer, None)
    if is_forgotten:
        assert cache.reads == order(1) + order(2), "from the epoch under way on"
        assert cache.cursor == 32
    else:
        assert cache.reads == order(0) + order(1) + order(2)
        assert (cache.cursor, cache.messages - before) == (RECORDS + 32, 2)


def test_a_cache_without_room_for_more_is_not_told_all_the_time(
    announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(reads_max=10)
    monkeypatch.setattr(orders, "announce", cache.announce)
    announcer.follow(PASS)
    known = told(announcer, None)
    before, reads = cache.messages, []
    for step in range(10):
        announcer.read(step, step)
        known, has_more = announcer.step(known)
        reads.append(has_more)
    assert (cache.messages - before, any(reads)) == (10, False), "only how far it is"


def test_positions_go_on_over_epochs() -> None:
    for rank in range(3):
        of = PASS._replace(rank=rank, world_size=3, cursor=100)
        coming = ComingRecords(of)
        coming.add()
        expected: list[int] = []
        for each in (of, of._replace(epoch=1, cursor=0)):
            plan = Plan(each)
            expected += [
                record for s in range(plan.steps) if plan.share(s).records for record in plan.records(s)
            ]
        found: list[int] = []
        while len(found) < coming.stop:
            found += coming.chunk(len(found), 37).records.tolist()
        assert found == expected
        with pytest.raises(IndexError):
            coming.chunk(coming.stop, 1)
