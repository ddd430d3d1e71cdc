"""`stoker job …` and the control API of a real job: master, agents and workers in their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from stoker.cli.registry import JobRecord
from stoker.errors import MasterUnreachable
from stoker.wire.control import JobStatus
from stoker.wire.control_client import JobClient
from tests.e2e.run_helpers import TOY, Finished, Stoker, free_port, own_environment, run, wait_for

pytestmark = pytest.mark.real


class Job:
    """A job of up to three nodes on this machine; every node runs one worker of the toy script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.nodes: list[Stoker] = []

    def add_node(self, *options: str, flags: Sequence[str] = ()) -> Stoker:
        """`options` go to the script, `flags` to `stoker run`."""
        node = Stoker(
            self.folder, "run", "--no-cache", "--nnodes", "1:3", "--rdzv-id", "night-run", "--rdzv-endpoint",
            self.endpoint, "--log-dir", f"logs-{len(self.nodes)}", "--max-restarts", "5", *flags, TOY, "--epochs",
            "1000", "--step-s", "0.02", *options,
        )  # fmt: skip
        self.nodes.append(node)
        note = self.folder / "runtime" / "stoker" / "jobs" / f"night-run.{node.process.pid}.json"
        wait_for(
            lambda: note.exists() or node.process.poll() is not None,
            why="note of the job: the first node is where the master runs",
        )
        assert node.process.poll() is None, node.finish().text
        return node

    def command(self, *arguments: str) -> Finished:
        return run(self.folder, "job", *arguments)

    def asked(self, *arguments: str) -> Any:
        said = self.command(*arguments, "--json")
        assert said.code == 0, said.text
        return json.loads(said.out)

    def look(self) -> JobStatus | None:
        """The status, if there is a master; asked for in this process, since this is done often."""
        for client in self.clients():
            with contextlib.suppress(MasterUnreachable), client:
                return client.status()
        return None

    def clients(self) -> list[JobClient]:
        """For each master that is known of."""
        notes = (self.folder / "runtime" / "stoker" / "jobs").glob("*.json")
        records = [msgspec.json.decode(note.read_bytes(), type=JobRecord) for note in notes]
        return [JobClient(record.endpoint, record.token) for record in records]

    def runs_with(self, workers: int) -> JobStatus:
        """The status, once that many workers train and have committed a step."""

        def look() -> JobStatus | None:
            dead = next((node for node in self.nodes if node.process.poll() not in (None, 0)), None)
            assert dead is None, dead.finish().text
            status = self.look()
            runs = status is not None and status.phase == "running" and status.world_size == workers
            return status if runs and status is not None and status.commits else None

        found: JobStatus = wait_for(look, timeout_s=90.0, why=f"world of {workers}")
        return found

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.interrupt()
        for node in self.nodes:
            node.finish()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    try:
        yield job
    finally:
        job.close()


def test_a_job_is_listed_scaled_and_stopped(job: Job) -> None:
    first, second = (job.add_node(flags=("--auto-scale", "recommend")) for _ in range(2))
    status = job.runs_with(2)
    (listed,) = job.asked("ls")["jobs"]
    assert (listed["job"], listed["endpoint"], listed["problem"]) == ("night-run", job.endpoint, "")
    assert "token" not in listed
    assert listed["command"][2] == TOY
    assert (status.nodes_min, status.nodes_max, status.nodes_target) == (1, 3, 3)
    assert [[worker.rank for worker in node.workers] for node in status.nodes] == [[0], [1]]
    assert all(os.path.exists(f"/proc/{node.workers[0].pid}") for node in status.nodes)

    wait_for(lambda: is_measured(job), why="scores, advice and what is in use")
    told = job.asked("status")
    assert told["steps_per_s"] > 0
    for node in told["nodes"]:
        assert 0 < node["use"]["cores"] <= (os.cpu_count() or 0)
        assert 0 < node["use"]["memory_available_bytes"] < node["use"]["memory_total_bytes"]
        assert node["use"]["disk_free_bytes"] > 0
        assert node["workers"][0]["memory_bytes"] > 50 * 2**20, "PyTorch alone takes that"
        assert node["workers"][0]["straggler_score"] > 0
    advice = job.asked("advice")["advice"]
    assert (advice["nodes"], advice["nodes_now"], advice["applies"]) == (2, 2, False)
    assert re.fullmatch("measuring: [0-3] of 4 windows at 2 nodes", advice["why"])  # one is 10 s

    assert job.command("scale", "1", "--wait", "60s").code == 0
    told = job.asked("status")
    assert (told["world_size"], [node["state"] for node in told["nodes"]]) == (1, ["active", "standby"])
    assert job.command("scale", "2", "--wait", "60s").code == 0
    assert job.asked("status")["world_size"] == 2
    refused = job.command("scale", "4")
    assert (refused.code, refused.out) == (2, "")
    assert "1:3" in refused.err

    assert job.command("stop", "--why", "wrong data", "--wait", "60s").code == 0
    for node in (first, second):
        end = node.finish()
        assert end.code == 130, end.text
        assert "wrong data" in end.err
    assert job.asked("ls") == {"jobs": []}
    assert job.command("status").code == 3
    kinds = [
        json.loads(line) for line in job.command("events", "--log-dir", "logs-0", "--json").out.splitlines()
    ]
    assert [event["why"] for event in kinds if event["kind"] == "ended"] == ["wrong data"]


def is_measured(job: Job) -> bool:
    """Whether the master knows what takes a few seconds to be known."""
    try:
        with job.clients()[0] as client:
            status, advice = client.status(), client.advice()
    except MasterUnreachable:
        return False
    scores = [worker.straggler_score for node in status.nodes for worker in node.workers]
    knows_uses = all(node.use is not None for node in status.nodes)
    return knows_uses and None not in scores and advice is not None and advice.nodes_now == 2


def test_a_drained_node_leaves_and_no_step_is_lost(job: Job) -> None:
    job.add_node()
    job.runs_with(1)
    second = job.add_node()
    node = job.runs_with(2).nodes[1].node
    left = job.command("drain", "night-run", node, "--why", "new disks", "--wait", "60s")
    assert left.code == 0, left.text
    end = second.finish()
    assert end.code == 0, end.text
    status = job.runs_with(1)
    assert [known.node for known in status.nodes] != [node]
    assert job.command("drain", "night-run", node).code == 2, "it is not there any more"
    events = [json.loads(line) for line in job.command("events", "--json").out.splitlines()]
    assert any("new disks" in event["why"] for event in events if event["kind"] == "node-leaving")
    assert not [event for event in events if event["kind"] in ("rollback", "worker-replace")]
    agreed = [event for event in events if event["kind"] == "generation"][-1]
    world = [event for event in events if event["kind"] == "world"][-1]
    assert agreed["why"] == f"{node} leaves: new disks"
    assert 0 <= agreed["details"]["stop_at_commit"] <= world["details"]["commits"]
    assert world["details"]["commits_lost"] == 0


class Follower:
    """`stoker job events --follow --json`, from when it has said something."""

    def __init__(self, job: Job) -> None:
        self._heard = job.folder / "heard.jsonl"
        with self._heard.open("wb") as heard:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker.cli.main", "job", "events", "--follow", "--json"],
                env=own_environment(job.folder),
                stdout=heard,
            )

    def __enter__(self) -> Self:
        wait_for(self._heard.read_bytes, why="followed event")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def lines(self) -> list[str]:
        """What it has said, once it has come to its end."""
        assert self._process.wait(60) == 0
        return self._heard.read_text().splitlines()


def test_a_master_that_is_killed_comes_back_under_the_commands(job: Job) -> None:
    job.add_node()
    before = job.runs_with(1)
    with Follower(job) as follower:
        os.kill(before.master.pid, signal.SIGKILL)

        def again() -> JobStatus | None:
            status = job.look()
            return status if status is not None and status.master.pid != before.master.pid else None

        after: JobStatus = wait_for(again, why="new master")
        assert after.master.incarnation > before.master.incarnation
        assert after.generation == before.generation, "the workers trained on"
        assert job.command("stop", "--why", "enough").code == 0
        heard = follower.lines()
    events = [json.loads(line) for line in heard]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events}), "none twice"
    assert [event["why"] for event in events if event["kind"] == "ended"] == ["enough"]
    job.nodes[0].finish()
    logged = job.command("events", "--log-dir", "logs-0", "--json").out.splitlines()
    assert logged[: len(heard)] == heard


def get(endpoint: str, path: str, token: str = "") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{endpoint}{path}", headers=headers)
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_api_is_open_to_any_client_with_the_token(job: Job, tmp_path: Path) -> None:
    job.add_node()
    job.runs_with(1)
    record = json.loads(next((tmp_path / "runtime" / "stoker" / "jobs").glob("*.json")).read_text())
    assert get(job.endpoint, "/v1/healthz")[0] == 200
    assert get(job.endpoint, "/v1/status")[0] == 401
    assert get(job.endpoint, "/v1/status", "wrong")[0] == 401
    assert json.loads(get(job.endpoint, "/v1/status", record["token"])[1])["job"] == "night-run"
    assert (
        b'stoker_job_world_size{job="night-run"} 1\n' in get(job.endpoint, "/v1/metrics", record["token"])[1]
    )
    assert "/v1/scale" in json.loads(get(job.endpoint, "/v1/openapi.json", record["token"])[1])["paths"]

    # From "another machine": another runtime folder, so only the endpoint and the token are known.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "token").write_text(record["token"])
    untold = run(elsewhere, "job", "status", job.endpoint)
    assert untold.code == 2
    assert "--job-token-file" in untold.err
    assert run(elsewhere, "job", "status", job.endpoint, "--job-token-file", "token").code == 0
    assert run(elsewhere, "job", "status", job.endpoint, STOKER_JOB_TOKEN=record["token"]).code == 0
    assert run(elsewhere, "job", "status", job.endpoint, STOKER_JOB_TOKEN="wrong").code == 1


def test_stacks_show_the_script(job: Job) -> None:
    job.add_node("--hold", "never")
    wait_for(lambda: (status := job.look()) is not None and status.commits == 5, 90.0, "commit 5")
    (stack,) = job.asked("stacks")["workers"]
    assert (stack["rank"], stack["problem"]) == (0, "")
    (main,) = [thread for thread in stack["threads"] if thread["is_main"]]
    assert any(frame["file"].endswith("toy.py") for frame in main["frames"])
    shown = job.command("stacks")
    assert "rank 0" in shown.out
    assert "toy.py" in shown.out


def test_a_run_that_was_killed_is_swept_from_the_list(job: Job) -> None:
    node = job.add_node()
    status = job.runs_with(1)
    node.process.kill()
    node.finish()
    with contextlib.suppress(ProcessLookupError):
        os.kill(status.master.pid, signal.SIGKILL)
    assert wait_for(lambda: job.asked("ls") == {"jobs": []}, why="sweep")
    assert not list((job.folder / "runtime" / "stoker" / "jobs").glob("*.json"))
