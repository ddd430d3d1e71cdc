"""The metrics of a cache server, by name: docs/how-to/observe.md says the same. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """`labels`: of each sample, in their order. `is_private`: only for who may read all buckets."""

    name: str
    kind: str
    help_text: str
    labels: tuple[str, ...] = ()
    is_private: bool = True


def _server(name: str, kind: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"stoker_cache_{name}", kind, help_text, labels)


def _bucket(name: str, kind: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"stoker_cache_{name}", kind, help_text, ("bucket", *labels), is_private=False)


def _own(name: str, kind: str, help_text: str, label: str) -> Metric:
    """Who is told nothing of others is told this of itself."""
    return Metric(f"stoker_cache_{name}", kind, help_text, (label,), is_private=False)


METRICS = (
    _server("build_info", "gauge", "1; the server's version is a label.", "version"),
    _server("start_time_seconds", "gauge", "When the server started, in seconds since 1970."),
    _server("ready", "gauge", "1 while /-/ready answers 200."),
    _server("store_writable", "gauge", "0 while nothing new is stored because the disk fails."),
    _server("capacity_bytes", "gauge", "What blocks may take of the disk."),
    _server("used_bytes", "gauge", "What blocks take of the disk, in whole pages."),
    _server("rewritten_bytes_total", "counter", "Blocks that were written anew to make room around them."),
    _server("connections", "gauge", "Open connections."),
    _server("connections_accepted_total", "counter", "Connections that were accepted."),
    _server("connections_refused_total", "counter", "Connections that were refused: too many, or draining."),
    _server("connections_timed_out_total", "counter", "Connections closed because the client was too slow."),
    _server(
        "tls_handshakes_failed_total", "counter",
        "Handshakes of TLS that failed: no trust on one of the sides, plain HTTP, or no TLS.",
    ),
    _server("sent_bytes_total", "counter", "Bytes sent to clients and other servers, heads included."),
    _server(
        "requests_total", "counter", "Requests that were answered.", "dialect", "method", "status",
    ),
    _server("hit_seconds", "histogram", "From when a hit was asked for to the first bytes of its answer."),
    _server(
        "back_seconds", "histogram", "The same of requests that the back answered well.", "dialect",
    ),
    _server("miss_seconds", "histogram", "The same of those for which something had to be fetched."),
    _server("back_requests", "gauge", "Requests that the back works on."),
    _server("back_queue", "gauge", "What the front has handed over and the back has not taken yet."),
    _server("fleet_members", "gauge", "Members of the fleet as this server sees them.", "state"),
    _server("fleet_owned_ratio", "gauge", "The part of all blocks that this server owns now."),
    _server("fleet_fair_ratio", "gauge", "The part that it owns by its weight while all members are there."),
    _server("prefetching", "gauge", "Announced reads that are being fetched ahead."),
    _bucket("hits_total", "counter", "Objects, or parts of them, that were answered from what was here."),
    _bucket("local_hits_total", "counter", "Those of the hits that readers read from the file themselves."),
    _bucket("misses_total", "counter", "Objects, or parts of them, for which something had to be fetched."),
    _bucket(
        "read_bytes_total", "counter",
        "By source: local, of hits; peer, from other servers; origin, from the origin.", "source",
    ),
    _bucket("origin_requests_total", "counter", "Requests to the origin."),
    _bucket("origin_errors_total", "counter", "Requests to the origin that failed, or broke off."),
    _bucket("origin_retries_total", "counter", "Requests that were made again because one had failed."),
    _bucket("origin_hedges_total", "counter", "Second requests beside slow ones."),
    _bucket("origin_breaker", "gauge", "1 for the state that the breaker is in.", "state"),
    _bucket("origin_seconds", "histogram", "To the first bytes of the origin's answer, of one request."),
    _bucket("evictions_total", "counter", "Blocks that left the disk.", "reason"),
    _bucket("evicted_bytes_total", "counter", "The same in bytes.", "reason"),
    _bucket(
        "eviction_shortest_unused_seconds", "gauge",
        "The shortest time since its last use of all that left for room in the last hour.",
    ),
    _bucket("blocks", "gauge", "Blocks that are held."),
    _bucket("held_bytes", "gauge", "Bytes of those blocks."),
    _bucket("bucket_used_bytes", "gauge", "What the bucket takes of the disk, in whole pages."),
    _bucket("bucket_quota_bytes", "gauge", "What it may take, where it has a quota."),
    _bucket("order_streams", "gauge", "Readers that have announced what they will read."),
    _bucket("prefetched_reads_total", "counter", "Announced reads that were fetched before they were asked for."),
    _bucket("prefetched_bytes_total", "counter", "The same in bytes."),
    _own("principal_requests_total", "counter", "Requests that were answered.", "principal"),
    _own("principal_refused_total", "counter", "Those of them for which there was no right.", "principal"),
    _own("principal_sent_bytes_total", "counter", "Bytes that were sent, heads included.", "principal"),
    _own(
        "principal_throttled_seconds_total", "counter",
        "How long connections have waited for what they may be sent, all added up.", "principal",
    ),
    _own("tenant_used_bytes", "gauge", "What the tenant's buckets take of the disk, in whole pages.", "tenant"),
    _own("tenant_quota_bytes", "gauge", "What they may take together, where there is a quota.", "tenant"),
    _own("tenant_evictions_total", "counter", "Blocks of theirs that left for something new.", "tenant"),
)  # fmt: skip
