"""What is told of an object besides, as it is kept."""

from __future__ import annotations

from stoker.cache.store.attributes import ATTRIBUTES_BYTES_MAX, attributes_of, checked, headers_of, told_anew
from stoker.wire.cache_api import ObjectInfo

MODIFIED = "Last-Modified: Thu, 01 Jan 1970 00:00:05 GMT\r\n"


def test_what_cannot_be_sent_as_it_is_is_left_out_and_nothing_else() -> None:
    headers = (
        ("content-type", "text/x"),
        ("x-amz-meta-name", "\u00e9"),
        ("x-amz-meta-line", "a\r\nSet-Cookie: b"),
        ("x-amz-meta-long", "a" * ATTRIBUTES_BYTES_MAX),
        ("server", "origin"),
        ("x-amz-meta-good", "b"),
    )
    told = attributes_of(ObjectInfo("k", 1, "v", 5.0, headers))
    assert told == f"{MODIFIED}content-type: text/x\r\nx-amz-meta-good: b\r\n"
    assert checked(told) == told


def test_what_nobody_was_asked_is_nothing_and_what_says_nothing_is_something() -> None:
    assert attributes_of(ObjectInfo("k", 1, "v", 5.0, None)) == ""
    assert attributes_of(ObjectInfo("k", 1, "v")) == "content-type: application/octet-stream\r\n"
    assert headers_of("") == [("Content-Type", "application/octet-stream")]


def test_an_origin_that_says_nothing_of_content_takes_nothing_back() -> None:
    before = "content-type: a\r\n"
    assert told_anew(MODIFIED, before) == before
    assert told_anew("", before) == before
    assert told_anew(f"{MODIFIED}content-type: b\r\n", before) == f"{MODIFIED}content-type: b\r\n"
    assert told_anew(MODIFIED, "") == MODIFIED
