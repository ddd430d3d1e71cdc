"""Listings beside a model of them that has all keys before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.server.s3.listing import Lister, Page, lister_of, token_of
from stoker.cache.server.s3.operation_types import ListObjects, ListObjectsV2, ListObjectVersions
from stoker.wire.cache_api import ObjectInfo

LETTERS = [*"ab/!~ä\U0010ffff", "//", "ab"]
NAMES = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=6).map("".join)
MAYBE = st.one_of(st.just(""), NAMES)
DELIMITERS = st.sampled_from(["", "/", "//", "a", "ab", "\U0010ffff"])


class Origin:
    """Sorted pages, as an origin's `list` gives them."""

    def __init__(self, keys: Sequence[str], page_size: int = 1000) -> None:
        self.keys = sorted(set(keys))
        self.page_size = page_size
        self.asked = 0
        self.sent = 0

    def serve(self, lister: Lister) -> Page:
        while (ask := lister.ask) is not None:
            found = [
                key
                for key in self.keys
                if key.startswith(ask.prefix) and (ask.after is None or key > ask.after)
            ]
            limit = min(ask.limit, self.page_size)
            self.asked += 1
            self.sent += len(found[:limit])
            assert self.asked < 500, "it asks for ever"
            objects = [ObjectInfo(key, len(key), "v") for key in found[:limit]]
            lister.feed(objects, is_last=len(found) <= limit)
        return lister.page()


def model(
    keys: Sequence[str], prefix: str, delimiter: str, after: str, max_keys: int
) -> tuple[list[str], list[str], bool]:
    """Keys, common prefixes, and whether there are more."""
    entries: dict[str, bool] = {}
    for key in sorted(set(keys)):
        if not key.startswith(prefix):
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        entries[prefix + head + found if found else key] = bool(found)
    rest = sorted(entry for entry in entries if entry > after)
    page = rest[:max_keys]
    return (
        [entry for entry in page if not entries[entry]],
        [entry for entry in page if entries[entry]],
        bool(max_keys) and len(rest) > max_keys,
    )


@settings(max_examples=400, deadline=None)
@given(
    st.lists(NAMES, max_size=25),
    MAYBE,
    DELIMITERS,
    MAYBE,
    st.integers(0, 6),
    st.sampled_from([1, 2, 3, 1000]),
)
@example(["a/b", "a/c", "b"], "", "/", "a/", 1, 1)
@example(["a/b", "a/c", "b"], "", "/", "a/b", 1, 1)
@example(["a/\U0010ffff\U0010ffffa", "a/\U0010ffffb"], "", "/", "", 1, 1)
@example(["a/"], "a/", "/", "", 1, 1)
@example(["a/"], "a", "/", "", 1, 1)
def test_a_page_is_that_of_the_model(
    keys: list[str], prefix: str, delimiter: str, after: str, max_keys: int, page_size: int
) -> None:
    page = Origin(keys, page_size).serve(Lister(prefix, delimiter, after, max_keys))
    expected = model(keys, prefix, delimiter, after, max_keys)
    assert ([info.key for info in page.objects], page.common_prefixes, page.is_truncated) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(NAMES, max_size=25),
    MAYBE,
    DELIMITERS,
    st.integers(1, 4),
    st.sampled_from(["1", "2", "versions"]),
)
def test_page_after_page_gives_each_entry_once(
    keys: list[str], prefix: str, delimiter: str, max_keys: int, kind: str
) -> None:
    origin, entries, last, token = Origin(keys, 3), [], "", None
    while True:
        common = {"bucket": "b", "prefix": prefix, "delimiter": delimiter, "max_keys": max_keys}
        if kind == "1":
            operation = ListObjects(**common, marker=last)
        elif kind == "2":
            operation = ListObjectsV2(**common, continuation_token=token)
        else:
            operation = ListObjectVersions(**common, key_marker=last)
        page = origin.serve(lister_of(operation))
        entries += sorted([info.key for info in page.objects] + page.common_prefixes)
        if not page.is_truncated:
            break
        last, token = page.last, token_of(operation, page.last)
        assert last == entries[-1]
    found, prefixes, _ = model(keys, prefix, delimiter, "", 10_000)
    assert entries == sorted(found + prefixes)


def test_what_lies_below_a_common_prefix_is_skipped() -> None:
    keys = [f"{folder}/{number:05}" for folder in "abc" for number in range(20_000)]
    origin = Origin(keys)
    page = origin.serve(Lister("", "/", "", 1000))
    assert page.common_prefixes == ["a/", "b/", "c/"]
    assert not page.is_truncated
    assert (origin.asked, origin.sent) == (4, 3000)


def test_a_marker_below_a_common_prefix_skips_it_at_once() -> None:
    keys = [f"{folder}/{number:05}" for folder in "ab" for number in range(3000)]
    origin = Origin(keys)
    assert origin.serve(Lister("", "/", "a/00001", 1000)).common_prefixes == ["b/"]
    assert origin.asked == 2


def test_a_name_that_would_be_too_long_is_not_asked_for() -> None:
    folder = "f" * 1020 + "/"
    origin = Origin([f"{folder}a", f"{folder}b", f"{folder}c", "g"], page_size=1)
    lister = Lister("", "/", "", 1000)
    lister.feed([ObjectInfo(f"{folder}a", 1, "v")], is_last=False)
    assert lister.ask is not None
    assert lister.ask.after == f"{folder}a"
    page = origin.serve(Lister("", "/", "", 1000))
    assert (page.common_prefixes, len(page.objects)) == ([folder], 1)


def test_no_more_is_asked_for_than_is_needed() -> None:
    origin = Origin([f"{number:05}" for number in range(3000)])
    page = origin.serve(Lister("", "", "", 10))
    assert page.is_truncated
    assert (origin.asked, origin.sent) == (1, 11)


def test_no_keys_are_asked_for() -> None:
    origin = Origin(["a"])
    assert origin.serve(Lister("", "", "", 0)) == Page([], [], False, "", False)
    assert origin.asked == 0


def test_start_after_counts_only_for_the_first_page() -> None:
    keys = ["a", "b", "c"]
    first = ListObjectsV2(bucket="b", max_keys=1, start_after="a")
    page = Origin(keys).serve(lister_of(first))
    assert [info.key for info in page.objects] == ["b"]
    token = token_of(first, page.last)
    later = ListObjectsV2(bucket="b", max_keys=1, start_after="zzz", continuation_token=token)
    assert [info.key for info in Origin(keys).serve(lister_of(later)).objects] == ["c"]


@pytest.mark.parametrize("key", ["a", "ä/雪", "\U0010ffff", "x" * 1024])
def test_a_token_that_was_changed_is_refused(key: str) -> None:
    operation = ListObjectsV2(bucket="b", prefix="p")
    token = token_of(operation, key)
    assert token.isascii()
    lister_of(ListObjectsV2(bucket="b", prefix="p", continuation_token=token))
    for at in range(0, len(token), 7):
        other = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        refused(ListObjectsV2(bucket="b", prefix="p", continuation_token=other))


def refused(operation: ListObjectsV2) -> None:
    with pytest.raises(S3Refusal) as error:
        lister_of(operation)
    assert error.value.code == "InvalidArgument"


def test_an_empty_token_is_that_of_the_first_page() -> None:
    lister = lister_of(ListObjectsV2(bucket="b", start_after="k", continuation_token=""))
    assert lister.ask is not None
    assert lister.ask.after == "k"


@pytest.mark.parametrize("token", ["x", "AAAA", "ü", "=" * 9, "A" * 400, "a b"])
def test_what_is_no_token_is_refused(token: str) -> None:
    refused(ListObjectsV2(bucket="b", continuation_token=token))


def test_a_token_is_of_its_listing() -> None:
    token = token_of(ListObjectsV2(bucket="b", prefix="p", delimiter="/"), "key")
    refused(ListObjectsV2(bucket="c", prefix="p", delimiter="/", continuation_token=token))
    refused(ListObjectsV2(bucket="b", prefix="q", delimiter="/", continuation_token=token))
    refused(ListObjectsV2(bucket="b", prefix="p", delimiter="", continuation_token=token))
    refused(ListObjectsV2(bucket="b", prefix="p/", delimiter="", continuation_token=token))
