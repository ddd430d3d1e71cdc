"""The audit: what counts as missed, repeated and done again."""

from __future__ import annotations

from pathlib import Path

from stoker.data.audit import Committed, Entry, Read, audit, audit_known
from stoker.data.ledger import Ledger, read_ledgers
from stoker.data.session import HandedOut, Session


def read(
    generation: int, step: int, records: list[int], rank: int = 0, size: int = 1, epoch: int = 0
) -> Read:
    return Read(generation, step, epoch, rank, size, tuple(records), 0.0, "d")


def commit(generation: int, step: int, rank: int = 0) -> Committed:
    return Committed(generation, step, rank, 0.0)


def test_a_whole_epoch() -> None:
    entries: list[Entry] = [read(1, 1, [0, 1]), commit(1, 1), read(1, 2, [2]), commit(1, 2)]
    report = audit(entries, {"d": 3}, 1)
    assert (report.missed, report.repeated, report.steps, report.steps_lost) == (0, 0, 2, 0)


def test_a_read_that_was_never_committed_does_not_count() -> None:
    entries: list[Entry] = [read(1, 1, [0, 1]), read(2, 1, [0, 1]), commit(2, 1)]
    assert audit(entries, {"d": 2}, 1).repeated == 0


def test_a_step_done_again_counts_once_and_is_said() -> None:
    """Rank 0 committed step 1 and died; the survivor had not, and did it again."""
    entries: list[Entry] = [
        read(1, 1, [0], rank=0, size=2),
        read(1, 1, [1], rank=1, size=2),
        commit(1, 1, rank=0),
        read(2, 1, [0, 1]),
        commit(2, 1),
    ]
    report = audit(entries, {"d": 2}, 1)
    assert (report.missed, report.repeated, report.steps_lost) == (0, 0, 1)


def test_missed_and_repeated_records_are_found() -> None:
    entries: list[Entry] = [read(1, 1, [0, 0]), commit(1, 1), read(1, 2, [0]), commit(1, 2)]
    report = audit(entries, {"d": 3}, 1)
    assert (report.missed, report.repeated) == (2, 2)
    assert report.by_epoch == {0: (2, 2)}


def test_steps_of_which_a_rank_is_not_here_are_said() -> None:
    entries: list[Entry] = [read(1, 1, [0], rank=0, size=2), commit(1, 1)]
    assert audit_known(entries).unseen_steps == 1


def test_a_run_that_stops_early_is_not_blamed_for_the_rest() -> None:
    def at(step: int, epoch: int, records: tuple[int, ...], cursor: int) -> list[Entry]:
        return [Read(1, step, epoch, 0, 1, records, 0.0, "d", cursor, 4), commit(1, step)]

    evaluation = [Read(1, 9, 0, 0, 1, (0, 1), 0.0, "eval", 2, 2)]
    whole = [*at(1, 0, (0, 1), 2), *at(2, 0, (2, 3), 4), *at(3, 1, (3, 1), 2), *evaluation]
    report = audit_known(whole)
    assert (report.missed, report.repeated) == (0, 0)
    assert audit_known([*at(1, 0, (0, 1), 2), *at(3, 1, (3, 1), 2)]).missed == 2
    assert audit_known([*at(1, 0, (0, 1), 2), *at(2, 0, (2,), 4)]).missed == 1, "also in the last epoch"


def test_a_ledger_survives_a_cut_line(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "w")
    live = Session(rank=1, world_size=2, generation=3)
    ledger.read(live, 7, HandedOut("d", 0, (4, 5), 10, 20))
    ledger.committed(3, 7, 1)
    ledger.close()
    with (tmp_path / "w.jsonl").open("ab") as file:
        file.write(b'{"type":"commit","gen')
    first, second = read_ledgers(tmp_path)
    assert isinstance(first, Read)
    assert first.records == (4, 5)
    assert isinstance(second, Committed)
