"""What the demo works out from ledgers, and how it draws it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.cli.demo.charts import Bar, Frame, Line, Mark, bar_chart, curve_chart, round_ticks
from stoker.cli.demo.story import Kill, LedgerTail, Schedule, Story, epoch_spans, throughput
from stoker.cli.demo.view import sparkline
from stoker.cli.demo.watch import event_of
from stoker.data.audit import Committed, Entered, Entry


def entered(generation: int, rank: int, at: float, *, copied: bool = False, commits: int = 0) -> Entered:
    return Entered(
        generation=generation, rank=rank, world_size=2, source=0, commits=commits, copied=copied, wall_s=at
    )


def killed_run() -> tuple[Story, Kill]:
    """Two workers take steps 1 and 2; b dies at 2.5; a takes step 3 at 3.0; c joins and step 4 comes at 6.0."""
    told: list[tuple[str, Entry]] = [
        ("a", entered(1, 0, 0.0)),
        ("b", entered(1, 1, 0.0)),
        *[
            (w, Committed(generation=1, step=s, rank=r, wall_s=s + 0.1 * r))
            for s in (1, 2)
            for r, w in enumerate("ab")
        ],
        ("a", entered(2, 0, 2.8)),
        ("a", Committed(generation=2, step=3, rank=0, wall_s=3.0)),
        ("a", entered(3, 0, 5.5)),
        ("c", entered(3, 1, 5.5, copied=True)),
        ("a", Committed(generation=3, step=4, rank=0, wall_s=6.0)),
        ("c", Committed(generation=3, step=4, rank=1, wall_s=6.2)),
    ]
    story = Story()
    for worker, entry in told:
        story.add(worker, entry)
    return story, Kill("b", 1, 77, 1, 2.5)


def test_recovery_is_the_first_commit_of_the_next_world_and_join_the_first_with_a_newcomer() -> None:
    story, kill = killed_run()
    recovery, join = story.recovery(kill), story.join(kill)
    assert recovery is not None
    assert (recovery.generation, recovery.committed_s, recovery.workers) == (2, 3.0, ("a",))
    assert join is not None
    assert (join.generation, join.committed_s, join.workers) == (3, 6.0, ("a", "c"))
    assert join.pause_s == pytest.approx(3.0)
    assert story.newcomers(kill) == {"c"}
    assert (story.generation, story.steps_done) == (3, 4)


def test_a_commit_of_the_old_world_after_the_kill_is_no_recovery() -> None:
    story, kill = Story(), Kill("b", 1, 77, 1, 2.0)
    story.add("a", entered(1, 0, 0.0))
    story.add("a", Committed(generation=1, step=1, rank=0, wall_s=2.1))
    assert story.recovery(kill) is None
    assert story.join(kill) is None
    assert story.newcomers(kill) == set()


def test_of_a_step_that_was_done_twice_the_later_worlds_time_counts() -> None:
    story = Story()
    story.add("a", Committed(generation=1, step=1, rank=0, wall_s=1.0))
    story.add("a", Committed(generation=2, step=1, rank=0, wall_s=5.0))
    assert story.step_times() == [(1, 5.0)]


def test_stays_end_with_their_last_commit() -> None:
    story, _ = killed_run()
    assert story.stays["b", 1].end_s == pytest.approx(2.1)
    assert story.stays["c", 3].copied


def test_schedule_knows_the_smaller_last_batch() -> None:
    schedule = Schedule(records=10, global_batch_size=4, epochs=2)
    assert (schedule.steps_per_epoch, schedule.steps) == (3, 6)
    assert [schedule.records_of(step) for step in range(1, 7)] == [4, 4, 2, 4, 4, 2]
    assert [schedule.epoch_of(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert [schedule.records_in_epoch(0, done) for done in (0, 2, 3, 5)] == [0, 8, 10, 10]
    assert schedule.records_in_epoch(1, 4) == 4


def test_throughput_counts_every_record_once() -> None:
    schedule = Schedule(records=10, global_batch_size=4, epochs=1)
    curve = throughput([(1, 100.5), (2, 101.5), (3, 104.0)], schedule, 100.0, 104.0, 4)
    assert curve == [(0.5, 4.0), (1.5, 4.0), (2.5, 0.0), (3.5, 2.0)]
    assert throughput([], schedule, 5.0, 5.0, 4) == []


def test_epochs_follow_each_other() -> None:
    schedule = Schedule(records=4, global_batch_size=2, epochs=3)
    assert epoch_spans([(1, 1.0), (2, 2.0), (3, 3.0)], schedule) == [(1.0, 2.0), (2.0, 3.0)]


def test_the_tail_leaves_a_line_that_is_not_whole_for_later(tmp_path: Path) -> None:
    tail = LedgerTail(tmp_path)
    assert tail.read_new() == []
    line = b'{"type":"commit","generation":1,"step":%d,"rank":0,"wall_s":1.5}\n'
    file = tmp_path / "worker-0.jsonl"
    file.write_bytes(line % 1 + b"nonsense\n" + (line % 2)[:20])
    assert [(worker, e.step) for worker, e in tail.read_new() if isinstance(e, Committed)] == [
        ("worker-0", 1)
    ]
    file.write_bytes(line % 1 + b"nonsense\n" + line % 2)
    assert [e.step for _, e in tail.read_new() if isinstance(e, Committed)] == [2]
    assert tail.read_new() == []


@pytest.mark.parametrize("highest", [0.003, 1.0, 7.0, 99.9, 100.0, 6421.0])
def test_ticks_are_round_few_and_reach_the_top(highest: float) -> None:
    ticks = round_ticks(highest)
    assert ticks[0] == 0
    assert highest <= ticks[-1] <= highest * 2
    assert 3 <= len(ticks) <= 6


def test_charts_are_well_formed_escape_names_and_stay_inside() -> None:
    from xml.etree import ElementTree

    frame = Frame(
        10.0, [(1.0, 5.0), (5.0, 9.0)], [Mark(4.0, "<kill & co>", "kill"), Mark(99.0, "late", "joined")]
    )
    curve = curve_chart(frame, [Line([(0.0, 0.0), (5.0, 3.0)], "rate", is_area=True), Line([], "hits")],
        height=200, unit=" %", name='"x"')  # fmt: skip
    bars = bar_chart(frame, ["<w>"], [Bar(0, 1.0, 4.0, "g1", "generation 1", "g 1", "a & b")], name="bars")
    for text in (curve, bars):
        ElementTree.fromstring(text)
        assert all(0 <= float(x) <= 1000 for x in re.findall(r' x1="([-\d.]+)"', text))
    assert "&lt;kill &amp; co&gt;" in curve


def test_sparkline() -> None:
    assert sparkline((0.0, 4.0, 8.0)) == " ▄█"
    assert sparkline(()) == sparkline((0.0, 0.0)) == ""


def test_journal_entries_become_lines_for_people() -> None:
    entry = {"kind": "worker-replace", "why": "it was killed", "wall_s": 2.0, "worker": "worker-1", "rank": 1}
    event = event_of(entry)
    assert event is not None
    assert "worker-1 (rank 1) is replaced: it was killed" in event.text
    assert event_of({"kind": "node-lost", "why": "x", "wall_s": 1.0}) is None
