"""The names of metrics, requests' ids, what has left: the parts of watching a server that need none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stoker._native import Piece
from stoker.base.exposition import Histogram, histogram_family
from stoker.cache.auth.tokens import Principal
from stoker.cache.server.client_address import ClientAddresses
from stoker.cache.server.inquiry import Ids, current, current_id, has_missed, ids_of, peer_headers, speaks
from stoker.cache.server.logs import JsonLine, TextLine
from stoker.cache.server.metric_names import METRICS
from stoker.cache.server.port import Request
from stoker.cache.server.tenant_figures import PRINCIPALS_MAX, SentBy, principal_figures
from stoker.cache.server.watch import S3, Watch
from stoker.cache.store.departures import AGE, ROOM, WINDOW_S, Departures
from stoker.errors import ConfigError
from tests.clocks import HandClock

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_every_metric_is_documented_and_nothing_else() -> None:
    told = {}
    for line in (DOCS / "observe.md").read_text().splitlines():
        row = re.fullmatch(r"\| `(stoker_cache_\w+)` \| (\w+) \| ([^|]*) \| .+ \|", line)
        if row:
            assert row[1] not in told, f"{row[1]} is documented twice"
            told[row[1]] = row[2], tuple(re.findall(r"`(\w+)`", row[3]))
    assert told == {metric.name: (metric.kind, metric.labels) for metric in METRICS}


def test_names_say_their_units() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.endswith(("_ms", "_s", "_mb", "_percent")), metric.name
        assert metric.kind != "histogram" or metric.name.endswith("_seconds"), metric.name


def test_a_histogram_is_what_prometheus_reads() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 30.0):
        histogram.add(seconds)
    text = histogram_family("took_seconds", "How long.", [({"way": 'a"b'}, histogram)])
    (family,) = text_string_to_metric_families(text)
    assert family.type == "histogram"
    values = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert values == {
        ("took_seconds_bucket", "0.1"): 2,
        ("took_seconds_bucket", "1.0"): 3,
        ("took_seconds_bucket", "+Inf"): 4,
        ("took_seconds_sum", None): pytest.approx(30.65),
        ("took_seconds_count", None): 4,
    }
    assert {s.labels["way"] for s in family.samples} == {'a"b'}
    assert histogram_family("took_seconds", "How long.", []) == ""


@pytest.mark.parametrize(
    ("request_id", "parent", "expected"),
    [
        ("job-7:step/3", None, ("job-7:step/3", None)),
        (" job-7 ", PARENT, ("job-7", PARENT)),
        (None, PARENT, ("ab" * 16, PARENT)),
        ('x"y', PARENT, ("ab" * 16, PARENT)),
    ],
)
def test_a_request_keeps_its_id(
    request_id: str | None, parent: str | None, expected: tuple[str, str | None]
) -> None:
    assert ids_of(request_id, parent, Ids()) == expected


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\r\nb", "<a>", "-", "\xe9"])
@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        PARENT.upper(),
        PARENT + "-x",
        PARENT.replace("00-", "ff-", 1),
        PARENT.replace("ab", "00"),
        PARENT.replace("cd", "00"),
    ],
)
def test_what_is_no_id_is_replaced(request_id: str, parent: str | None) -> None:
    ids = Ids()
    made, told = ids_of(request_id, parent, ids)
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert told is None
    assert len({made, ids_of(request_id, parent, ids)[0], ids_of(None, None, ids)[0], Ids().next()}) == 4


def request(method: str, target: bytes, **headers: str) -> Request:
    told = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request(method, target, told, b"", Principal("token-1", None))


def test_what_becomes_of_requests_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = Watch(clock.now)
    with watch.watching(request("GET", b"/b/k")) as inquiry:
        clock.at += 0.3
        has_missed()
        assert watch.begin_answer(inquiry, 200) == (("x-request-id", inquiry.request_id),)
        assert current() is inquiry
        clock.at += 5.0  # a reader that is slow says nothing of the server
    assert (current(), current_id(), peer_headers()) == (None, "", ""), "it is over"
    with watch.watching(request("FROB", b"/b/k?list-type=2")) as inquiry:
        speaks(S3)
        watch.begin_answer(inquiry, 501)
    for error in (asyncio.CancelledError(), ConnectionResetError("it is gone"), KeyError("a defect")):
        with contextlib.suppress(type(error)), watch.watching(request("PUT", b"/-/x")):
            raise error
    assert watch.requests == {
        ("object", "GET", 200): 1,
        ("s3", "other", 501): 1,
        ("own", "PUT", 499): 2,
        ("own", "PUT", 500): 1,
    }
    assert watch.miss_seconds.total == pytest.approx(0.3)
    assert sum(watch.miss_seconds.counts) == sum(watch.seconds["object"].counts) == 1
    assert sum(watch.seconds["s3"].counts) == sum(watch.seconds["own"].counts) == 0
    (defect,) = caplog.records
    assert defect.getMessage() == "a request failed by a defect"


def test_requests_are_counted_for_who_asked_and_logged_without_what_opens_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audited: list[tuple[str, str]] = []
    watch = Watch(
        HandClock().now,
        logs_access=True,
        audit=lambda inquiry, request, path, client: audited.append((path, client)),
        clients=ClientAddresses(["10.0.0.0/8"]),
    )
    caplog.set_level(logging.INFO, "stoker.cache.access")
    told = {"x_forwarded_for": "203.0.113.7"}
    for status, peer, target in (
        (200, "10.1.1.1", b"/b/k?X-Amz-Signature=secret"),
        (403, "10.1.1.1", b"/-/link/secret-proof/b/folder/k"),
        (401, "::ffff:192.0.2.1", b"/-/link/secret"),
        (404, "", b"/b/k"),
    ):
        asked = request("GET", target, **told)
        asked.peer = peer
        with watch.watching(asked) as inquiry:
            watch.begin_answer(inquiry, status)
    assert watch.of_principals == {"token-1": 4}
    assert watch.refused_of_principals == {"token-1": 2}
    logged = [(line.fields["path"], line.fields["client"]) for line in caplog.records]  # type: ignore[attr-defined]
    assert logged == audited
    assert logged == [
        ("/b/k", "203.0.113.7"),
        ("/-/link/…/b/folder/k", "203.0.113.7"),
        ("/-/link/…/", "192.0.2.1"),
        ("/b/k", "unix"),
    ]


@pytest.mark.parametrize(
    ("proxies", "peer", "forwarded", "client"),
    [
        ((), "192.0.2.1", "1.1.1.1", "192.0.2.1"),
        ((), "", None, "unix"),
        ((), "", "1.1.1.1", "unix"),
        (("unix",), "", "1.1.1.1", "1.1.1.1"),
        (("10.0.0.0/8",), "10.0.0.1", None, "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "", "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "1.1.1.1", "1.1.1.1"),
        (("10.0.0.0/8",), "10.0.0.1", "1.1.1.1, 2.2.2.2", "2.2.2.2"),
        (("10.0.0.0/8",), "10.0.0.1", "1.1.1.1,2.2.2.2 , 10.9.9.9", "2.2.2.2"),
        (("10.0.0.0/8",), "10.0.0.1", "10.1.1.1,10.2.2.2", "10.1.1.1"),
        (("10.0.0.0/8",), "10.0.0.1", "1.1.1.1, nonsense, 10.2.2.2", "10.2.2.2"),
        (("10.0.0.0/8",), "10.0.0.1", "1.1.1.1:4711", "1.1.1.1"),
        (("10.0.0.0/8",), "::ffff:10.0.0.1", "2001:db8::7", "2001:db8::7"),
        (("2001:db8::/32",), "2001:db8::1", "[2001:db9::7]:80", "2001:db9::7"),
        (("10.0.0.0/8",), "2001:db8::1", "1.1.1.1", "2001:db8::1"),
        (("0.0.0.0/0",), "10.0.0.1", ",".join(["1.1.1.1", *["2.2.2.2"] * 40]), "2.2.2.2"),
    ],
)
def test_only_who_is_trusted_says_for_whom_it_asks(
    proxies: tuple[str, ...], peer: str, forwarded: str | None, client: str
) -> None:
    assert ClientAddresses(proxies).of(peer, forwarded) == client


@pytest.mark.parametrize("text", ["10.0.0.1/8", "proxy.example", "", "300.0.0.0/8"])
def test_what_is_no_network_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy .* is no network such as 10\.1\.0\.0/16"):
        ClientAddresses([text])


names = st.sampled_from("abcdef")


@given(
    st.lists(names, max_size=8),
    st.dictionaries(names, st.builds(SentBy, *[st.integers(0, 99)] * 2, st.just(0.0))),
    st.dictionaries(names, st.integers(0, 99)),
    st.dictionaries(names, st.integers(0, 99)),
)
def test_figures_of_principals_are_of_those_that_are_configured_and_nothing_is_lost(
    configured: list[str], sent: dict[str, SentBy], requests: dict[str, int], refused: dict[str, int]
) -> None:
    rows = principal_figures(configured, "(others)", sent, requests, refused, {401: 3, 400: 4})
    assert [row.name for row in rows] == [*dict.fromkeys(configured), "(others)"]
    assert sum(row.requests for row in rows) == (
        sum(requests.values()) + sum(one.hits for one in sent.values()) + 7
    )
    assert sum(row.refused for row in rows) == sum(refused.values()) + 3
    assert sum(row.sent_bytes for row in rows) == sum(one.sent_bytes for one in sent.values())
    for row in rows[:-1]:
        assert row.requests == requests.get(row.name, 0) + sent.get(row.name, SentBy()).hits


def test_no_more_principals_than_that_have_figures_of_their_own() -> None:
    many = [f"p{number:03}" for number in range(PRINCIPALS_MAX + 5)]
    rows = principal_figures(many, "(others)", {}, dict.fromkeys(many, 1), {}, {})
    assert len(rows) == PRINCIPALS_MAX + 1
    assert (rows[-1].name, rows[-1].requests) == ("(others)", 5)


def test_other_servers_hear_for_which_request_they_work() -> None:
    watch = Watch(HandClock().now)
    with watch.watching(request("GET", b"/b/k", x_request_id="mine", traceparent=PARENT)):
        assert peer_headers() == f"x-request-id: mine\r\ntraceparent: {PARENT}\r\n"
    with watch.watching(request("GET", b"/b/k", x_request_id="mine")):
        assert peer_headers() == "x-request-id: mine\r\n"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_line_is_one_line_whatever_is_in_it(log_format: str) -> None:
    record = logging.LogRecord("stoker.cache", logging.INFO, "f", 1, "a\nb \udcff %s", ("c\r",), None)
    record.fields = {"path": "x\ny"}
    formatter = JsonLine() if log_format == "json" else TextLine()
    with Watch(HandClock().now).watching(request("GET", b"/b/k", x_request_id="mine")):
        line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert "mine" in line
    if log_format == "json":
        said = json.loads(line)
        assert (said["message"], said["path"], said["request_id"]) == ("a\nb \udcff c\r", "x\ny", "mine")


class Left(Piece):
    """A piece of so many bytes that was used last at that time."""

    def __init__(self, bucket: int, size_bytes: int, used_s: int) -> None:
        super().__init__(bucket, bytes(16), None, 1)
        self._told = size_bytes, used_s

    @property
    def size_bytes(self) -> int:
        return self._told[0]

    @property
    def used_s(self) -> int:
        return self._told[1]


def test_what_left_says_how_long_it_was_unused() -> None:
    departures, now_s = Departures(), 1_000_000
    assert departures.shortest_unused_s([1, 2], now_s) is None
    departures.left(ROOM, [Left(1, 10, now_s - 700), Left(1, 20, now_s - 900)], now_s)
    departures.left(ROOM, [Left(2, 5, now_s - 100)], now_s)
    departures.left(AGE, [Left(1, 3, now_s - 1)], now_s)
    assert departures.of([1], ROOM) == (2, 30)
    assert departures.of([1, 2], ROOM) == (3, 35)
    assert departures.of([1, 2], AGE) == (1, 3)
    assert departures.shortest_unused_s([1], now_s) == 700  # only what left for room counts
    assert departures.shortest_unused_s([1, 2], now_s) == 100
    later_s = now_s + WINDOW_S // 2
    departures.left(ROOM, [Left(1, 1, later_s - 2000)], later_s)
    assert departures.shortest_unused_s([1], later_s) == 700
    assert departures.shortest_unused_s([1], now_s + WINDOW_S) == 2000
    assert departures.shortest_unused_s([1, 2], later_s + 2 * WINDOW_S) is None
