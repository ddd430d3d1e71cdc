"""Seeded worlds around the cache's pure cores."""

from __future__ import annotations

import pytest

from stoker.cache.flight import Cancelled, Decision, FlightTable
from tests.sim.cache_world import run_world


def test_a_thousand_worlds_keep_the_invariants() -> None:
    lines = [run_world(seed) for seed in range(1000)]
    assert any(" 0 evicted" not in line for line in lines)
    assert any(" 0 cancelled" not in line for line in lines)


def test_a_world_is_a_function_of_its_seed() -> None:
    assert [run_world(seed) for seed in range(50)] == [run_world(seed) for seed in range(50)]


def test_the_world_notices_a_flight_that_forgets_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FlightTable.step

    def forgetful(self: FlightTable, event: object) -> Decision:
        decision = original(self, event)
        return Decision((), "forgot") if isinstance(event, Cancelled) else decision

    monkeypatch.setattr(FlightTable, "step", forgetful)
    with pytest.raises(AssertionError, match=r"cache world \d+: .*the last events"):
        _ = [run_world(seed) for seed in range(300)]
