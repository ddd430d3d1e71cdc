"""Windows, curves and plain advice: what is measured, what follows from it, and how sure that is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.errors import ConfigError
from stoker.job.scaling_advice import Advice, Limits, recommend
from stoker.job.scaling_curve import Band, band, fit
from stoker.job.scaling_model import (
    Curve,
    Measured,
    Meter,
    Pause,
    Window,
    measure,
    median_and_error,
    scaling_efficiency,
)

AMDAHL = Curve(shared_s=0.9, fixed_s=0.1, each_s=0.0)
SLOWER = Curve(shared_s=0.9, fixed_s=0.05, each_s=0.05)
curves = st.builds(
    Curve, shared_s=st.floats(0.01, 1), fixed_s=st.floats(0.001, 0.5), each_s=st.floats(0, 0.1)
)
some_sizes = st.lists(st.integers(1, 64), min_size=2, max_size=7, unique=True)


def window(nodes: int, step_s: float, *, steps: int = 100, ended: float = 1e4) -> Window:
    return Window(1, nodes, steps, steps * step_s, ended)


def windows_of(curve: Curve, sizes: list[int], each: int = 5) -> list[Window]:
    return [window(n, curve.step_s(n)) for n in sizes for _ in range(each)]


# -- windows and pauses ----------------------------------------------------------------------------------------


def test_pauses_are_kept_apart_from_windows() -> None:
    meter = Meter(window_s=10)
    got: list[Window | Pause] = []

    def say(generation: int, nodes: int, commits: int, now: float) -> None:
        ended = meter.note(generation=generation, nodes=nodes, commits=commits, now=now)
        if ended is not None:
            got.append(ended)

    for second in range(36):  # 10 steps a second
        say(1, 2, second * 10, float(second))
    say(2, 3, 350, 40.0)  # it stood still from 35 s on
    say(2, 3, 350, 41.0)
    say(2, 3, 351, 42.0)
    for second in range(43, 60):
        say(2, 3, 351 + (second - 42) * 20, float(second))
    assert [type(g).__name__ for g in got] == ["Window", "Window", "Window", "Pause", "Window"]
    assert [round(g.seconds, 3) for g in got] == [10, 10, 10, 6.9, 10]
    assert got[0] == Window(1, 2, 100, 10.0, 11.0)
    assert got[3] == Pause(2, 2, 3, pytest.approx(6.9), 42.0)  # 7 s less the step that was made in them
    assert (got[4].nodes, got[4].steps) == (3, 200)  # type: ignore[union-attr]


def test_steps_that_are_lost_count_for_nothing() -> None:
    meter = Meter(window_s=1, warmup_steps=0)
    notes = [(0, 0.0), (5, 1.0), (10, 2.0), (3, 3.0), (8, 4.0), (13, 5.0)]
    got = [meter.note(generation=1, nodes=1, commits=c, now=now) for c, now in notes]
    assert [g and (type(g).__name__, g.seconds) for g in got] == [
        None,
        None,
        ("Window", 1.0),
        None,
        ("Pause", 1.0),
        None,
    ]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 50), st.floats(0, 30)), max_size=60
    )
)
def test_whatever_is_reported_windows_are_sane(notes: list[tuple[int, int, int, float]]) -> None:
    meter, now = Meter(window_s=5), 0.0
    for generation, nodes, commits, passed in notes:
        now += passed
        ended = meter.note(generation=generation, nodes=nodes, commits=commits, now=now)
        if isinstance(ended, Window):
            assert ended.steps >= 3
            assert 5 <= ended.seconds <= now
        elif ended is not None:
            assert 0 <= ended.seconds <= now


# -- medians and curves ----------------------------------------------------------------------------------------


def test_an_outlier_moves_neither_the_median_nor_its_error() -> None:
    calm = median_and_error([1.0, 1.01, 0.99, 1.02, 0.98])
    upset = median_and_error([1.0, 1.01, 0.99, 1.02, 50.0])
    assert upset[0] == pytest.approx(calm[0], rel=0.02)
    assert upset[1] < 0.05


@given(st.integers(0, 2**32), st.integers(4, 30))
@settings(max_examples=20)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(seed: int, count: int) -> None:
    rng = Rng(seed)
    held = 0
    for _ in range(200):
        middle, error = median_and_error(
            [1 + 0.1 * sum(rng.uniform(-1, 1) for _ in range(6)) for _ in range(count)]
        )
        held += abs(middle - 1) <= error
    assert held >= 0.8 * 200


def test_a_size_counts_once_it_has_enough_windows() -> None:
    measured = measure([*windows_of(AMDAHL, [1, 4], each=4), *[window(8, 0.2)] * 3])
    assert [(m.nodes, m.windows) for m in measured] == [(1, 4), (4, 4)]
    assert measured[1].step_s == pytest.approx(0.325)
    assert measured[1].error_s == pytest.approx(0.00325)


@given(curves, st.lists(st.integers(1, 64), min_size=3, max_size=7, unique=True))
def test_three_sizes_without_noise_give_the_curve_back(curve: Curve, sizes: list[int]) -> None:
    assume(max(sizes) >= 2 * min(sizes))
    fitted = fit(measure(windows_of(curve, sizes)))
    for nodes in sizes:
        assert fitted.step_s(nodes) == pytest.approx(curve.step_s(nodes), rel=0.005)


@given(curves, some_sizes, st.integers(1, 128))
def test_the_band_holds_the_truth_and_the_fit(curve: Curve, sizes: list[int], nodes: int) -> None:
    measured = measure(windows_of(curve, sizes))
    fitted = fit(measured)
    low, high = band(measured, fitted).step_s(nodes)
    assert low * (1 - 1e-6) <= curve.step_s(nodes) <= high * (1 + 1e-6)
    assert low * (1 - 1e-6) <= fitted.step_s(nodes) <= high * (1 + 1e-6)


def test_what_two_sizes_leave_open_shows_far_from_them() -> None:
    measured = measure(windows_of(AMDAHL, [1, 2]))
    allowed = band(measured, fit(measured))

    def width(of: Band, nodes: int) -> float:
        low, high = of.step_s(nodes)
        return high / low - 1

    assert width(allowed, 2) < 0.03 < 0.5 < width(allowed, 8)
    more = measure(windows_of(AMDAHL, [1, 2, 4, 8]))
    assert width(band(more, fit(more)), 8) < 0.03


def test_measurements_that_no_curve_fits_widen_the_band() -> None:
    measured = [Measured(1, 1.0, 0.01, 5), Measured(2, 0.4, 0.004, 5), Measured(4, 0.6, 0.006, 5)]
    curve = fit(measured)
    for m in measured:
        low, high = band(measured, curve).step_s(m.nodes)
        assert low <= curve.step_s(m.nodes) <= high
    with pytest.raises(ValueError, match="at least 2"):
        band(measured[:1], curve)


@given(curves)
def test_efficiency_falls_as_worlds_grow_while_it_is_positive(curve: Curve) -> None:
    shares = [curve.efficiency(n, n + 1) for n in range(1, 40)]
    for before, after in pairwise(shares):
        assert after <= before + 1e-9 or before <= 0


def test_on_amdahls_curve_efficiency_is_the_shared_part_of_the_larger_worlds_step() -> None:
    for before in (1, 2, 5):
        assert AMDAHL.efficiency(before, 9) == pytest.approx(0.1 / AMDAHL.step_s(9))
    assert scaling_efficiency(2, 4, 2.0) == 1
    assert scaling_efficiency(2, 4, 1.0) == 0


# -- advice ----------------------------------------------------------------------------------------------------

TABLE = """
measured   curve    min:max:unit  there  target | nodes  kind     sure
1          amdahl   1:8:1         8      0.5    | 2      explore  0.00
1          amdahl   1:8:1         1      0.5    | 1      keep     1.00
1,2        amdahl   1:8:1         8      0.5    | 4      grow     0.73
2,1        amdahl   1:8:1         8      0.5    | 4      grow     0.73
1,2,4      amdahl   1:64:1        64     0.5    | 8      grow     0.82
1,2,4,8    amdahl   1:64:1        64     0.5    | 8      keep     0.98
1,2,4,8    amdahl   1:64:1        64     0.2    | 16     grow     0.88
1,2,4,8    amdahl   1:64:1        64     0.9    | 1      shrink   0.98
1,2,4      slower   1:64:1        64     0.5    | 2      shrink   0.98
1,2,4,8    slower   1:64:1        64     0.5    | 2      shrink   0.98
1,2,4      amdahl   1:64:1        4      0.5    | 4      keep     0.98
1,2,4      amdahl   1:4:1         9      0.5    | 4      keep     0.98
2,4        amdahl   2:64:2        7      0.5    | 6      grow     0.85
3          amdahl   2:64:2        7      0.5    | 2      shrink   0.00
"""


def advice_for(sizes: str, name: str, limits: str, available: str, target: str) -> Advice:
    curve = {"amdahl": AMDAHL, "slower": SLOWER}[name]
    low, high, unit = map(int, limits.split(":"))
    return recommend(
        windows_of(curve, [int(n) for n in sizes.split(",")]),
        Limits(low, high, unit, int(available)),
        target_efficiency=float(target),
        now=1e5,
    )


@pytest.mark.parametrize("line", TABLE.strip().splitlines()[1:])
def test_the_advice_can_be_read_in_a_table(line: str) -> None:
    """Amdahl's curve has steps of 1, 0.55, 0.325, 0.2125 s on 1, 2, 4, 8 nodes, the other 0.95, 0.55, 0.425, 0.5125."""
    asked, _, expected = line.partition(" | ")
    advice = advice_for(*asked.split())
    assert [str(advice.nodes), advice.kind, f"{advice.confidence:.2f}"] == expected.split()


def test_a_run_that_only_gets_slower_is_brought_to_its_smallest_size() -> None:
    windows = [window(n, 1.0 * (n - 1)) for n in (2, 4) for _ in range(5)]
    advice = recommend(windows, Limits(1, 8, 1, 8), now=1e5)
    assert (advice.nodes, advice.kind) == (1, "shrink")


def test_a_prediction_says_how_fast_and_how_sure() -> None:
    advice = advice_for("1,2,4", "amdahl", "1:64:1", "64", "0.5")
    assert advice.predicted_speedup == pytest.approx(AMDAHL.speedup(4, 8), rel=0.05)
    assert 0.8 < advice.confidence < 1.0


limits_ = st.builds(
    lambda low, more, unit, available: Limits(low * unit, (low + more) * unit, unit, available),
    st.integers(1, 4),
    st.integers(0, 16),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 80),
)


@given(curves, some_sizes, limits_, st.floats(0.01, 1))
def test_advice_keeps_to_the_limits(curve: Curve, sizes: list[int], limits: Limits, target: float) -> None:
    for measured in (sizes, sizes[:1], []):
        advice = recommend(windows_of(curve, measured), limits, target_efficiency=target, now=1e5)
        assert advice.nodes in limits.sizes()
        assert advice.nodes % limits.unit == 0
        assert advice.nodes <= max(limits.available, limits.every_size()[0])


@given(curves, some_sizes, st.floats(0.01, 1), st.floats(0.01, 1))
def test_who_asks_for_more_efficiency_never_gets_more_nodes(
    curve: Curve, sizes: list[int], one: float, other: float
) -> None:
    windows, limits = windows_of(curve, sizes), Limits(1, 64, 1, 64)
    low, high = (
        recommend(windows, limits, target_efficiency=t, now=1e5).nodes
        for t in (min(one, other), max(one, other))
    )
    assert low >= high


@given(curves, some_sizes, st.integers(1, 64), st.integers(1, 64))
def test_who_has_more_nodes_never_gets_fewer(curve: Curve, sizes: list[int], one: int, other: int) -> None:
    windows, here = windows_of(curve, sizes), sizes[-1]
    few, many = (
        recommend(windows, Limits(1, 64, 1, max(here, n)), now=1e5).nodes
        for n in (min(one, other), max(one, other))
    )
    assert few <= many


def test_a_target_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target efficiency 1\.5"):
        recommend([], Limits(1, 2), target_efficiency=1.5, now=0)


def test_limits_without_any_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 3 and 4 nodes there is no multiple of 5"):
        Limits(3, 4, 5)
    assert list(Limits(3, 9, 2, 7).sizes()) == [4, 6]
    assert list(Limits(3, 9, 2, 1).sizes()) == [4], "never below the minimum"
