"""Whether a load has room: limits, what others hold, quotas of the bucket and of its parts, and copies."""

from __future__ import annotations

import msgspec

from stoker.cli.cache_room import Sum, refusal, space_of
from stoker.wire.cache_api import BucketStatus, CacheStatus, PrefixStatus
from tests.unit.cache_fake import BUCKET, STATUS

SPARE_BYTES = 2048


def status(capacity_bytes: int = 10_000, held_bytes: int = 500, **of_bucket: object) -> CacheStatus:
    bucket: BucketStatus = msgspec.structs.replace(BUCKET, **of_bucket)
    return msgspec.structs.replace(
        STATUS, capacity_bytes=capacity_bytes, held_bytes=held_bytes, buckets=[bucket]
    )


def test_a_quota_is_less_than_the_room() -> None:
    space = space_of([status(quota_bytes=3000), status(quota_bytes=3000)], "b")
    assert (space.room_bytes, space.quota_bytes) == (6000, 6000)
    assert refusal("stoker://b", Sum(3, 6000), space, 1) == ""
    said = refusal("stoker://b", Sum(3, 6001), space, 1)
    assert "there is room for 6 KB: the 2 servers may hold 20 KB" in said
    assert "and its quota is 6 KB." in said
    crowded = space_of([status(quota_bytes=3000, held_bytes=7000), status(quota_bytes=3000)], "b")
    assert crowded.room_bytes == 10_000 - 6500 - SPARE_BYTES + 3000, "the first has no room for its quota"
    partly = space_of([status(quota_bytes=3000), status()], "b")
    assert (partly.room_bytes, partly.quota_bytes) == (3000 + 10_000 - SPARE_BYTES, 0)


def test_what_has_left_of_the_bucket_itself_is_room_for_it() -> None:
    space = space_of([status(held_bytes=7000, used_bytes=6000)], "b")
    assert (space.others_bytes, space.own_bytes) == (1000, 500)
    assert space.room_bytes == 9000 - SPARE_BYTES
    assert space_of([status(held_bytes=7000)], "b").others_bytes == 6500, "an older server does not say"


def test_a_server_without_the_bucket_has_no_room_for_it() -> None:
    without = msgspec.structs.replace(status(), buckets=[])
    assert space_of([status(), without], "b") == space_of([status()], "b")


def test_each_copy_takes_room() -> None:
    servers = [status(quota_bytes=3000, max_replicas=2)] * 3
    space = space_of(servers, "b")
    assert refusal("stoker://b", Sum(3, 4500), space, 0) == ""
    assert "9 KB with 2 copies" in refusal("stoker://b", Sum(3, 4501), space, 0), "as the bucket says"
    assert refusal("stoker://b", Sum(3, 4501), space, 1) == ""
    assert "with 3 copies" in refusal("stoker://b", Sum(3, 4500), space, 5), "there are no more servers"
    everywhere = space_of([status(max_replicas=0)] * 3, "b")
    assert refusal("stoker://b", Sum(3, 3 * (10_000 - SPARE_BYTES)), everywhere, 0) == "", (
        "a load holds one copy then"
    )


def test_parts_have_quotas_of_their_own() -> None:
    prefixes = [PrefixStatus("a/", 0, 1000), PrefixStatus("a/hot/", 0, 0, True)]
    space = space_of([status(prefixes=prefixes)] * 2, "b")
    assert [space.part_of(key) for key in ("a/1", "a/hot/1", "c")] == ["a/", "a/hot/", None]
    assert refusal("stoker://b", Sum(3, 9000, 0, {"a/": 2000, "a/hot/": 7000}), space, 1) == ""
    said = refusal("stoker://b/a/", Sum(3, 2001, 0, {"a/": 2001}), space, 1)
    assert "of which a/ has 2 KB, and may take 2 KB: that is its quota" in said
    assert refusal("stoker://b", Sum(3, 1001, 0, {"a/": 1001}), space, 2)
    unlike = space_of([status(prefixes=prefixes), status()], "b")
    assert refusal("stoker://b", Sum(3, 9000, 0, {"a/": 9000}), unlike, 1) == "", (
        "one of them has no quota for it"
    )
