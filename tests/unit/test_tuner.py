"""The tuner against made-up machines: it finds what is fastest, believes measurements only, and remembers failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.train.tuner import (
    Bounds,
    Decision,
    Known,
    Measurement,
    Setting,
    Tuner,
    combine,
    steps_to_measure,
    tightest,
)

GIB = 1 << 30


def machine(
    *,
    decode_s: float = 0.0,
    pass_s: float = 0.0,
    record_s: float = 0.001,
    record_bytes: int = 0,
    share: int = 64,
    noise: float = 0.0,
    seed: int = 1,
) -> Callable[[Setting], Measurement]:
    """Steps of a rank: records are decoded in `decode_s` each, by the loop itself or by workers ahead of it; a pass
    costs `pass_s`, and `record_s` for each record."""
    rng = Rng(seed)

    def measure(setting: Setting) -> Measurement:
        micro = setting.micro_batch or share
        compute_s = -(-share // micro) * pass_s + share * record_s
        workers = setting.num_workers
        wait_s = share * decode_s if workers == 0 else max(0.0, share * decode_s / workers - compute_s)
        scale = 1 + noise * rng.uniform(-1, 1)
        resident = GIB
        return Measurement(
            step_s=(compute_s + wait_s) * scale,
            error_s=noise * (compute_s + wait_s) / 2,
            wait_s=wait_s * scale,
            share=share,
            peak_bytes=resident + min(micro, share) * record_bytes,
            resident_bytes=resident,
        )

    return measure


def tune(tuner: Tuner, measure: Callable[[Setting], Measurement]) -> list[str]:
    """Let it run to its end; returns what it said."""
    decision, said = Decision(tuner.best, ""), []
    while not decision.done:
        decision = tuner.step(measure(decision.setting))
        said.append(decision.why)
        assert len(said) < 40, said
    assert decision.setting == tuner.best
    return said


def test_workers_are_added_while_the_loop_waits_for_data() -> None:
    tuner = Tuner(Setting(0), Bounds(max_workers=8))
    assert tune(tuner, machine(decode_s=0.0006)) == [
        "trying loader workers 0 → 2: 38% of the step is waiting for data",
        "loader workers 0 → 2: waiting for data fell from 38% to 0% of the step, and the step takes 0.63 of the time; "
        "nothing left to try with 2 loader workers",
    ]
    assert tuner.best == Setting(2)


def test_workers_stop_at_the_cores_of_the_rank() -> None:
    tuner = Tuner(Setting(0), Bounds(max_workers=3))
    said = tune(tuner, machine(decode_s=0.01))
    assert tuner.best == Setting(3)
    assert [line.split(":")[0] for line in said] == [
        "trying loader workers 0 → 2",
        "loader workers 0 → 2",
        "loader workers 2 → 3",
    ]


def test_workers_that_do_not_help_are_taken_back_and_not_tried_again() -> None:
    def storage_bound(setting: Setting) -> Measurement:
        return Measurement(step_s=0.1, error_s=0.001, wait_s=0.05, share=64)

    tuner = Tuner(Setting(2), Bounds(max_workers=8))
    assert tune(tuner, storage_bound) == [
        "trying loader workers 2 → 4: 50% of the step is waiting for data",
        "loader workers 2 → 4 taken back: the step takes 1.00 of the time",
        "nothing left to try with 2 loader workers",
    ]


def test_fewer_passes_while_they_make_the_step_faster() -> None:
    tuner = Tuner(Setting(0, micro_batch=4), Bounds(max_workers=8))
    said = tune(tuner, machine(pass_s=0.01, record_s=0.002))
    assert tuner.best == Setting(0, 64)
    assert said[0] == "trying micro-batch 4 → 8: now 16 passes make a step"
    assert said[1].startswith("micro-batch 4 → 8: the step takes 0.72 of the time; trying micro-batch 8 → 16")
    assert said[-1].endswith("nothing left to try with 0 loader workers, micro-batch 64")


def test_a_whole_share_in_one_pass_is_never_cut() -> None:
    tuner = Tuner(Setting(0), Bounds(max_workers=8))
    assert tune(tuner, machine(pass_s=0.01)) == ["nothing left to try with 0 loader workers"]


def test_a_larger_pass_that_would_not_fit_is_not_tried() -> None:
    tuner = Tuner(Setting(0, 8), Bounds(max_workers=8, memory_bytes=8 * GIB))
    said = tune(tuner, machine(pass_s=0.01, record_bytes=GIB // 8))  # 8 records: 2 GiB, 32: 5, 64: 9
    assert tuner.best == Setting(0, 32)
    assert said[-1].endswith("micro-batch stays at 32: 64 would need about 9.66 GB of 8.59 GB")


def test_out_of_memory_is_taken_back_and_remembered() -> None:
    tuner, fits = Tuner(Setting(0, 8), Bounds(max_workers=8)), machine(pass_s=0.01)
    trying = tuner.step(fits(tuner.best))
    assert trying.setting == Setting(0, 16)
    failed = tuner.out_of_memory()
    assert failed is not None
    assert (failed.setting, failed.why) == (
        Setting(0, 8),
        "micro-batch 8 → 16 taken back: out of memory; not tried again",
    )
    again = tuner.world_changed(tuner.known)
    assert again.setting == Setting(0, 8)
    assert tune(tuner, fits)[-1] == "micro-batch stays at 8: 16 ran out of memory"
    assert tuner.out_of_memory() is None, "what the script itself asks for is the script's own fault"


def test_what_was_kept_and_later_does_not_fit_is_taken_back_too() -> None:
    tuner = Tuner(Setting(0, 8), Bounds(max_workers=8))
    tune(tuner, machine(pass_s=0.01))
    assert tuner.best == Setting(0, 64)
    failed = tuner.out_of_memory()  # say, a longer text
    assert failed is not None
    assert failed.setting == tuner.best == Setting(0, 32)


def test_workers_that_run_out_of_memory_are_not_tried_in_the_next_world_either() -> None:
    tuner, slow = Tuner(Setting(0), Bounds(max_workers=8)), machine(decode_s=0.001)
    tuner.step(slow(tuner.best))
    failed = tuner.out_of_memory()
    assert failed is not None
    assert failed.why == "loader workers 0 → 2 taken back: out of memory; not tried again"
    tuner.world_changed(tuner.known)
    assert tune(tuner, slow) == [
        "loader workers stay at 0: 2 have failed; nothing left to try with 0 loader workers"
    ]


def test_workers_that_cannot_load_are_taken_back_and_remembered() -> None:
    tuner, slow = Tuner(Setting(2, 8), Bounds(max_workers=16)), machine(decode_s=0.01)
    assert tuner.loader_failed("ValueError") is None, (
        "what the script itself asks for is the script's own fault"
    )
    assert tuner.step(slow(tuner.best)).setting == Setting(4, 8)
    assert tuner.step(slow(Setting(4, 8))).setting == Setting(8, 8)
    failed = tuner.loader_failed("OSError: too many open files")
    assert failed == Decision(
        Setting(4, 8), "loader workers 4 → 8 taken back: OSError: too many open files; not tried again"
    )
    assert tuner.has_added_workers, "four were kept"
    tuner.world_changed(tuner.known)
    said = tune(tuner, slow)
    assert said[0].startswith("loader workers stay at 4: 8 have failed; trying micro-batch 8 → 16")
    assert tuner.best.num_workers == 4


def test_workers_that_were_kept_and_fail_later_leave_what_the_script_asks_for() -> None:
    tuner = Tuner(Setting(1, 8), Bounds(max_workers=4))
    tuner.follow(best=Setting(4, 8), running=Setting(4, 16))
    failed = tuner.loader_failed("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.")
    assert failed is not None
    assert failed.setting == tuner.best == Setting(1, 8)
    assert tuner.known.too_many == 4
    assert tuner.loader_failed("again") is None
    assert not tuner.may_be_at_fault


def test_the_micro_batch_stays_when_the_share_grows_with_a_smaller_world() -> None:
    tuner = Tuner(Setting(0, 8), Bounds(max_workers=8, memory_bytes=8 * GIB))
    tune(tuner, machine(pass_s=0.01, record_bytes=GIB // 8, share=32))
    assert tuner.best == Setting(0, 32)
    tuner.world_changed(tuner.known)
    said = tune(tuner, machine(pass_s=0.01, record_bytes=GIB // 8, share=64))
    assert said == ["micro-batch stays at 32: 64 would need about 9.66 GB of 8.59 GB"]


@given(st.integers(0, 2**32), st.floats(0.01, 0.1))
def test_noise_alone_changes_nothing(seed: int, noise: float) -> None:
    def flat(setting: Setting) -> Measurement:
        return Measurement(0.1 * (1 + noise * rng.uniform(-1, 1)), noise * 0.1, 0.05, share=64)

    rng = Rng(seed)
    tuner = Tuner(Setting(2, 8), Bounds(max_workers=8))
    tune(tuner, flat)
    assert tuner.best == Setting(2, 8)


@given(
    st.floats(0, 0.01),
    st.floats(0, 0.01),
    st.integers(0, 8),
    st.integers(1, 64),
    st.integers(0, 16),
    st.floats(0, 0.02),
)
def test_it_always_ends_within_its_bounds_and_never_slower(
    decode_s: float, pass_s: float, workers: int, micro: int, cores: int, noise: float
) -> None:
    measure, exact = (
        machine(decode_s=decode_s, pass_s=pass_s, noise=n, record_bytes=GIB // 16) for n in (noise, 0.0)
    )
    begin = Setting(workers, micro)
    tuner = Tuner(begin, Bounds(cores, memory_bytes=4 * GIB))
    tune(tuner, measure)
    assert tuner.best.num_workers <= max(workers, cores)
    assert tuner.best.micro_batch <= max(micro, 64 * 2)
    assert exact(tuner.best).step_s <= exact(begin).step_s * 1.001


def test_the_slowest_rank_counts() -> None:
    one = Measurement(0.10, 0.001, 0.01, 32, 5, 2)
    other = Measurement(0.11, 0.002, 0.05, 33, 4, 3)
    assert combine([one, other]) == Measurement(0.11, 0.002, 0.05, 33, 5, 3)


def test_every_rank_must_be_able_to_run_it() -> None:
    assert tightest([Bounds(8, 80 * GIB), Bounds(2, 0), Bounds(4, 40 * GIB)]) == Bounds(2, 40 * GIB)
    assert tightest([Bounds(8), Bounds(9)]) == Bounds(8)


def test_ranks_that_follow_know_whose_fault_it_is_and_forget_it_with_the_trial() -> None:
    tuner = Tuner(Setting(0, 8), Bounds(0))
    tuner.follow(best=Setting(0, 8), running=Setting(0, 16))
    assert tuner.may_be_at_fault
    tuner.follow(best=Setting(0, 8), running=Setting(0, 8))
    assert not tuner.may_be_at_fault
    tuner.follow(best=Setting(0, 16), running=Setting(0, 16))
    assert tuner.may_be_at_fault, "it was kept, but the script has not asked for it"


def test_what_a_newcomer_is_told_is_not_taken_for_what_its_script_asks_for() -> None:
    one, newcomer = (Tuner(Setting(0), Bounds(8)) for _ in range(2))
    one.begin_with(8)
    newcomer.world_changed(one.known)
    assert newcomer.known == Known(best=Setting(0, 8), given=Setting(0, 8))
    assert not newcomer.may_be_at_fault, "though it has not come to cut a batch"


@pytest.mark.parametrize(("step_s", "steps"), [(0.0, 200), (0.001, 200), (0.05, 40), (10.0, 10)])
def test_long_steps_are_measured_a_few_times_and_short_ones_often(step_s: float, steps: int) -> None:
    assert steps_to_measure(step_s) == steps
