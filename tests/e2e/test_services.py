"""The master's services for real: dynamic shards, barriers, sync points and what scripts report."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.run_helpers import SCRIPTS, Stoker, free_port, kill_all, run, wait_for

pytestmark = pytest.mark.real

SHARDS = str(SCRIPTS / "shards.py")
MEETING = str(SCRIPTS / "meeting.py")


Start = Callable[..., Stoker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command that is killed at the end of the test if it still runs."""
    started: list[Stoker] = []

    def start(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Stoker:
        started.append(Stoker(folder, *arguments, environment=environment))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            kill_all(command)


def lines(*folders: Path) -> dict[str, list[str]]:
    """What each worker of tests/scripts/shards.py has said."""
    return {p.stem: p.read_text().splitlines() for folder in folders for p in folder.glob("worker-*.log")}


def count(said: dict[str, list[str]], word: str) -> int:
    return sum(line.split()[0] == word for own in said.values() for line in own)


def workers_by_id(job: Stoker) -> dict[str, psutil.Process]:
    return {worker.environ()["STOKER_WORKER_ID"]: worker for worker in job.workers()}


def test_every_record_is_done_once_whoever_dies(tmp_path: Path, start: Start) -> None:
    other = tmp_path / "other"
    other.mkdir()
    flags = ("run", "--no-cache", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    script = (SHARDS, "--records", "4000", "--shard-s", "0.06", "--fast", str(tmp_path / "fast"))
    first = start(tmp_path, *flags, "--nproc-per-node", "2", *script)
    wait_for(lambda: len(lines(tmp_path)) == 2, why="both workers at work")
    wait_for(lambda: count(lines(tmp_path), "accepted") > 4, why="shards done")
    second = start(other, *flags, *script, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    killed, victim = next(iter(workers_by_id(first).items()))
    victim.kill()
    master = first.master()
    master.kill()
    wait_for(lambda: count(lines(other), "accepted") > 2, why="shards done by the second node")
    wait_for(lambda: len(lines(tmp_path)) == 3, why="a new worker in the place of the killed one")

    shown = run(tmp_path, "job", "shards", "--json")
    assert shown.code == 0, shown.text
    (train,) = json.loads(shown.out)["shards"]
    assert (train["dataset"], train["total"]) == ("train", 2000)
    assert train["done"] + train["doing"] + train["todo"] == 2000
    assert train["done"] > 8
    assert {lease["worker"] for lease in train["leases"]} <= lines(tmp_path, other).keys() - {killed}

    def phases() -> set[str]:
        status = json.loads(run(tmp_path, "job", "status", "--json").out)
        return {status["phase"], *(worker["phase"] for node in status["nodes"] for worker in node["workers"])}

    wait_for(lambda: phases() == {"running", "working"}, why="word of all workers' work")

    second.interrupt()
    left = second.finish()
    assert (left.code, "left the job" in left.err) == (0, True), left.text
    (tmp_path / "fast").touch()
    done = first.finish()
    assert done.code == 0, done.text
    said = lines(tmp_path, other)
    accepted = Counter(line.split()[1] for own in said.values() for line in own if line[:3] == "acc")
    assert max(accepted.values()) == 1, "no shard counts twice"
    # Who was killed may have reported without having heard the answer.
    unheard = {own[-1].split()[1] for own in said.values() if own and own[-1].startswith("work")}
    assert set(map(str, range(2000))) - accepted.keys() <= unheard
    assert sorted(own[-1] for own in said.values() if own[-1].startswith("end")) == ["end 2000 2000"] * 2


@pytest.mark.parametrize(
    ("how", "reason"), [("fail", "record 0 is no picture"), ("segv", "it was killed by SIGSEGV")]
)
def test_a_shard_that_keeps_failing_fails_the_job(tmp_path: Path, how: str, reason: str) -> None:
    done = run(tmp_path, "run", "--no-cache", "--max-restarts", "9", SHARDS, "--poison", f"0:{how}")
    assert done.code == 1, done.text
    assert "shard 0 of dataset 'train' (records [0, 2) of epoch 0) failed 3 times, last with: " in done.err
    assert reason in done.err.rpartition("the run failed: ")[2]


def test_a_stream_that_one_worker_feeds(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--no-cache", "--nproc-per-node", "2", SHARDS, "--stream", "--records", "50",
               "--shard-size", "4", "--shard-s", "0.01")  # fmt: skip
    assert done.code == 0, done.text
    read = Counter[tuple[str, int]]()
    assert len(lines(tmp_path)) == 2
    for own in lines(tmp_path).values():
        assert own[0] == "all know the stream"
        for line in own:
            if line.startswith("work"):
                (partition, start), (_, stop) = (place.split(":") for place in line.split()[2:])
                read.update((partition, offset) for offset in range(int(start), int(stop)))
    assert read == Counter((partition, offset) for partition in ("left", "right") for offset in range(50))


def test_workers_meet_though_one_is_killed_and_the_master_too(tmp_path: Path, start: Start) -> None:
    """Three are in the world. One is killed as the others wait for the shard that it holds; then they, and the one that
    has taken its place, wait for each other at a barrier as the master is killed."""
    log = tmp_path / "said.log"

    def said() -> list[tuple[str, str]]:
        text = log.read_text() if log.exists() else ""
        return [(line.partition(" ")[0], line.partition(" ")[2]) for line in text.splitlines()]

    def who(what: str, since: str = "enters 1") -> set[str]:
        """Who has said so since somebody has said the other."""
        words = said()
        first = next((at for at, (_, words) in enumerate(words) if words == since), len(words))
        return {worker for worker, words in words[first:] if words == what}

    job = start(tmp_path, "run", "--no-cache", "--nproc-per-node", "3", MEETING, "--go", "go")
    (holder,) = wait_for(lambda: who("holds shard 20"), why="shard that is held")

    def far() -> dict[str, int]:
        shards: list[dict[str, int]] = json.loads(run(tmp_path, "job", "shards", "--json").out)["shards"]
        return shards[0]

    wait_for(lambda: far()["waiting"] == 2, why="two that wait for the held shard")
    assert (far()["done"], far()["doing"], far()["total"]) == (59, 1, 60)
    workers_by_id(job)[holder].kill()
    wait_for(lambda: len(who("comes to hold", since="enters 3")) == 2, why="two at the barrier")
    assert (far()["done"], far()["failures"]) == (60, 0)
    survivors = who("enters 1") - {holder}

    def figures() -> list[dict[str, float]]:
        status = json.loads(run(tmp_path, "job", "status", "--json").out)
        said = [worker["metrics"] for worker in status["nodes"][0]["workers"]]
        return sorted(said, key=lambda each: each["rank"]) if all(said) else []

    wait_for(lambda: [each["rank"] for each in figures()] == [0, 1, 2], why="what the new world reports")
    losses = {each["loss"] for each in figures()}
    assert len(losses) == 1, "all have the state of the same commit"
    (loss,) = losses
    assert f'name="loss"}} {loss!r}\n' in run(tmp_path, "job", "metrics").out

    assert not [worker for worker, what in said() if what == "is past hold"]
    os.kill(job.master().pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    done = job.finish()
    assert done.code == 0, done.text
    words = said()
    assert Counter(what for _, what in words)["is ready"] == 3
    first_past = next(at for at, (_, what) in enumerate(words) if what == "is past hold")
    assert len({worker for worker, what in words[:first_past] if what == "comes to hold"}) == 3
    for worker in survivors:
        assert [what for name, what in words if name == worker and "enters" in what] == [
            "enters 1",
            "enters 2",
            "enters 3",
        ]
    mistakes = {what for _, what in words if what.startswith("misuse")}
    assert any("call stoker.init() before stoker.barrier" in what for what in mistakes)
    assert any("there is no world yet" in what for what in mistakes)
    assert any("after the @stoker.elastic function the job is over" in what for what in mistakes)
