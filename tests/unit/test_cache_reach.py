"""Whether a source can be reached: what one has found out the others need not wait for."""

from __future__ import annotations

from stoker.cache.reach import AWAY_S, TRIES_MAX, TRY_EVERY_S, Reach


def test_it_is_away_for_a_while_after_a_failure_and_not_after_an_answer() -> None:
    reach = Reach()
    assert not reach.is_away(0.0)
    reach.failed(0.0, 2.0)
    assert reach.is_away(2.0 + AWAY_S)
    assert not reach.is_away(2.1 + AWAY_S)
    reach.failed(20.0, 22.0)
    reach.answered(19.0)
    assert reach.is_away(22.0), "that one was asked before"
    reach.answered(20.0)
    assert not reach.is_away(22.0)


def test_a_name_that_fails_beside_others_that_do_not_says_nothing() -> None:
    reach = Reach()
    reach.answered(1.0)
    reach.failed(0.0, 2.0)
    assert not reach.is_away(2.0)


def test_one_a_second_tries_it() -> None:
    reach = Reach()
    reach.failed(0.0, 2.0)
    assert [reach.tries(2.0 + n * TRY_EVERY_S / 4) for n in range(9)] == [n % 4 == 0 for n in range(9)]
    assert reach.is_away(1000.0), "as long as they wait"
    for _ in range(3):
        reach.tried()
    assert not reach.is_away(1000.0)
    count = sum(reach.tries(1000.0 + 2 * n) for n in range(2 * TRIES_MAX))
    assert count == TRIES_MAX
