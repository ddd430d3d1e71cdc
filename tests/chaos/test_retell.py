"""A run's story from its event log alone, and what it is held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stoker.data.audit import Committed, Entered, Entry
from stoker.wire.control import JobEvent
from tests.chaos.retell import Tale, chronicle, main, tell
from tests.chaos.retell_check import Told, disagreements, read_workers, unexplained

Row = tuple[str, str, dict[str, object]]
NODES: tuple[Row, ...] = (
    ("node-joined", "h1 offers 1 workers", {"node": "node-a"}),
    ("node-joined", "h2 offers 1 workers", {"node": "node-b"}),
)
BEGIN: tuple[Row, ...] = (
    *NODES,
    ("generation", "2 of 2:2 nodes are here", {"generation": 1, "stop_at_commit": -1}),
    ("worker-started", "slot 0", {"worker": "worker-0", "node": "node-a"}),
    ("worker-started", "slot 0", {"worker": "worker-1", "node": "node-b"}),
)


def world(generation: int, commits: int, *workers: str, lost: int = 0) -> Row:
    details = {"generation": generation, "commits": commits, "commits_lost": lost, "workers": list(workers)}
    return "world", f"{len(workers)} workers go on", details


FIRST = world(1, 0, "worker-0", "worker-1")
LOST: Row = ("node-lost", "its agent has ended", {"node": "node-b"})
SECOND: Row = ("generation", "rank 1 (worker-1) is gone", {"generation": 2, "stop_at_commit": -1})
END: Row = ("ended", "every worker finished", {"success": True, "exit_code": 0})


def log(*rows: Row) -> list[JobEvent]:
    """Events, the first at 100 s and then one a second."""
    numbers = itertools.count(1)
    return [JobEvent(seq=(n := next(numbers)), wall_s=99.0 + n, kind=k, why=w, details=d) for k, w, d in rows]


def test_the_story_of_a_node_that_dies() -> None:
    tale = tell(log(*BEGIN, FIRST, LOST, SECOND, world(2, 40, "worker-0"), END))
    assert tale.contradictions == []
    assert [(c.number, c.places, c.commits, c.ended_why) for c in tale.chapters] == [
        (1, ("h1", "h2"), 0, "rank 1 (worker-1) is gone"),
        (2, ("h1",), 40, "every worker finished"),
    ]
    assert [(death.name, death.host) for death in tale.deaths] == [("node-b", "h2")]
    told = "\n".join(chronicle(tale))
    assert "node-b (h2) is lost: its agent has ended, and with it worker-1" in told
    assert "generation 2 runs from commit 40: worker-0 (h1)" in told
    assert told.endswith("2 nodes and 2 workers in 2 worlds under 1 masters; 1 losses; 0 commits lost")


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((*NODES, SECOND, world(2, 0, "worker-9")), "worker-9 is in the world, but was never started"),
        ((*BEGIN, LOST, FIRST), "worker-1 is in the world, but had ended"),
        ((*BEGIN, FIRST, world(2, 9, "worker-0")), "a world of generation 2, which was not the one to come"),
        ((*BEGIN, FIRST, BEGIN[2]), "generation 1 is named after 1"),
        ((*BEGIN, *NODES[:1]), "node-a has joined before"),
        ((*BEGIN, LOST, LOST), "node-b is lost, but was not there"),
        ((*BEGIN, LOST, BEGIN[4]), "worker-1 is to start on node-b, which is not there"),
        ((*BEGIN, END, FIRST), "comes after the end"),
        (
            (*BEGIN, ("worker-started", "slot 0", {"worker": "worker-2", "node": "node-a"}),
             world(1, 0, "worker-0", "worker-2")),
            "two workers of the world are in slot 0 of node-a",
        ),
        (
            (*BEGIN, world(1, 50, "worker-0", "worker-1"), SECOND, world(2, 40, "worker-0")),
            "it goes on from commit 40, and the one before began at 50",
        ),
    ],
)  # fmt: skip
def test_a_log_that_contradicts_itself(rows: tuple[Row, ...], what: str) -> None:
    assert any(what in line for line in tell(log(*rows)).contradictions)


def test_commits_that_are_told_to_be_lost_are_no_contradiction() -> None:
    rows = (*BEGIN, world(1, 50, "worker-0", "worker-1"), SECOND, world(2, 40, "worker-0", lost=12))
    assert tell(log(*rows)).contradictions == []


def test_a_node_that_stands_by_lets_its_workers_go() -> None:
    by: Row = ("node-standby", "the job already runs on 1 nodes", {"node": "node-b"})
    active: Row = ("node-active", "there is room for it", {"node": "node-b"})
    again: Row = ("worker-started", "slot 0", {"worker": "worker-2", "node": "node-b"})
    third: Row = ("generation", "worker-2 ready to join", {"generation": 3})
    story = (*BEGIN, FIRST, by, SECOND, world(2, 9, "worker-0"), active, again, third)
    assert tell(log(*story, world(3, 20, "worker-0", "worker-2"))).contradictions == []
    assert tell(log(*story, world(3, 20, "worker-0", "worker-1"))).contradictions


# -- what the workers wrote down ------------------------------------------------------------------------------


def two_worlds() -> Tale:
    """The first from 105 s on, the second, without worker-1, from 108 s on."""
    return tell(log(*BEGIN, FIRST, LOST, SECOND, world(2, 2, "worker-0")))


def entered(generation: int, rank: int, size: int, commits: int, wall_s: float) -> Entry:
    return Entered(generation, rank, size, 0, commits, copied=False, wall_s=wall_s)


def committed(generation: int, step: int, wall_s: float) -> Entry:
    return Committed(generation, step, 0, wall_s)


def ledgers() -> dict[str, list[Entry]]:
    first = [committed(1, 1, 105.5), committed(1, 2, 105.8)]
    return {
        "worker-0": [
            *(entered(1, 0, 2, 0, 105.1), *first),
            *(entered(2, 0, 1, 2, 108.1), committed(2, 3, 108.2), committed(2, 4, 108.3)),
        ],
        "worker-1": [entered(1, 1, 2, 0, 105.1), *first],
    }


def test_ledgers_that_agree() -> None:
    assert disagreements(two_worlds(), ledgers()) == []


def test_a_lost_member_may_end_its_step() -> None:
    book = ledgers()
    book["worker-1"].append(committed(1, 3, 108.5))
    assert disagreements(two_worlds(), book) == []


def with_two_worlds_at_once(book: dict[str, list[Entry]]) -> None:
    book["worker-1"] += [committed(1, 3, 108.5), committed(1, 4, 108.6)]


def with_another_rank(book: dict[str, list[Entry]]) -> None:
    book["worker-1"][0] = entered(1, 0, 2, 0, 105.1)


def with_a_gap(book: dict[str, list[Entry]]) -> None:
    del book["worker-0"][1]


def with_a_stranger(book: dict[str, list[Entry]]) -> None:
    book["worker-7"] = []


def with_an_unknown_world(book: dict[str, list[Entry]]) -> None:
    book["worker-1"].append(entered(5, 0, 1, 2, 106.0))


def with_commits_before_their_world(book: dict[str, list[Entry]]) -> None:
    book["worker-0"][4] = committed(2, 3, 107.0)


def with_steps_done_again(book: dict[str, list[Entry]]) -> None:
    book["worker-1"] += [committed(1, 3, 105.9), committed(1, 4, 107.9)]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (with_two_worlds_at_once, "generation 1 committed 2 steps after generation 2 had begun to"),
        (with_another_rank, "worker-1 in generation 1: (rank, size, commits) (0, 2, 0), told is (1, 2, 0)"),
        (with_a_gap, "worker-0 committed step 2 of generation 1 after step 0 of generation 1"),
        (with_a_stranger, "worker-7 wrote a ledger, and the log does not know it"),
        (with_an_unknown_world, "worker-1 entered generation 5, of which the log tells no world"),
        (with_commits_before_their_world, "generation 2 committed before the log tells of its world"),
        (with_steps_done_again, "generation 2 did 1 commits of generation 1 again, and the log tells of 0"),
    ],
)
def test_ledgers_that_disagree(spoil: Callable[[dict[str, list[Entry]]], None], what: str) -> None:
    book = ledgers()
    spoil(book)
    assert what in disagreements(two_worlds(), book)


def test_ledgers_are_read_by_worker_and_without_the_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "h2" / "stoker-logs" / "1" / "audit"
    folder.mkdir(parents=True)
    line = msgspec.json.encode(committed(1, 1, 5.0))
    (folder / "worker-3.jsonl").write_bytes(line + b"\n" + line[:20])
    assert read_workers(tmp_path) == {"worker-3": [committed(1, 1, 5.0)]}


# -- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "is_enough"),
    [
        (Told("kill-agent", (2,), (2,), 104.0, 108.0), True),
        (Told("kill-agent", (1,), (1,), 104.0, 108.0), False),
        (Told("kill-worker", (2,), (), 104.0, 108.0), False),
        (Told("kill-agent", (2,), (2,), 10.0, 14.0), False),
        (Told("partition", (1,), (2,), 90.0, 100.0), True),
    ],
)
def test_every_loss_needs_a_fault_that_explains_it(fault: Told, is_enough: bool) -> None:
    assert (unexplained(two_worlds(), [fault], told_s=30.0) == []) == is_enough


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(event) for event in log(*BEGIN, FIRST)))
    assert main([str(path)]) == 0
    assert "generation 1 runs from commit 0: worker-0 (h1), worker-1 (h2)" in capsys.readouterr().out
    path.write_bytes(b"\n".join(msgspec.json.encode(event) for event in log(FIRST)))
    assert main([str(path)]) == 1
    assert "worker-0 is in the world, but was never started" in capsys.readouterr().err
