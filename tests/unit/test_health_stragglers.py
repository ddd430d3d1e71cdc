"""Straggler scores of running workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.job.health_stragglers import StragglerChange, StragglerScores

STEP_S = 0.5


class Run:
    """A world whose ranks' own work per step is given; reports come once a second, two steps each."""

    def __init__(self, ranks: int, **options: float) -> None:
        self.scores = StragglerScores(**options)  # type: ignore[arg-type]
        self.workers = {f"w{rank}": rank for rank in range(ranks)}
        self.scores.begin_world(self.workers)
        self.busy_s = dict.fromkeys(self.workers, 0.0)
        self.commits = 0
        self.now = 0.0

    def go(self, seconds: int, *own_s: float) -> list[StragglerChange]:
        changes = []
        for _ in range(seconds):
            self.now += 1.0
            self.commits += 2
            for worker, rank in self.workers.items():
                self.busy_s[worker] += 2 * own_s[rank]
                self.scores.observe(worker, self.commits, self.busy_s[worker])
            changes += self.scores.tick(self.now)
        return changes


def test_a_slow_rank_is_told_once_with_its_reason() -> None:
    run = Run(4)
    assert run.go(20, 0.2, 0.2, 0.2, 0.38) == [], "not before the window is over"
    (change,) = run.go(60, 0.2, 0.2, 0.2, 0.38)
    assert (change.worker, change.slow) == ("w3", True)
    assert change.why.startswith("rank 3 takes 1.9 x the median's 0.2 s a step for ")
    assert run.scores.stragglers == {"w3"}
    assert run.scores.scores()["w3"] == pytest.approx(1.9)


def test_it_is_released_only_well_below_the_bound() -> None:
    run = Run(3)
    run.go(60, 0.2, 0.2, 0.4)
    assert run.scores.stragglers == {"w2"}
    assert run.go(120, 0.2, 0.2, 0.27) == [], "1.35 x: neither slow nor well"
    (change,) = run.go(120, 0.2, 0.2, 0.2)
    assert (change.worker, change.slow) == ("w2", False)
    assert "a step again for" in change.why


def test_a_hiccup_is_no_verdict() -> None:
    run = Run(3)
    run.go(60, 0.2, 0.2, 0.2)
    assert run.go(5, 0.2, 0.2, 2.0) == []
    assert run.go(120, 0.2, 0.2, 0.2) == []


def test_slow_first_steps_count_for_nobody() -> None:
    run = Run(3)
    run.go(3, 0.2, 0.2, 30.0)
    run.go(1, 0.2, 0.2, 0.2)
    assert run.scores.scores()["w2"] == pytest.approx(1.0)


def test_both_windows_must_pass() -> None:
    slow_steps = Run(3, window_steps=1000)
    assert slow_steps.go(300, 0.2, 0.2, 0.4) == []
    short = Run(3, window_s=500.0)
    assert short.go(300, 0.2, 0.2, 0.4) == []


def test_in_a_world_of_two_nobody_is_judged() -> None:
    run = Run(2)
    assert run.go(300, 0.2, 2.0) == []


def test_a_new_world_starts_the_averages_anew_and_forgets_who_left() -> None:
    run = Run(4)
    run.go(60, 0.2, 0.2, 0.4, 0.2)
    assert run.scores.stragglers == {"w2"}
    run.scores.begin_world({"w0": 0, "w1": 1, "w2": 2})
    assert run.scores.scores() == {}
    assert run.scores.stragglers == {"w2"}, "still slow until it proves otherwise"
    run.scores.begin_world({"w0": 0, "w1": 1, "w9": 2})
    assert run.scores.stragglers == set()


def test_reports_of_strangers_and_of_an_older_life_are_ignored() -> None:
    scores = StragglerScores()
    scores.begin_world({"w0": 0})
    scores.observe("stranger", 5, 1.0)
    scores.observe("w0", 10, 5.0)
    scores.observe("w0", 20, 7.0)
    scores.observe("w0", 30, 9.0)
    assert scores.scores() == {"w0": 1.0}
    scores.observe("w0", 0, 0.0)
    assert scores.scores() == {}


@settings(deadline=None)
@given(
    own_ms=st.lists(st.integers(10, 1000), min_size=3, max_size=9),
    seed=st.integers(0, 2**32),
)
def test_lost_and_doubled_reports_change_no_verdict(own_ms: list[int], seed: int) -> None:
    rng = Rng(seed)
    scores = StragglerScores()
    scores.begin_world({f"w{rank}": rank for rank in range(len(own_ms))})
    for second in range(1, 200):
        for rank, own in enumerate(own_ms):
            for _ in range(rng.below(3)):
                scores.observe(f"w{rank}", second * 2, second * 2 * own / 1000)
        scores.tick(float(second))
    middle = (
        sorted(own_ms)[len(own_ms) // 2]
        if len(own_ms) % 2
        else sum(sorted(own_ms)[len(own_ms) // 2 - 1 :][:2]) / 2
    )
    for rank, own in enumerate(own_ms):
        if abs(own / middle - 1.5) > 1e-6:
            assert (f"w{rank}" in scores.stragglers) == (own / middle > 1.5)
