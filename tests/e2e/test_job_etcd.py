"""`stoker job` on hosts of a job whose master etcd elects: wherever that is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from stoker.cli.job_events import journalled
from tests.e2e.etcd import Etcd, running_etcd
from tests.e2e.run_helpers import TOY, Stoker, kill_all, ledger, run, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def test_the_job_is_one_and_its_master_is_found_wherever_it_is(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd")
    etcd.start()
    (tmp_path / "runtime").mkdir(mode=0o700)
    shared = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "STOKER_JOB_TOKEN": "secret"}
    flags = ("run", "--no-cache", "--nnodes", "1:2", "--timeout", "60s", "--journal", etcd.url, "--rdzv-id", "night",
             "--audit", TOY, "--out", ".", "--epochs", "999", "--step-s", "0.05")  # fmt: skip
    folders = [tmp_path / "first", tmp_path / "second"]
    nodes: list[Stoker] = []

    def job(*arguments: str) -> dict[str, object]:
        done = run(tmp_path, "job", *arguments, "--json", **shared)
        assert done.code == 0, done.text
        return dict(json.loads(done.out)) if done.out else {}

    def has_nodes(count: int) -> bool:
        done = run(tmp_path, "job", "status", "--json", **shared)
        return done.code == 0 and json.loads(done.out)["world_size"] == count

    try:
        for folder in folders:
            folder.mkdir()
            nodes.append(Stoker(folder, *flags, environment=shared))
            wait_for(lambda: ledger(folder, "commit"), why="commits")  # noqa: B023 (called at once)
        wait_for(lambda: has_nodes(2), why="a world of two, without JOB being said")
        (listed,) = job("ls")["jobs"]  # type: ignore[misc]
        assert listed["status"]["phase"] == "running", listed
        assert "secret" not in json.dumps(listed)
        assert run(tmp_path, "job", "status", listed["endpoint"], **shared).code == 0
        watch = Stoker(tmp_path, "job", "status", "night", "--watch", "--json", environment=shared)
        assert watch.process.stdout is not None
        before = json.loads(watch.process.stdout.readline())
        kill_all(nodes[0])
        wait_for(lambda: has_nodes(1), 120, why="the other one's world")
        (elsewhere,) = job("ls")["jobs"]  # type: ignore[misc]
        assert elsewhere["endpoint"] != listed["endpoint"]
        assert elsewhere["status"]["phase"] == "running"
        job("stop", "--wait", "60s")
        assert nodes[1].finish().code == 130
        watched = watch.finish()
        assert watched.code == 0, watched.text
        last = json.loads(watched.out.splitlines()[-1])
        assert last["master"]["pid"] != before["master"]["pid"], "it looked on at the next master"
    finally:
        for node in nodes:
            if node.process.poll() is None:
                kill_all(node)
        etcd.stop()


def test_a_node_that_was_away_at_the_end_ends_with_the_job_and_does_not_begin_it_anew(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        (tmp_path / "runtime").mkdir(mode=0o700)
        shared = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "STOKER_JOB_TOKEN": "secret"}
        flags = ("run", "--no-cache", "--nnodes", "1:2", "--timeout", "60s", "--journal", etcd.url, "--audit",
                 TOY, "--out", ".", "--epochs", "999", "--step-s", "0.05")  # fmt: skip
        folders = [tmp_path / "first", tmp_path / "second"]
        nodes: list[Stoker] = []
        stopped: list[psutil.Process] = []
        try:
            for folder in folders:
                folder.mkdir()
                nodes.append(Stoker(folder, *flags, environment=shared))
                wait_for(lambda: ledger(folder, "commit"), why="commits")  # noqa: B023 (called at once)
            second = psutil.Process(nodes[1].process.pid)
            stopped = [second, *second.children(recursive=True)]
            for process in stopped:
                process.suspend()
            assert run(tmp_path, "job", "stop", **shared).code == 0
            first = nodes[0].finish(90)
            assert first.code == 130, first.text
            for process in stopped:
                process.resume()
            late = nodes[1].finish(90)
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.Error):
                    process.resume()
            for node in nodes:
                if node.process.poll() is None:
                    kill_all(node)
        assert late.code == 130, late.text
        assert "the job has ended" in late.err
        events = list(journalled(etcd.url, None, 0, 10.0))
        kinds = [event.kind for event in events]
        assert kinds.count("ended") == 1
        assert "world" not in kinds[kinds.index("ended") :], "nothing was begun anew"


def test_nodes_that_start_before_etcd_wait_for_it_and_say_so(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd")
    (tmp_path / "runtime").mkdir(mode=0o700)
    shared = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "STOKER_JOB_TOKEN": "secret"}
    flags = (
        "run",
        "--no-cache",
        "--nnodes",
        "2",
        "--timeout",
        "90s",
        "--journal",
        etcd.url,
        TOY,
        "--epochs",
        "1",
    )
    nodes: list[Stoker] = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            nodes.append(Stoker(tmp_path / name, *flags, environment=shared))
        stderr = nodes[0].process.stderr
        assert stderr is not None
        assert any("waiting for the journal, for 90 s at most: no etcd endpoint" in line for line in stderr)
        etcd.start()
        for node in nodes:
            done = node.finish()
            assert done.code == 0, done.text
    finally:
        etcd.stop()
