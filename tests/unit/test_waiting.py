"""What a wait is divided into, and what a report makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loader_account import Account
from stoker.data.loader_report import CacheFigures, Epoch, Report, total_of, verdict_of
from stoker.data.loader_spent import Meter
from stoker.data.waiting import CAUSES, STRETCHES_MAX, Spent, Stretch, Times, bounded, causes
from stoker.errors import CacheUnavailable

seconds = st.floats(0, 10)


@st.composite
def times(draw: st.DrawFn) -> Times:
    """Of a batch: marks in their order, and reading here and there, told by a clock that is not exact."""
    ready, began, read, collated, came = sorted(draw(st.lists(seconds, min_size=5, max_size=5)))
    marks = sorted(draw(st.lists(seconds, max_size=12)))
    stretches = [
        Stretch(start, stop, *draw(st.tuples(seconds, seconds, seconds)))
        for start, stop in zip(marks[::2], marks[1::2], strict=False)
    ]
    return Times(began, read, collated, Spent(tuple(stretches)), ready, draw(st.sampled_from([came, 1e9])))


@given(times=times(), wait=st.tuples(seconds, seconds).map(sorted))
def test_the_causes_of_a_wait_add_up_to_it(times: Times, wait: list[float]) -> None:
    parts = dict(causes(wait[0], wait[1], times))
    assert parts.keys() <= CAUSES.keys()
    assert all(part >= 0 for part in parts.values())
    assert sum(parts.values()) == pytest.approx(wait[1] - wait[0], abs=1e-6)


def test_what_was_done_for_a_batch_before_it_was_waited_for_counts_for_nothing() -> None:
    """It was read from 2 to 4 (half of it origin), decoded to 6, collated to 7, here at 8, pinned until 9."""
    batch = Times(2.0, 6.0, 7.0, Spent((Stretch(2.0, 4.0, 1.0, 0.6, 0.4),)), 1.0, 8.0)
    whole = {
        "starting_s": 1.0, "not_begun_s": 1.0, "origin_s": 1.0, "cache_s": 0.6, "reading_s": 0.4,
        "decoding_s": 2.0, "collating_s": 1.0, "hand_over_s": 1.0, "pinning_s": 1.0,
    }  # fmt: skip
    assert dict(causes(0.0, 9.0, batch)) == pytest.approx(whole)
    late = whole | {"starting_s": 0, "not_begun_s": 0, "origin_s": 0.5, "cache_s": 0.3, "reading_s": 0.2}
    assert dict(causes(3.0, 9.0, batch)) == pytest.approx(late)
    later = dict.fromkeys(whole, 0.0) | {"decoding_s": 0.5, "collating_s": 1.0, "hand_over_s": 0.5}
    assert dict(causes(5.5, 7.5, batch)) == pytest.approx(later)
    unknown = dict(causes(0.0, 9.0, batch._replace(spent=Spent())))
    assert unknown["samples_s"] == 4.0
    assert "decoding_s" not in unknown


def test_reading_record_by_record_is_kept_in_bounds() -> None:
    kept: list[Stretch] = []
    for number in range(1000):
        kept = bounded([*kept, Stretch(number, number + 0.5, 0.25, 0.125, 0.125)])
        assert len(kept) < STRETCHES_MAX
    assert (kept[0].start_s, kept[-1].stop_s) == (0.0, 999.5)
    parts = dict(causes(0.0, 1000.0, Times(0.0, 1000.0, 1000.0, Spent(tuple(kept)))))
    assert (parts["origin_s"], parts["cache_s"]) == pytest.approx((250.0, 125.0))
    assert parts["decoding_s"] == pytest.approx(500.0)


def test_a_meter_counts_reading_within_reading_once() -> None:
    meter = Meter()
    with meter.reading(), meter.reading():
        sum(range(1000))
    (stretch,) = meter.take().stretches
    assert stretch.reading_s == pytest.approx(stretch.stop_s - stretch.start_s)
    assert meter.take() == Spent()


def epoch(number: int, wall_s: float, figures: CacheFigures | None = None, **waiting: float) -> Epoch:
    waits = dict.fromkeys(CAUSES, 0.0) | {f"{cause}_s": value for cause, value in waiting.items()}
    return Epoch(number, 10, 100, 1000, wall_s, sum(waiting.values()), 1.0, 2.0, waits, figures)


COLD = CacheFigures(0, 100, 900_000_000, 100)
WARM = CacheFigures(100, 0)


@pytest.mark.parametrize(
    ("epochs", "workers", "words"),
    [
        ([], 2, "no step was made"),
        ([epoch(0, 10, decoding=0.2)], 2, "the loop's own work was the limit: it waited for 2.0% of the time"),
        ([epoch(0, 10, COLD, origin=8, decoding=1)], 2, "the origin was the limit: 90 MB/s (8.00 of 9.00 s of"),
        ([epoch(0, 10, COLD, origin=8), epoch(1, 2, WARM, decoding=1)], 2, "later epochs did not need it"),
        ([epoch(0, 10, COLD, origin=8), epoch(1, 9, COLD, origin=8)], 2, "give the cache more room"),
        ([epoch(0, 10, origin=8)], 2, "the origin was the limit (8.00"),
        ([epoch(0, 10, decoding=6, collating=2)], 2, "decoding was the limit (6.00 of 8.00 s"),
        ([epoch(0, 10, decoding=6)], 2, "give more than num_workers=2 (there are 4 cores)"),
        ([epoch(0, 10, decoding=6)], 0, "give num_workers=3, which read beside the loop"),
        ([epoch(0, 10, samples=6)], 4, "num_workers=4 already fill 4 cores"),
        ([epoch(0, 10, WARM, cache=6)], 2, "the cache server was the limit"),
        # Nothing came from the origin: what was not at hand was the cache's own.
        ([epoch(0, 10, WARM, origin=6)], 2, "the cache server was the limit"),
        ([epoch(0, 10, starting=6, decoding=1)], 2, "starting was most of it"),
        ([epoch(0, 10, hand_over=6, decoding=1)], 2, "the way from the loader's processes"),
    ],
)  # fmt: skip
def test_verdicts(epochs: list[Epoch], workers: int, words: str) -> None:
    verdict = verdict_of(epochs, workers, cores=4)
    assert words in verdict, verdict
    assert "\n" not in verdict


def test_a_report_of_many_epochs_fits_on_a_screen() -> None:
    epochs = [epoch(0, 20, COLD, origin=8, starting=1)]
    epochs += [epoch(number, 2, WARM, cache=0.5) for number in range(1, 100)]
    text = str(Report("train", 0, 4, 2, 4, epochs))
    assert "loader train (rank 0 of 4): 1000 steps, 10000 records, 100 KB in 218 s: computed 160" in text
    assert "900 MB, 47.4 MB/s" in text  # starting is no time of reading
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["0", "1", "2", "3", "...", "97", "98", "99", "all"]
    assert total_of(epochs).waiting["cache_s"] == pytest.approx(49.5)
    assert lines[6].split()[1] == "186"
    assert "from origin" not in str(Report("train", 0, 1, 0, 4, [epoch(0, 5, decoding=1)]))


def test_a_report_of_nothing_can_be_told() -> None:
    assert "no step was made" in str(Account("train").report())


class Asked:
    """What a server would say, one answer after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self) -> CacheFigures:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, CacheFigures)
        return answer


def run(account: Account, number: int, *, steps: int = 1) -> None:
    account.begin(number, 0, 1)
    for _ in range(steps):
        account.note(0.0, 1.0, Times(0.0, 1.0, 1.0), 5, 50)
        account.ran(2.0, 1)


def test_an_account_gives_each_epoch_what_the_cache_did_in_it() -> None:
    account = Account("train")
    account.ask = Asked(
        CacheFigures(1, 1, 100),
        CacheFigures(1, 11, 1100),
        CacheFigures(2, 12, 1500),
        CacheFigures(12, 12, 1500),
    )
    run(account, 0)
    account.close()
    run(account, 1)  # where somebody else has read in between
    account.close()
    first, second = account.report().epochs
    assert (first.cache, second.cache) == (CacheFigures(0, 10, 1000), CacheFigures(10, 0, 0))
    assert (first.wall_s, first.computed_s, first.waiting["samples_s"]) == (2.0, 1.0, 1.0)


def test_an_account_goes_on_in_an_epoch_that_was_left() -> None:
    account = Account("train")
    account.ask = Asked(*(CacheFigures(number) for number in (0, 3, 3, 5)))
    run(account, 0)
    assert account.report().epochs[0].cache == CacheFigures(3)
    run(account, 0)
    account.close()
    (only,) = account.report().epochs
    assert (only.steps, only.cache) == (2, CacheFigures(5))


def test_a_cache_that_is_gone_or_anew_costs_the_figures_only() -> None:
    account = Account("train")
    account.ask = Asked(CacheFigures(5), CacheFigures(1), CacheFigures(1), CacheUnavailable("gone"))
    run(account, 0)
    run(account, 1)
    account.close()
    assert [one.cache for one in account.report().epochs] == [None, None]
    assert account.ask is None
    run(account, 2)
    assert len(account.report().epochs) == 3


def test_what_was_told_is_not_told_again() -> None:
    account = Account("train")
    assert not account.is_due
    run(account, 0)
    assert account.is_due
    account.told()
    assert not account.is_due
    run(account, 1)
    assert account.is_due
    account.begin(2, 1, 2)
    assert not account.is_due  # rank 0 tells
    account.clear()
    assert not account.report().epochs
