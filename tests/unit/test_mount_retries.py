"""When what has ended is started anew."""

from __future__ import annotations

from stoker.cache.mount.retries import Retries


def test_the_sooner_it_ends_the_later_it_is_started() -> None:
    again = Retries((0.0, 1.0, 5.0), 10.0)
    assert not again.takes(0.0)
    assert [again.ended(now, was_ready=True) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 1.0, 5.0, 5.0]
    assert again.at == 8.0
    assert not again.takes(7.9)
    assert again.takes(8.0)
    assert not again.takes(9.0), "once"
    assert again.ended(30.0, was_ready=True) == 0.0, "it had lasted"


def test_what_was_never_ready_is_counted() -> None:
    again = Retries((0.0, 1.0, 5.0), 10.0)
    for number in range(1, 5):
        again.ended(number * 100.0, was_ready=False)
        assert again.failures == number
    assert again.ended(1000.0, was_ready=False) == 5.0, "however long each took"
    again.ended(1001.0, was_ready=True)
    assert again.failures == 0
