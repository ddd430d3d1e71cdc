"""`stoker.ShardedDataset` in real workers, one of which is killed in the middle of a shard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.e2e.run_helpers import SCRIPTS, Stoker, kill_all, run, wait_for

pytestmark = pytest.mark.real

SCRIPT = str(SCRIPTS / "sharded.py")
RECORDS, SHARD = 300, 10
Batches = list[list[int]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "numbers.txt").write_text("".join(f"{number}\n" for number in range(RECORDS)))
    return f"file://{folder}/"


def said(folder: Path, word: str) -> dict[str, Batches]:
    """What each worker has said with this word."""
    lines = {path.stem: path.read_text().splitlines() for path in folder.glob("worker-*.log")}
    return {
        worker: [list(map(int, line.split()[1:])) for line in own if line.split()[0] == word]
        for worker, own in lines.items()
    }


def counted(batches: dict[str, Batches]) -> Counter[int]:
    return Counter(record for own in batches.values() for batch in own for record in batch)


def lose_one(folder: Path, url: str, *flags: str) -> str:
    """Three workers, of which the one that stands still is killed; returns which."""
    job = Stoker(folder, "run", "--nproc-per-node", "3", SCRIPT, url, "--record-s", "0.01", *flags)
    try:
        wait_for(lambda: any(said(folder, "stalls").values()), why="worker that stands still")
        victim = next(worker for worker, own in said(folder, "stalls").items() if own)
        (process,) = [p for p in job.workers() if p.environ()["STOKER_WORKER_ID"] == victim]
        children = process.children(recursive=True)
        process.kill()
        done = job.finish()
    finally:
        if job.process.poll() is None:
            kill_all(job)
    assert done.code == 0, done.text
    assert len(said(folder, "end")) == 4, "three, and one in the place of the killed one"
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children), "its loader processes end, too"
    return victim


@pytest.mark.parametrize("by", ["record", "batch", "fork", "spawn"])
def test_only_the_open_shards_of_a_dead_worker_are_read_again(tmp_path: Path, url: str, by: str) -> None:
    victim = lose_one(tmp_path, url, "--by", by, "--stall-after", "25" if by == "record" else "7")
    read = said(tmp_path, "read")
    times = counted(read)
    assert times.keys() == set(range(RECORDS)), "every record is read at least once"
    before = {record for batch in read[victim][:-1] for record in batch}
    done = {
        r // SHARD for r in before if before >= set(range(r // SHARD * SHARD, r // SHARD * SHARD + SHARD))
    }
    assert done, "the test is of a worker that has done some"
    again = {record for batch in read[victim] for record in batch if record // SHARD not in done}
    assert again
    assert times == Counter(range(RECORDS)) + Counter(again)


@pytest.mark.parametrize("by", ["record", "batch", "fork"])
def test_each_record_counts_once_against_commits(tmp_path: Path, url: str, by: str) -> None:
    victim = lose_one(tmp_path, url, "--by", by, "--stall-after", "11", "--commit-every", "4")
    assert counted(said(tmp_path, "counted")) == Counter(range(RECORDS))
    read = said(tmp_path, "read")
    lost = [record for batch in read[victim][8:] for record in batch]
    assert len(lost) == 3 * len(read[victim][0])
    assert counted(read) == Counter(range(RECORDS)) + Counter(lost), (
        "just what was not committed is read again"
    )


def test_a_slow_worker_reads_less(tmp_path: Path, url: str) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", SCRIPT, url, "--epochs", "2", "--slow", "30",
               "--record-s", "0.01")  # fmt: skip
    assert done.code == 0, done.text
    read = said(tmp_path, "read")
    assert counted(read) == Counter([*range(RECORDS)] * 2)
    amounts = sorted(len(own) for own in read.values())
    assert len(amounts) == 3
    assert amounts[0] < amounts[1] / 2, amounts


@pytest.mark.parametrize("every", ["10", "1000"])
def test_a_state_and_what_was_read_are_of_the_same_commit(tmp_path: Path, url: str, every: str) -> None:
    """The only worker dies twice, after commits of which there is no checkpoint; or there is none at all."""
    done = run(tmp_path, "run", "--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", every,
               "--max-restarts", "5", str(SCRIPTS / "sharded_state.py"), url, "--records", str(RECORDS),
               "--die-at", "25", "48")  # fmt: skip
    assert done.code == 0, done.text
    assert {path.name for path in tmp_path.glob("died-*")} == {"died-25", "died-48"}
    assert f"seen {[1] * RECORDS}" in done.out
