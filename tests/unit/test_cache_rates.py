"""What `stoker cache top` makes of what servers say at two moments."""

from __future__ import annotations

from msgspec.structs import replace

from stoker.cli.cache_rates import AWAY, Look, fleet_rates, shortest_s
from stoker.wire.cache_api import BucketStatus, CacheStatus
from stoker.wire.cache_watch import Balance


def bucket(name: str, **figures: int | str) -> BucketStatus:
    whole = BucketStatus(name, "/o", "lru", 0, 0, 0, 0, 0, 0, 0)
    return replace(whole, **figures)


def status(uptime_s: float, *buckets: BucketStatus, **more: object) -> CacheStatus:
    whole = CacheStatus("1", "ok", uptime_s, 1000, 100, 1, 0, 0, 0, 0, 0, list(buckets))
    return replace(whole, **more)


def look(servers: dict[str, CacheStatus], problems: dict[str, str] | None = None) -> Look:
    return Look(next(iter(servers.values())), None, servers, problems or {})


def test_buckets_are_summed_over_servers_by_each_ones_own_clock() -> None:
    before = look(
        {
            "x": status(10.0, bucket("b", hits=5), bucket("only-x")),
            "y": status(100.0, bucket("b", hits=7, misses=1)),
        }
    )
    after = look(
        {
            "x": status(
                12.0,
                bucket("b", hits=25, hit_bytes=200, peer_bytes=50, held_bytes=3),
                bucket("only-x", misses=4, origin_bytes=40),
                balance=Balance(0.6, 0.5, 900),
            ),
            "y": status(
                104.0,
                bucket("b", hits=27, misses=11, held_bytes=4, origin_state="open"),
                balance=Balance(0.4, 0.5, 700, ["draining"]),
            ),
        }
    )
    servers, buckets = fleet_rates(before, after)
    both, only = buckets
    assert (both.name, both.hits_per_s, both.misses_per_s, both.hit_ratio) == ("b", 15.0, 2.5, 0.8571)
    assert (both.cache_bytes_per_s, both.peer_bytes_per_s, both.held_bytes) == (100.0, 25.0, 7)
    assert both.origin_state == "open", "one server leaves its origin alone"
    assert (only.name, only.hit_ratio, only.origin_bytes_per_s) == ("only-x", 0.0, 20.0)
    x, y = servers
    assert (x.name, x.state, x.hits_per_s, x.misses_per_s, x.hit_ratio) == ("x", "ok", 10.0, 2.0, 0.8333)
    assert (x.owned_ratio, x.fair_ratio, x.shortest_unused_s) == (0.6, 0.5, 900)
    assert (y.state, y.hits_per_s) == ("draining", 5.0)
    assert shortest_s(servers) == 700


def test_servers_come_and_go_between_two_looks() -> None:
    before = look({"x": status(10.0, bucket("b", hits=5)), "gone": status(5.0, bucket("b", hits=5))})
    new = status(500.0, bucket("b", hits=10_000))
    anew = status(2.0, bucket("b", hits=6))
    servers, buckets = fleet_rates(before, look({"x": anew, "new": new}, {"gone": "it is silent"}))
    gone, fresh, x = servers
    assert (gone.name, gone.state, gone.problem) == ("gone", AWAY, "it is silent")
    assert (fresh.name, fresh.hits_per_s) == ("new", 0.0), "what it did before is no rate of now"
    assert (x.name, x.hits_per_s) == ("x", 3.0), "it has started anew"
    assert buckets[0].hits_per_s == 3.0
    assert shortest_s(servers) is None
