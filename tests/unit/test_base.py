"""Seeded randomness, units, names, ranges, backoff."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.backoff import backoff_s
from stoker.base.ids import check_name, new_id, new_token
from stoker.base.ranges import ByteRange, UnsatisfiableRange, parse_http_range
from stoker.base.rng import Rng, mix64
from stoker.base.units import format_bytes, format_duration, parse_duration_s, parse_size_bytes


def test_the_random_stream_never_changes() -> None:
    rng = Rng(42)
    assert [rng.below(1000) for _ in range(5)] == [Rng(42).below(1000), *[_nth(42, n) for n in range(1, 5)]]
    assert mix64(1) == 0x5692161D100B05E5


def _nth(seed: int, n: int) -> int:
    rng = Rng(seed)
    for _ in range(n):
        rng.below(1000)
    return rng.below(1000)


@given(st.integers(0, 2**64), st.integers(1, 1000))
def test_below_stays_below(seed: int, bound: int) -> None:
    rng = Rng(seed)
    assert all(0 <= rng.below(bound) < bound for _ in range(20))


def test_shuffle_keeps_the_items_and_forks_differ() -> None:
    rng = Rng(1)
    items = list(range(50))
    rng.shuffle(items)
    assert sorted(items) == list(range(50))
    assert items != list(range(50))
    assert rng.fork(1).next64() != rng.fork(2).next64()


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("20GB", 20 * 10**9), ("20GiB", 20 * 2**30), ("1.5 MB", 1_500_000), ("4k", 4000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1XB", "-1", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("2m", 120.0), ("250ms", 0.25), ("1h", 3600.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_figures_for_people() -> None:
    assert format_bytes(1_500_000) == "1.5 MB"
    assert format_bytes(12) == "12 B"
    assert [format_duration(s) for s in (0.085, 4.2, 200, 7500)] == [
        "85 ms",
        "4.2 s",
        "3 min 20 s",
        "2 h 5 min",
    ]


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a..b", ".a", "-a", "a" * 64, "ä", "a b"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a bucket name"):
        check_name("bucket", name)


def test_ids_and_tokens_differ() -> None:
    assert check_name("bucket", "a.b-c_1") == "a.b-c_1"
    assert new_id("node") != new_id("node")
    assert len(new_token()) >= 40


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", ByteRange(0, 10)),
        ("bytes=90-", ByteRange(90, 100)),
        ("bytes=90-1000", ByteRange(90, 100)),
        ("bytes=-10", ByteRange(90, 100)),
        ("bytes=-1000", ByteRange(0, 100)),
        ("bytes=5-2", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
        ("bytes=-", None),
    ],
)
def test_http_ranges(header: str, expected: ByteRange | None) -> None:
    assert parse_http_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=-0", "bytes=200-300"])
def test_unsatisfiable_ranges(header: str) -> None:
    with pytest.raises(UnsatisfiableRange):
        parse_http_range(header, 100)


def test_backoff_is_bounded_and_jittered() -> None:
    rng = Rng(3)
    waits = [backoff_s(n, rng, first_s=0.1, limit_s=5.0) for n in range(200)]
    assert waits[0] == 0.0
    assert max(waits) < 5.0
    assert len(set(waits)) > 150
