"""Room: what fits, and who has to give."""

from __future__ import annotations

import pytest

from stoker.cache.room import Lot, Room


def room_of(*lots: Lot, limit_bytes: int = 100, spare_bytes: int = 0) -> Room:
    room = Room(limit_bytes, spare_bytes)
    for lot in lots:
        room.set_lot(lot)
    return room


def test_what_does_not_fit_is_made_room_for_by_those_that_give() -> None:
    room = room_of(Lot(1, "a"), Lot(2, "b", policy="uniform"), Lot(3, "c"), Lot(4, "a", "p/", is_pinned=True))
    assert room.ask(1, 100).fits
    for lot in (1, 2, 4):
        room.take(lot, 25)
    assert room.ask(3, 25).fits
    need = room.ask(3, 40)
    assert (need.missing_bytes, need.lots, need.is_refused) == (15, {1}, False)
    assert "the limit is reached" in need.why
    assert room.ask(4, 40).lots == {1}, "what is pinned may take from others"
    refused = room.ask(2, 40)
    assert refused.is_refused
    assert not refused.fits
    assert "uniform never replaces" in refused.why
    room.give(1, 25)
    assert "nothing in it may leave" in room.ask(3, 60).why
    assert "larger than the limit" in room.ask(3, 101).why
    with pytest.raises(ValueError, match="uses 25 bytes and gives 26"):
        room.give(2, 26)


def test_quotas_are_kept_within_the_lot_and_within_the_bucket() -> None:
    room = room_of(Lot(1, "a"), Lot(2, "a", "p/", quota_bytes=30), Lot(3, "b"))
    room.set_quota("a", 60)
    room.take(1, 40)
    room.take(2, 20)
    room.take(3, 10)
    assert room.ask(2, 15).lots == {2}
    assert "the quota of a/p/" in room.ask(2, 15).why
    assert room.ask(2, 5).lots == {1, 2}
    assert room.ask(1, 5).lots == {1, 2}
    assert room.used_by_bucket("a") == 60
    assert room.ask(3, 30).fits


def test_a_tenant_has_a_quota_over_all_its_buckets() -> None:
    room = room_of(Lot(1, "a"), Lot(2, "b"), Lot(3, "c"))
    for bucket, tenant in (("a", "vision"), ("b", "vision"), ("c", "")):
        room.set_tenant(bucket, tenant)
    room.set_tenant_quotas({"vision": 50, "audio": 1})
    room.take(1, 30)
    room.take(2, 15)
    assert room.used_by_tenant("vision") == 45
    assert room.ask(1, 5).fits
    need = room.ask(2, 8)
    assert (need.missing_bytes, need.lots) == (3, {1, 2})
    assert "the quota of the tenant vision" in need.why
    assert room.ask(3, 50).fits
    room.set_tenant_quotas({"vision": 90})
    assert room.ask(2, 8).fits
    room.set_tenant("b", "")
    assert room.used_by_tenant("vision") == 30


def test_spare_room_is_for_moving_and_leaving_files_count() -> None:
    room = room_of(Lot(1, "a"), spare_bytes=10)
    room.take(1, 85)
    assert room.ask(1, 5).fits
    assert not room.ask(1, 6).fits
    assert room.ask(1, 15, is_moving=True).fits
    leaving = room.ask(1, 5, leaving_bytes=1)
    assert leaving.is_refused
    assert "still sent from" in leaving.why
    room.take(1, 10)
    over = room.over()
    assert (over.missing_bytes, over.lots) == (5, {1})
    room.give(1, 10)
    assert room.over().missing_bytes == 0
    room.set_lot(Lot(2, "a", "p/", is_pinned=True))
    room.take(2, 20)
    assert (room.over().missing_bytes, room.over().lots) == (15, {1})
    assert room.over(with_pinned=True).lots == {1, 2}


def test_a_limit_that_is_none() -> None:
    for limit, spare in ((-1, 0), (10, 11), (10, -1)):
        with pytest.raises(ValueError, match="is none"):
            Room(limit, spare)
    assert room_of(Lot(1, "a"), limit_bytes=0).ask(1, 1).is_refused
