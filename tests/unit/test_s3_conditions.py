"""Dates, tags and conditional requests."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.server.s3.headers import (
    Conditions,
    Outcome,
    conditions_of,
    evaluate,
    evaluate_write,
    quoted_etag,
)
from stoker.wire.http_dates import (
    format_amz_date,
    format_http_date,
    format_iso_date,
    parse_amz_date,
    parse_http_date,
)

NOW_S = 784111777
OK, SAME, FAILED = Outcome.GO_ON, Outcome.NOT_MODIFIED, Outcome.PRECONDITION_FAILED


@pytest.mark.parametrize(
    "text", ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
)
def test_the_three_forms_of_a_date(text: str) -> None:
    # The examples of RFC 9110, section 5.6.7.
    assert parse_http_date(text) == NOW_S


@pytest.mark.parametrize(
    "text", ["", "yesterday", "Sun, 06 Nov 1994", "Sun, 99 Nov 1994 08:49:37 GMT", "0", "ü", "\0"]
)
def test_what_is_no_date(text: str) -> None:
    assert parse_http_date(text) is None


@given(st.text(max_size=40))
def test_no_text_makes_trouble(text: str) -> None:
    parse_http_date(text)
    parse_amz_date(text)


@given(st.integers(0, 253_402_300_799))
def test_dates_come_back(seconds: int) -> None:
    assert parse_http_date(format_http_date(seconds)) == seconds
    assert parse_amz_date(format_amz_date(seconds)) == seconds
    iso = format_iso_date(seconds)
    assert datetime.datetime.fromisoformat(iso).timestamp() == seconds


def test_dates_beyond_what_can_be_said() -> None:
    assert format_http_date(-5.5) == "Thu, 01 Jan 1970 00:00:00 GMT"
    assert format_iso_date(1e18) == "9999-12-31T23:59:59.000Z"
    assert format_amz_date(NOW_S + 0.9) == "19941106T084937Z"


@pytest.mark.parametrize("etag", ["abc", '"abc"', ' "abc" '])
def test_a_tag_has_its_quotes_once(etag: str) -> None:
    assert quoted_etag(etag) == '"abc"'


DATE = format_http_date(NOW_S)
BEFORE = format_http_date(NOW_S - 1)


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, OK),
        ({"if-match": '"e"'}, OK),
        ({"if-match": "e"}, OK),
        ({"if-match": "*"}, OK),
        ({"if-match": '"x"'}, FAILED),
        ({"if-match": '"x", "e"'}, OK),
        ({"if-match": ""}, FAILED),
        ({"if-none-match": '"e"'}, SAME),
        ({"if-none-match": 'W/"e"'}, SAME),
        ({"if-none-match": "*"}, SAME),
        ({"if-none-match": '"x"'}, OK),
        ({"if-none-match": '"x","e"'}, SAME),
        ({"if-modified-since": DATE}, SAME),
        ({"if-modified-since": BEFORE}, OK),
        ({"if-modified-since": "soon"}, OK),
        ({"if-unmodified-since": DATE}, OK),
        ({"if-unmodified-since": BEFORE}, FAILED),
        ({"if-unmodified-since": "soon"}, OK),
        # A tag says more than a time.
        ({"if-match": '"e"', "if-unmodified-since": BEFORE}, OK),
        ({"if-match": '"x"', "if-unmodified-since": DATE}, FAILED),
        ({"if-none-match": '"e"', "if-modified-since": BEFORE}, SAME),
        ({"if-none-match": '"x"', "if-modified-since": DATE}, OK),
        # What must hold comes before what is wanted to be new.
        ({"if-match": '"x"', "if-none-match": '"e"'}, FAILED),
        ({"if-match": '"e"', "if-none-match": '"e"'}, SAME),
        ({"if-unmodified-since": BEFORE, "if-none-match": '"e"'}, FAILED),
        ({"if-unmodified-since": BEFORE, "if-modified-since": DATE}, FAILED),
    ],
)
def test_conditions_of_a_read(headers: dict[str, str], outcome: Outcome) -> None:
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert evaluate(conditions_of(raw), "e", NOW_S)[0] is outcome
    # Nothing is "not modified" in a write or a copy.
    written = FAILED if outcome is SAME else outcome
    assert evaluate_write(conditions_of(raw), '"e"', NOW_S)[0] is written
    source = {f"x-amz-copy-source-{name}".encode(): value.encode() for name, value in headers.items()}
    assert conditions_of(source).are_none
    assert conditions_of(source, "x-amz-copy-source-") == conditions_of(raw)


def test_a_tag_may_have_commas() -> None:
    assert evaluate(Conditions(if_match='"a,b"'), "a,b", None)[0] is OK
    assert evaluate(Conditions(if_match='"x", "a,b"'), "a,b", None)[0] is OK
    assert evaluate(Conditions(if_match='"a","b"'), "a,b", None)[0] is FAILED


def test_a_time_that_is_not_known_decides_nothing() -> None:
    conditions = Conditions(if_modified_since=NOW_S, if_unmodified_since=0)
    assert evaluate(conditions, "e", None) == (OK, "")


def test_a_fraction_of_a_second_is_not_later() -> None:
    assert evaluate(Conditions(if_modified_since=NOW_S), "e", NOW_S + 0.9)[0] is SAME
    assert evaluate(Conditions(if_unmodified_since=NOW_S), "e", NOW_S + 0.9)[0] is OK


def test_the_header_that_decided_is_named() -> None:
    assert evaluate(Conditions(if_match="x"), "e", None)[1] == "If-Match"
    assert evaluate(Conditions(if_unmodified_since=0), "e", 5)[1] == "If-Unmodified-Since"
    assert evaluate(Conditions(if_none_match="e"), "e", None)[1] == "If-None-Match"
    assert evaluate(Conditions(if_modified_since=5), "e", 5)[1] == "If-Modified-Since"


def test_writes_where_nothing_is() -> None:
    assert evaluate_write(Conditions(if_none_match="*"), None, None)[0] is OK
    assert evaluate_write(Conditions(if_match="*"), None, None) == (FAILED, "If-Match")
    assert evaluate_write(Conditions(if_none_match="*"), "e", None) == (FAILED, "If-None-Match")
