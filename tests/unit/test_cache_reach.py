"""Whether a source can be reached: what one has found out the others need not wait for."""

from __future__ import annotations

from stoker.cache.reach import AWAY_S, NAMES_MIN, TRIES_MAX, TRY_EVERY_S, Reach


def all_fail(reach: Reach, asked_at: float, now: float) -> None:
    for number in range(NAMES_MIN):
        reach.failed(f"name {number}", asked_at, now)


def test_it_is_away_for_a_while_after_a_failure_and_not_after_an_answer() -> None:
    reach = Reach()
    assert not reach.is_away("x", 0.0)
    all_fail(reach, 0.0, 2.0)
    assert reach.is_away("x", 2.0 + AWAY_S)
    assert not reach.is_away("x", 2.1 + AWAY_S)
    all_fail(reach, 20.0, 22.0)
    reach.answered(19.0)
    assert reach.is_away("x", 22.0), "that one was asked before"
    reach.answered(20.0)
    assert not reach.is_away("x", 22.0)


def test_a_name_that_fails_beside_others_that_do_not_says_nothing() -> None:
    reach = Reach()
    reach.answered(1.0)
    all_fail(reach, 0.0, 2.0)
    assert not reach.is_away("x", 2.0)
    for at in range(10, 20):
        reach.failed("broken", float(at), at + 1.0)
        assert reach.is_away("broken", at + 1.0)
        assert not reach.is_away("x", at + 1.0), "it may be nothing but that name"


def test_what_failed_long_ago_is_forgotten() -> None:
    reach = Reach()
    for number in range(1000):
        reach.failed(str(number), float(number), float(number))
    assert reach.is_away("x", 1000.0)
    reach.answered(998.0)
    assert not reach.is_away("x", 1000.0)


def test_one_a_second_tries_it() -> None:
    reach = Reach()
    all_fail(reach, 0.0, 2.0)
    assert [reach.tries(2.0 + n * TRY_EVERY_S / 4) for n in range(9)] == [n % 4 == 0 for n in range(9)]
    assert reach.is_away("x", 1000.0), "as long as they wait"
    for _ in range(3):
        reach.tried()
    assert not reach.is_away("x", 1000.0)
    count = sum(reach.tries(1000.0 + 2 * n) for n in range(2 * TRIES_MAX))
    assert count == TRIES_MAX
