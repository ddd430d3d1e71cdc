"""Blobs' pure cores: their names, their versions, and whose is the newest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cache.blobs.clock import REMOVED, HybridClock, Version, parse_version
from stoker.cache.blobs.keys import parse_target, raw_of, text_of
from stoker.cache.blobs.standing import LEASE_S, Standing, view_of
from stoker.cache.blobs.votes import KEPT_S, Said, Which, judge
from stoker.cache.maglev import Member
from stoker.errors import ConfigError

PARTS = st.sampled_from(
    [b"\xef\x9e\x80", b"\xef", b"\x9e", b"\x80", b"\xed\xb2\x80", b"\xc3\xa9", b"a", b"/", b" ", b"\xff"]
)


@given(st.lists(PARTS | st.binary(max_size=3), max_size=8).map(b"".join))
def test_a_key_is_its_bytes_and_nothing_else(raw: bytes) -> None:
    text = text_of(raw)
    assert raw_of(text) == raw
    assert text.encode().decode() == text  # the index takes it
    if raw.isascii():
        assert text == raw.decode()


def test_targets_that_name_no_blob_are_refused() -> None:
    assert parse_target(b"/blob/b//a?b#c%20 ") == ("b", b"//a?b#c%20 "[1:])
    assert parse_target(b"/blob/b//a").target == b"/blob/b//a"
    for target in (
        b"/blob/",
        b"/blob/b",
        b"/blob/b/",
        b"/blob/\xff/a",
        b"/blob/b/a\0",
        b"/blob/b/" + b"x" * 4097,
    ):
        with pytest.raises(ConfigError):
            parse_target(target)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 4e9), st.integers(0, 16**4 - 1)), max_size=40))
def test_versions_only_grow_whatever_the_clocks_say(steps: list[tuple[bool, float, int]]) -> None:
    clock, last = HybridClock("me"), ""
    for is_observed, now_s, count in steps:
        if is_observed:
            seen = Version(int(now_s * 1000), count, "b", "other")
            clock.observe(seen)
            last = max(last, str(seen))
        else:
            given_one = clock.next(now_s)
            assert str(given_one) > last
            assert parse_version(str(given_one)) == given_one
            last = str(given_one)


def test_a_clock_goes_on_where_its_counter_is_full_and_time_stands_still() -> None:
    clock = HybridClock("me")
    clock.observe(Version(5000, 16**4 - 1, "b", "z"))
    assert clock.next(1.0)[:2] == (5001, 0)
    assert clock.next(1.0, REMOVED)[:3] == (5001, 1, "x")
    assert clock.next(6.0)[:2] == (6000, 0)


@pytest.mark.parametrize(
    "text", ["", "v1", "0.0b.me", "000000000000.0000q.me", "000000000000.0000b.", "000000000000.0000b.a b"]
)
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no version"):
        parse_version(text)


def version(ms: int, kind: str = "b") -> str:
    return str(Version(ms, 0, kind, "a"))


NOW_S = 1e9
OLD, NEW = version(int(NOW_S * 1000) - 2000), version(int(NOW_S * 1000) - 1000)


def judged(
    mine: Said,
    said: dict[str, Said],
    members: str,
    seen: dict[str, float] | None = None,
    *,
    is_confirmed: bool = True,
) -> tuple[Which, str]:
    verdict = judge(mine, said, members.split(), seen or {}, NOW_S, is_confirmed=is_confirmed)
    return verdict.which, verdict.holder


def test_whose_is_the_newest() -> None:
    nothing, mine = Said("", False), Said(OLD, True)
    assert judged(mine, {}, "") == (Which.MINE, "")
    assert judged(mine, {}, "b")[0] is Which.NOBODYS  # of two servers both are asked
    assert judged(mine, {"b": nothing}, "b c") == (Which.MINE, "")
    assert judged(mine, {"b": nothing}, "b c", is_confirmed=False)[0] is Which.NOBODYS  # c may be with others
    assert judged(mine, {"b": nothing, "c": nothing}, "b c", is_confirmed=False) == (Which.MINE, "")
    assert judged(mine, {}, "b c")[0] is Which.NOBODYS
    assert judged(mine, {"b": Said(NEW, False)}, "b c")[0] is Which.NOBODYS
    assert judged(mine, {"b": Said(NEW, True)}, "b c") == (Which.THEIRS, "b")
    assert judged(nothing, {"b": Said(NEW, True), "c": Said(NEW, False)}, "b c") == (Which.THEIRS, "b")
    assert judged(mine, {"b": Said(version(int(NOW_S * 1000), "x"), False)}, "b c")[0] is Which.NOBODYS
    assert judged(Said(OLD, False), {"b": nothing}, "b c")[0] is Which.NOBODYS


def test_servers_that_have_left_the_fleet_may_have_known() -> None:
    nothing, mine = Said("", False), Said(OLD, True)
    assert judged(mine, {"b": nothing}, "b", {"gone": NOW_S})[0] is Which.MINE
    assert judged(mine, {"b": nothing}, "b", {"gone": NOW_S, "too": NOW_S})[0] is Which.NOBODYS
    assert judged(mine, {"b": nothing}, "b", {"gone": NOW_S, "too": NOW_S - 100})[0] is Which.MINE
    ancient = Said(version(int((NOW_S - KEPT_S) * 1000) - 1), True)
    assert judged(ancient, {"b": nothing}, "b")[0] is Which.NOBODYS


def test_promises_and_what_they_forbid() -> None:
    view = view_of([Member("a"), Member("b"), Member("c")])
    assert view != view_of([Member("a"), Member("b", 2), Member("c")])
    standing = Standing("b", 0.0)
    standing.see(view, {"a", "c"}, 0.0)
    assert not standing.promise("a", view, LEASE_S - 0.1)  # nobody knows what it has promised before
    assert "just started" in (standing.objection("b", "b", LEASE_S - 0.1) or "")
    assert standing.objection("b", "b", LEASE_S) is None
    assert not standing.promise("a", "another", 10.0)
    assert not standing.promise("z", view, 10.0)
    assert standing.promise("a", view, 10.0)
    assert standing.objection("c", "a", 13.9) is not None
    assert standing.objection("a", "a", 13.9) is None
    assert standing.objection("b", "b", 13.9) is None
    standing.see("another", {"a", "c"}, 13.0)
    assert not standing.promise("c", "another", 13.9)  # who has it need not ask who else has one
    assert standing.objection("b", "b", 13.9) is not None  # what is whose was another thing then
    assert standing.objection("b", "b", 14.0) is None


def test_a_gap_between_promises_is_another_term() -> None:
    standing = Standing("a", 0.0)
    standing.see("v", {"b", "c", "d"}, 0.0)
    standing.confirm(100.0, 10.0)
    first = standing.term
    standing.promised("b", "v", 10.0, 10.1)
    assert standing.leads_until() < 10.0
    standing.promised("c", "v", 10.0, 10.1)
    assert 13.0 < standing.leads_until() < 14.0
    assert standing.term == first + 1
    standing.promised("d", "other", 11.0, 11.1)
    for name in "bc":
        standing.promised(name, "v", 13.0, 13.1)
    assert standing.term == first + 1
    assert standing.leads_until() > 16.0
    for name in "bc":
        standing.promised(name, "v", 20.0, 20.1)
    assert standing.term == first + 2
    standing.see("w", {"b", "c"}, 21.0)
    assert standing.term == first + 3
    assert standing.leads_until() == 0.0


def test_who_is_not_sure_of_its_fleet_needs_the_promises_of_all() -> None:
    standing = Standing("a", 0.0)
    standing.see("v", {"b", "c"}, 10.0)
    standing.confirm(11.0, 10.0)
    standing.promised("b", "v", 10.0, 10.1)
    assert standing.leads_until() == 11.0
    term = standing.term
    standing.confirm(12.0, 10.5)
    assert (standing.leads_until(), standing.term) == (12.0, term)
    standing.promised("c", "v", 11.5, 11.6)
    assert 13.0 < standing.leads_until() < 14.0  # the earlier one of both
    assert standing.term == term
    standing.promised("b", "v", 13.0, 13.1)
    assert 15.0 <= standing.leads_until() < 15.1
    assert standing.term == term
    standing.promised("b", "v", 18.0, 18.1)
    standing.promised("c", "v", 18.0, 18.1)
    assert standing.term == term + 1


def test_of_two_servers_one_is_enough_as_long_as_there_are_but_two() -> None:
    standing = Standing("a", 0.0)
    standing.see("v", {"b"}, 10.0)
    standing.confirm(12.0, 10.0)
    assert standing.leads_until() == 0.0  # b may be in another fleet
    standing.promised("b", "v", 10.0, 10.1)
    term = standing.term
    standing.confirm(20.0, 11.0)
    assert (standing.leads_until(), standing.term) == (20.0, term)
    standing.see("alone", set(), 19.0)
    standing.confirm(25.0, 19.0)
    assert (standing.leads_until(), standing.term) == (25.0, term)
    standing.see("w", {"new"}, 24.0)
    assert standing.term == term + 1
    assert standing.leads_until() == 0.0
