"""A server's figures as Prometheus text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from stoker._native import Front
from stoker.base.exposition import Histogram, Labels, family, histogram_family
from stoker.cache.auth.principals import Principal
from stoker.cache.limits import CLOSED, OPEN, PROBING
from stoker.cache.maglev import Placement
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.front_hits import FrontHits
from stoker.cache.server.metric_names import METRICS
from stoker.cache.server.orders import Orders
from stoker.cache.server.tenant_figures import PRINCIPALS_MAX, SentBy, principal_figures
from stoker.cache.server.watch import OBJECT, S3, Watch
from stoker.cache.store.departures import REASONS, ROOM

_T = TypeVar("_T")
BUCKETS_MAX = 200
"""So many buckets have figures of their own, those that were there first; the others' are summed up."""
OTHERS = "(others)"
REFUSED = "refused"
"""The dialect of what was refused before it was known what it is."""


class ServerFigures(NamedTuple):
    """What the server itself tells of."""

    version: str
    started_wall_s: float
    unready: Callable[[], list[str]]
    """Why it is not ready."""
    requests: Callable[[], int]
    """How many the back works on."""


class _Samples:
    """By the metric's short name, with the values of its labels."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
        self.histograms: dict[str, list[tuple[tuple[str, ...], Histogram]]] = defaultdict(list)

    def put(self, name: str, value: float, *labels: str) -> None:
        self.values[f"stoker_cache_{name}"].append((labels, value))

    def put_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        self.histograms[f"stoker_cache_{name}"].append((labels, histogram))


class Metrics:
    """Of one server."""

    def __init__(
        self,
        engine: Engine,
        front: Front,
        hits: FrontHits,
        orders: Orders,
        watch: Watch,
        server: ServerFigures,
        principals: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`principals`: the names of those that are configured."""
        self._principals = principals
        self._engine = engine
        self._front = front
        self._hits = hits
        self._orders = orders
        self._watch = watch
        self._server = server
        self._shares: tuple[Placement, dict[str, float]] | None = None

    def text(self, principal: Principal | None) -> str:
        """For one who may read some buckets: what is told of those; None: for anybody, all."""
        buckets = list(self._engine.buckets.values())
        readable = [one for one in buckets if principal is None or principal.may_read(one.name)]
        tells_all = principal is None or principal.is_unrestricted or len(readable) == len(buckets) > 0
        samples = _Samples()
        self._of_buckets(samples, readable)
        self._of_principals(samples, None if tells_all or principal is None else principal.name)
        if tells_all:
            self._of_server(samples)
            self._of_answers(samples)
            self._of_fleet(samples)
        told = [metric for metric in METRICS if tells_all or not metric.is_private]
        return "".join(
            histogram_family(
                metric.name, metric.help_text, _labelled(metric.labels, samples.histograms[metric.name])
            )
            if metric.kind == "histogram"
            else family(
                metric.name,
                metric.kind,
                metric.help_text,
                _labelled(metric.labels, samples.values[metric.name]),
            )
            for metric in told
        )

    def shortest_unused_s(self) -> int | None:
        """Of all that left for room in the last hour, the shortest time since its last use."""
        numbers = [bucket.number for bucket in self._engine.buckets.values()]
        store = self._engine.store
        return store.clearing.departures.shortest_unused_s(numbers, store.now_s())

    def balance(self) -> tuple[float, float]:
        """The part of all blocks that this server owns, and the part that is fair by its weight."""
        view, me = self._engine.fleet.view, self._engine.fleet.me.name
        weights = {member.name: member.weight for member in view.members}
        if not view.members:
            return 1.0, 1.0
        placement = view.placement()
        if self._shares is None or self._shares[0] is not placement:
            self._shares = placement, placement.shares()
        return self._shares[1].get(me, 0.0), weights.get(me, 0) / max(1, sum(weights.values()))

    def _of_server(self, samples: _Samples) -> None:
        store, figures = self._engine.store, self._front.figures()
        samples.put("build_info", 1, self._server.version)
        samples.put("start_time_seconds", round(self._server.started_wall_s, 3))
        samples.put("ready", 0 if self._server.unready() else 1)
        samples.put("store_writable", 1 if store.problem is None else 0)
        samples.put("capacity_bytes", store.room.limit_bytes)
        samples.put("used_bytes", store.room.used_bytes)
        samples.put("rewritten_bytes_total", store.clearing.rewritten_bytes)
        samples.put("connections", figures.connections)
        samples.put("connections_accepted_total", figures.accepted)
        samples.put("connections_refused_total", figures.refused)
        samples.put("connections_timed_out_total", figures.timed_out)
        samples.put("tls_handshakes_failed_total", self._front.tally().failed_handshakes)
        samples.put("sent_bytes_total", figures.sent_bytes)
        samples.put("back_requests", self._server.requests())
        samples.put("back_queue", figures.waiting)
        samples.put("prefetching", self._orders.prefetching.fetching)

    def _of_answers(self, samples: _Samples) -> None:
        tally, counts = self._front.tally(), Counter(self._watch.requests)
        for is_signed, method, status, count in tally.hits:
            counts[S3 if is_signed else OBJECT, method, status] += count
        for status, count in tally.refused.items():
            counts[REFUSED, REFUSED, status] += count
        for (dialect, method, status), count in sorted(counts.items()):
            if count:
                samples.put("requests_total", count, dialect, method, str(status))
        hits = Histogram(tally.bounds_s, tally.within)
        hits.total = tally.seconds
        samples.put_histogram("hit_seconds", hits)
        handed_on = Histogram(tally.handed_on_bounds_s, tally.handed_on_within)
        handed_on.total = tally.handed_on_seconds
        samples.put_histogram("miss_seconds", _summed([self._watch.miss_seconds, handed_on]))
        for dialect, histogram in self._watch.seconds.items():
            samples.put_histogram("back_seconds", histogram, dialect)

    def _of_principals(self, samples: _Samples, only: str | None) -> None:
        """Of that one only, unless that is None."""
        names, room = list(self._principals()), self._engine.store.room
        sent = {name: SentBy(*said) for name, said in self._front.tenant_figures().items()}
        counts = self._watch.of_principals, self._watch.refused_of_principals
        for row in principal_figures(names, OTHERS, sent, *counts, self._front.tally().refused):
            if only in (None, row.name):
                samples.put("principal_requests_total", row.requests, row.name)
                samples.put("principal_refused_total", row.refused, row.name)
                samples.put("principal_sent_bytes_total", row.sent_bytes, row.name)
                samples.put("principal_throttled_seconds_total", row.throttled_s, row.name)
        named = names[:PRINCIPALS_MAX]
        buckets: dict[str, list[Bucket]] = {tenant: [] for tenant in named if tenant in room.tenant_quotas}
        for bucket in self._engine.buckets.values():
            if bucket.spec.tenant in named:
                buckets.setdefault(bucket.spec.tenant, []).append(bucket)
        for tenant, own in buckets.items():
            if only not in (None, tenant):
                continue
            samples.put("tenant_used_bytes", room.used_by_tenant(tenant), tenant)
            if quota_bytes := room.tenant_quotas.get(tenant):
                samples.put("tenant_quota_bytes", quota_bytes, tenant)
            left = self._engine.store.clearing.departures.of([one.number for one in own], ROOM)
            samples.put("tenant_evictions_total", left.blocks, tenant)

    def _of_fleet(self, samples: _Samples) -> None:
        fleet = self._engine.fleet
        down, weights = fleet.view.down(), {member.name: member.weight for member in fleet.view.members}
        leaving = sum(1 for name, weight in weights.items() if not weight and name not in down)
        if not fleet.is_single:
            samples.put("fleet_members", len(weights) - leaving - len(down), "up")
            samples.put("fleet_members", leaving, "leaving")
            samples.put("fleet_members", len(down), "down")
        owned, fair = self.balance()
        samples.put("fleet_owned_ratio", owned)
        samples.put("fleet_fair_ratio", fair)

    def _of_buckets(self, samples: _Samples, readable: Sequence[Bucket]) -> None:
        own = set(list(self._engine.buckets)[:BUCKETS_MAX])
        named = [bucket for bucket in readable if bucket.name in own]
        others = [bucket for bucket in readable if bucket.name not in own]
        held = self._engine.store.index.figures()
        for label, buckets in (*((bucket.name, [bucket]) for bucket in named), (OTHERS, others)):
            if buckets:
                self._of_group(samples, label, buckets)
                figures = [held[bucket.number] for bucket in buckets if bucket.number in held]
                samples.put("blocks", sum(one.pieces for one in figures), label)
                samples.put("held_bytes", sum(one.size_bytes for one in figures), label)

    def _of_group(self, samples: _Samples, label: str, buckets: Sequence[Bucket]) -> None:
        """Of one bucket, or of several in one."""
        store, origins = self._engine.store, [bucket.origin for bucket in buckets]
        front = [self._hits.of(bucket.number) for bucket in buckets]
        samples.put("hits_total", sum(b.hits for b in buckets) + sum(one.hits for one in front), label)
        samples.put("local_hits_total", sum(b.local_hits for b in buckets), label)
        samples.put(
            "misses_total", sum(b.misses for b in buckets) + sum(one.handed_on for one in front), label
        )
        hit_bytes = sum(b.hit_bytes for b in buckets) + sum(one.size_bytes for one in front)
        samples.put("read_bytes_total", hit_bytes, label, "local")
        peer_bytes = sum(b.peer_bytes for b in buckets) + sum(one.handed_on_bytes for one in front)
        samples.put("read_bytes_total", peer_bytes, label, "peer")
        samples.put("read_bytes_total", sum(o.counters.bytes_read for o in origins), label, "origin")
        samples.put("origin_requests_total", sum(o.counters.requests for o in origins), label)
        samples.put("origin_errors_total", sum(o.errors for o in origins), label)
        samples.put("origin_retries_total", sum(o.retries for o in origins), label)
        samples.put("origin_hedges_total", sum(o.hedges for o in origins), label)
        for state in (CLOSED, OPEN, PROBING):
            samples.put("origin_breaker", sum(o.state == state for o in origins), label, state)
        samples.put_histogram("origin_seconds", _summed([o.latencies for o in origins]), label)
        numbers, departures = [bucket.number for bucket in buckets], store.clearing.departures
        for why in REASONS:
            left = departures.of(numbers, why)
            samples.put("evictions_total", left.blocks, label, why)
            samples.put("evicted_bytes_total", left.size_bytes, label, why)
        shortest_s = departures.shortest_unused_s(numbers, store.now_s())
        if shortest_s is not None:
            samples.put("eviction_shortest_unused_seconds", shortest_s, label)
        samples.put("bucket_used_bytes", sum(store.room.used_by_bucket(b.name) for b in buckets), label)
        quotas = [bucket.spec.quota_bytes for bucket in buckets]
        if all(quotas):
            samples.put("bucket_quota_bytes", sum(quotas), label)
        streams = sum(len(self._orders.status(bucket).streams) for bucket in buckets)
        samples.put("order_streams", streams, label)
        samples.put("prefetched_reads_total", sum(b.prefetched_reads for b in buckets), label)
        samples.put("prefetched_bytes_total", sum(b.prefetched_bytes for b in buckets), label)


def _labelled(names: Sequence[str], samples: Iterable[tuple[tuple[str, ...], _T]]) -> list[tuple[Labels, _T]]:
    return [(dict(zip(names, values, strict=True)), value) for values, value in samples]


def _summed(histograms: Sequence[Histogram]) -> Histogram:
    whole = Histogram(histograms[0].bounds)
    for one in histograms:
        whole.counts = [a + b for a, b in zip(whole.counts, one.counts, strict=True)]
        whole.total += one.total
    return whole
