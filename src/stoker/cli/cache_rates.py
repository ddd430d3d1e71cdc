"""What was read between two looks at cache servers, for each bucket and each server, and over all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from stoker.wire.cache_api import BucketStatus, CacheStatus, FleetStatus

AWAY = "away"


class BucketRates(msgspec.Struct, frozen=True):
    """Of one bucket between two looks. `hit_ratio` is None where nothing was asked for."""

    name: str
    hits_per_s: float
    hit_ratio: float | None
    cache_bytes_per_s: float
    origin_bytes_per_s: float
    origin_requests_per_s: float
    held_bytes: int
    origin_state: str
    misses_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    local_hits_per_s: float = 0.0
    kind: str = "objects"


class ServerRates(msgspec.Struct, frozen=True):
    """Of one server, all its buckets together. `state`: ok, pass-through, why it is not ready, or away; `problem`: why
    it could not be asked."""

    name: str
    state: str
    hits_per_s: float = 0.0
    misses_per_s: float = 0.0
    hit_ratio: float | None = None
    cache_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    origin_bytes_per_s: float = 0.0
    held_bytes: int = 0
    capacity_bytes: int = 0
    owned_ratio: float | None = None
    fair_ratio: float | None = None
    shortest_unused_s: int | None = None
    problem: str = ""


class Look(NamedTuple):
    """What servers say at one moment: the one that was asked, and all by name. `problems`: why others say nothing."""

    status: CacheStatus
    fleet: FleetStatus | None
    servers: Mapping[str, CacheStatus] = {}
    problems: Mapping[str, str] = {}


def rates_between(before: CacheStatus, after: CacheStatus) -> list[BucketRates]:
    """Of each bucket, by the server's own clock. A server that has started anew meanwhile began with nothing."""
    passed_s = after.uptime_s - before.uptime_s
    known = {row.name: row for row in before.buckets}
    if passed_s <= 0:
        passed_s, known = after.uptime_s, {}
    return [_rates(known.get(row.name), row, max(passed_s, 1e-3)) for row in after.buckets]


def fleet_rates(before: Look, after: Look) -> tuple[list[ServerRates], list[BucketRates]]:
    """Of each server, and of each bucket over all servers. One that was not there before counts from now on."""
    own = {
        name: rates_between(before.servers.get(name) or replace(status, uptime_s=0.0), status)
        for name, status in after.servers.items()
    }
    servers = [server_rates(name, status, own[name]) for name, status in after.servers.items()]
    servers += [ServerRates(name, AWAY, problem=problem) for name, problem in after.problems.items()]
    names = dict.fromkeys(row.name for rows in own.values() for row in rows)
    rows = [[row for rows in own.values() for row in rows if row.name == name] for name in names]
    return sorted(servers, key=lambda one: one.name), [_summed(some) for some in rows]


def server_rates(name: str, status: CacheStatus, rows: Sequence[BucketRates]) -> ServerRates:
    """All buckets of a server together."""
    balance = status.balance
    hits, misses = sum(row.hits_per_s for row in rows), sum(row.misses_per_s for row in rows)
    return ServerRates(
        name=name,
        state=", ".join(balance.unready) or status.state,
        hits_per_s=round(hits, 3),
        misses_per_s=round(misses, 3),
        hit_ratio=_ratio(hits, misses),
        cache_bytes_per_s=sum(row.cache_bytes_per_s for row in rows),
        peer_bytes_per_s=sum(row.peer_bytes_per_s for row in rows),
        origin_bytes_per_s=sum(row.origin_bytes_per_s for row in rows),
        held_bytes=status.held_bytes,
        capacity_bytes=status.capacity_bytes,
        owned_ratio=balance.owned_ratio,
        fair_ratio=balance.fair_ratio,
        shortest_unused_s=balance.shortest_unused_s,
    )


def _rates(before: BucketStatus | None, after: BucketStatus, passed_s: float) -> BucketRates:
    def grown(name: str) -> int:
        return max(0, int(getattr(after, name)) - (0 if before is None else int(getattr(before, name))))

    hits, misses = grown("hits"), grown("misses")
    return BucketRates(
        name=after.name,
        hits_per_s=round(hits / passed_s, 3),
        hit_ratio=_ratio(hits, misses),
        cache_bytes_per_s=round(grown("hit_bytes") / passed_s, 1),
        origin_bytes_per_s=round(grown("origin_bytes") / passed_s, 1),
        origin_requests_per_s=round(grown("origin_requests") / passed_s, 3),
        held_bytes=after.held_bytes,
        origin_state=after.origin_state,
        misses_per_s=round(misses / passed_s, 3),
        peer_bytes_per_s=round(grown("peer_bytes") / passed_s, 1),
        local_hits_per_s=round(grown("local_hits") / passed_s, 3),
        kind=after.kind,
    )


def _summed(rows: Sequence[BucketRates]) -> BucketRates:
    """Of one bucket, over its servers; its origin is well if it is for all."""
    hits, misses = sum(row.hits_per_s for row in rows), sum(row.misses_per_s for row in rows)
    states = [row.origin_state for row in rows if row.origin_state != "closed"]
    return BucketRates(
        name=rows[0].name,
        hits_per_s=round(hits, 3),
        hit_ratio=_ratio(hits, misses),
        cache_bytes_per_s=round(sum(row.cache_bytes_per_s for row in rows), 1),
        origin_bytes_per_s=round(sum(row.origin_bytes_per_s for row in rows), 1),
        origin_requests_per_s=round(sum(row.origin_requests_per_s for row in rows), 3),
        held_bytes=sum(row.held_bytes for row in rows),
        origin_state=states[0] if states else "closed",
        misses_per_s=round(misses, 3),
        peer_bytes_per_s=round(sum(row.peer_bytes_per_s for row in rows), 1),
        local_hits_per_s=round(sum(row.local_hits_per_s for row in rows), 3),
        kind=rows[0].kind,
    )


def shortest_s(servers: Iterable[ServerRates]) -> int | None:
    """The shortest time since its last use of all that left any of them for room; None: nothing did."""
    known = [one.shortest_unused_s for one in servers if one.shortest_unused_s is not None]
    return min(known, default=None)


def _ratio(hits: float, misses: float) -> float | None:
    return round(hits / (hits + misses), 4) if hits + misses else None
