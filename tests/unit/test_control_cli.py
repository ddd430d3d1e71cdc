"""`stoker job …` against a served job: what is printed, what reaches the master, and how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.wire.control import JobOutcome, JobStatus
from tests.unit.control_cli import Said, commands, running, use_runtime_folder
from tests.unit.control_fake import TOKEN, FakeJob, a_status, served, some_advice


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commands(capsys)


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime_folder(tmp_path, monkeypatch)


def test_the_list_of_jobs(stoker: Callable[..., Said]) -> None:
    assert stoker("ls") == (0, "no job runs on this machine\n", "")
    assert json.loads(stoker("ls", "--json").out) == {"jobs": []}
    with running(FakeJob()) as server, running(FakeJob(a_status("other")), token="wrong"):
        listed = stoker("ls")
        lines = {line.split()[0]: line for line in listed.out.splitlines()}
        assert lines["JOB"].split()[:5] == ["JOB", "ENDPOINT", "PHASE", "NODES", "WORLD"]
        assert lines["night-run"].split()[1:9] == [
            server.endpoint,
            "running",
            "2",
            "of",
            "1:4",
            "3",
            "120",
            "8.5",
        ]
        assert "no answer" in lines["other"]
        assert "refuses the job token" in lines["other"]
        jobs = {job["job"]: job for job in json.loads(stoker("ls", "--json").out)["jobs"]}
        assert jobs["night-run"]["status"]["commits"] == 120
        assert jobs["other"]["status"] is None
        assert TOKEN not in stoker("ls", "--json").out, "secrets are not shown"


def test_a_jobs_status(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job) as server:
        said = stoker("status").out
        for words in (
            "night-run  running  3 workers on 2 nodes train",
            "generation  4 with 3 workers",
            "nodes       2, target 2 (1:4)",
            "commits     120, 8.5 a second, the last 100 ms ago",
            "restarts    2; 1 of 3 of the job's budget",
            f"master      {server.endpoint}, process 321, number 2",
        ):
            assert words in said
        node = next(line for line in said.splitlines() if line.startswith("node-b2"))
        assert node.split() == [
            "node-b2",
            "leaving",
            "host2",
            "10.0.0.2",
            "1",
            "2",
            "0",
            "ms",
            "ago",
            "drained",
        ]
        slow = next(line for line in said.splitlines() if "worker-1" in line)
        assert slow.split()[-5:] == ["120", "2.50", "2.1", "GB", "loss=not-finite"]
        assert msgspec.json.decode(stoker("status", "night-run", "--json").out, type=JobStatus) == job.told


def test_a_failed_jobs_status_ends_with_its_traceback(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    job.end("rank 1 exited with 1")
    outcome = JobOutcome(False, 1, "rank 1 exited with 1", "Traceback …\nValueError: \x1b[31mred")
    job.told = msgspec.structs.replace(job.told, outcome=outcome)
    with running(job):
        said = stoker("status")
        assert "failed with exit code 1: rank 1 exited with 1" in said.out
        assert said.out.rstrip().endswith("ValueError: ?[31mred"), (
            "what comes from elsewhere steers no terminal"
        )


def test_watching_ends_with_the_job(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job) as server:
        timer = threading.Timer(0.2, lambda: server.do(job.end))
        timer.start()
        said = stoker("status", "--watch", "--every", "50ms", "--json")
        timer.join()
    phases = [json.loads(line)["phase"] for line in said.out.splitlines()]
    assert said.code == 0
    assert (phases[0], phases[-1]) == ("running", "ended")


def test_steering(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job) as server:
        assert stoker("scale", "3") == (0, "the target is 3 nodes now\n", "")
        assert stoker("scale", "night-run", "4", "--json").out == '{"why":"the target is 4 nodes now"}\n'
        assert stoker("drain", server.endpoint, "node-b2", "--why", "new disks").code == 0
        assert stoker("drain", "host1").code == 0
        assert stoker("stop", "--why", "enough").code == 0
    assert job.asked == [
        ("scale", 3),
        ("scale", 4),
        ("leave", "node-b2", "new disks"),
        ("leave", "node-a1", "drained by `stoker job drain`"),
        ("stop", "enough", 130),
    ]


def test_steering_that_cannot_be(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job):
        assert stoker("scale", "9") == (2, "", "stoker: 9 nodes: this job takes 1 to 4 (--nnodes)\n")
        assert stoker("scale", "0").code == 2
        assert stoker("scale", "many").code == 2
        assert "it has node-a1 on host1, node-b2 on host2" in stoker("drain", "host3").err
        twins = tuple(msgspec.structs.replace(node, host="host1") for node in job.told.nodes)
        job.told = msgspec.structs.replace(job.told, nodes=twins)
        assert "say which of node-a1, node-b2" in stoker("drain", "host1").err
        job.end()
        assert stoker("scale", "3").code == 1
    assert not job.asked


def test_waiting_for_a_change(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job) as server:
        assert stoker("scale", "2", "--wait", "20s").code == 0, "two nodes train already"
        late = stoker("scale", "3", "--wait", "100ms")
        assert late.code == 3
        assert "2 of 3 nodes train" in late.err
        rest = msgspec.structs.replace(job.told, nodes=job.told.nodes[:1])
        timer = threading.Timer(0.2, lambda: server.do(lambda: setattr(job, "told", rest)))
        timer.start()
        assert stoker("drain", "node-b2", "--wait", "20s").code == 0
        timer.join()
        assert stoker("stop", "--wait", "20s").code == 0


def test_waiting_for_a_size_of_a_job_without_a_world(stoker: Callable[..., Said]) -> None:
    """Workers of dynamic shards have no rank."""
    told = FakeJob().told
    nodes = tuple(
        msgspec.structs.replace(
            node,
            workers=tuple(msgspec.structs.replace(w, rank=None, phase="working") for w in node.workers),
        )
        for node in told.nodes
    )
    job = FakeJob(msgspec.structs.replace(told, nodes=nodes))
    with running(job) as server:
        assert stoker("scale", "2", "--wait", "20s").code == 0
        starting = tuple(
            msgspec.structs.replace(
                node,
                workers=tuple(msgspec.structs.replace(w, phase="starting") for w in node.workers),
            )
            for node in nodes
        )
        server.do(lambda: setattr(job, "told", msgspec.structs.replace(told, nodes=starting)))
        assert "0 of 2 nodes train" in stoker("scale", "2", "--wait", "100ms").err


STACKS = """\
rank 1 (worker-1) on node-a1, process 4712, stopped
  File "/job/train.py", line 9, in step
  File "/job/loader.py", line 7, in read
  and 1 more thread (--all-threads)

worker-3 on node-b2
  it has not started

2 workers: ranks 0, 2
  File "/job/train.py", line 9, in step
  File "torch/distributed.py", line 1, in all_reduce
  and 1 more thread (--all-threads)
"""


def test_stacks_of_ranks_that_do_the_same_are_shown_once(stoker: Callable[..., Said]) -> None:
    with running(FakeJob()) as server:
        said = stoker("stacks").out
        assert said == STACKS, "the odd one out comes first"
        every = stoker("stacks", "--all-threads").out
        assert every.count("  thread loader") == 2
        assert "--all-threads" not in every
        assert len(json.loads(stoker("stacks", "--json", "--within", "2s").out)["workers"]) == 4
        assert server.job is not None
        assert server.job.asked == [("stacks", 10.0), ("stacks", 10.0), ("stacks", 2.0)]
        assert stoker("stacks", "--within", "2h").code == 2


def test_shards_advice_and_metrics(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    with running(job):
        rows = stoker("shards").out.splitlines()
        assert rows[1].split() == ["stoker://clicks/", "1", "2", "1", "7", "10", "0", "1"]
        assert json.loads(stoker("shards", "--json").out)["shards"][0]["todo"] == 7
        assert "not enough has been measured" in stoker("advice").out
        assert json.loads(stoker("advice", "--json").out) == {"advice": None}
        job.advice = some_advice()
        assert stoker("advice").out.startswith("have 4 nodes, not 2: 2 more nodes give 80 % more\n")
        assert 'stoker_job_generation{job="night-run"} 4\n' in stoker("metrics").out
        assert "stoker_job_generation" in json.loads(stoker("metrics", "--json").out)["metrics"]


def test_which_job(stoker: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = stoker("status")
    assert (none.code, none.out) == (3, "")
    assert "no job runs on this machine" in none.err
    with running(FakeJob()) as first, running(FakeJob(a_status("other"))) as second:
        unclear = stoker("status")
        assert unclear.code == 2
        assert f"night-run at {first.endpoint}, other at {second.endpoint}" in unclear.err
        assert "other  running" in stoker("status", "other").out
        assert "other  running" in stoker("status", second.endpoint).out
        assert "here: night-run, other" in stoker("status", "third").err
    with served(FakeJob()) as elsewhere:
        untold = stoker("status", elsewhere.endpoint)
        assert untold.code == 2
        assert "--job-token-file FILE or STOKER_JOB_TOKEN" in untold.err
        (tmp_path / "token").write_text(TOKEN + "\n")
        assert stoker("status", elsewhere.endpoint, "--job-token-file", str(tmp_path / "token")).code == 0
        monkeypatch.setenv("STOKER_JOB_TOKEN", "wrong")
        denied = stoker("status", elsewhere.endpoint)
        assert denied.code == 1
        assert "refuses the job token" in denied.err
        monkeypatch.setenv("STOKER_JOB_TOKEN", TOKEN)
        assert stoker("status", elsewhere.endpoint).code == 0
        endpoint = elsewhere.endpoint
    gone = stoker("status", endpoint)
    assert gone.code == 3
    assert "no master answers" in gone.err


def test_two_jobs_of_one_name_are_told_apart_by_endpoint(stoker: Callable[..., Said]) -> None:
    with running(FakeJob(a_status("none"))) as first, running(FakeJob(a_status("none"))):
        assert stoker("status", "none").code == 2
        assert stoker("status", first.endpoint).code == 0


@pytest.mark.parametrize(
    "arguments", [[], ["bark"], ["status", "--every", "soon"], ["events", "--after", "-1"], ["drain"]]
)
def test_wrong_usage(stoker: Callable[..., Said], arguments: list[str]) -> None:
    assert stoker(*arguments).code == 2


@pytest.mark.parametrize(
    "command", ["ls", "status", "events", "scale", "stop", "drain", "stacks", "shards", "advice", "metrics"]
)
def test_every_command_has_help_with_examples(stoker: Callable[..., Said], command: str) -> None:
    said = stoker(command, "--help")
    assert said.code == 0
    assert f"stoker job {command}" in said.out.split("examples:")[1]


def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "job", *arguments],
        env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("arguments", [("events", "--follow"), ("status", "--watch")])
def test_ctrl_c_ends_a_watching_command_in_silence(arguments: tuple[str, ...]) -> None:
    job = FakeJob()
    job.record("generation", "first")
    with running(job), start(*arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "stoker: interrupted\n"


@pytest.mark.real
def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    job = FakeJob()
    for _ in range(3000):
        job.record("noise", "x" * 100)
    with running(job), start("events", "--json") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
