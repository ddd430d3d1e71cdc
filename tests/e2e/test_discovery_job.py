"""Whole jobs over hosts that a driver found: real training, real kills."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.data.audit import Committed, Entered, Entry
from stoker.data.ledger import read_ledgers
from tests.e2e.hosts import Hosts, needs_hosts
from tests.e2e.hosts_census import command_of
from tests.e2e.run_helpers import Finished, own_environment, said, wait_for

pytestmark = pytest.mark.real

SOURCE = Path(__file__).parents[2]
LOCAL = ("--rdzv-endpoint", "127.0.0.1:0", "--remote-shell", "env WHERE={host}")


class Run:
    """A running job, in a folder of its own, on hosts that a file lists."""

    def __init__(
        self, folder: Path, *arguments: str, prefix: Sequence[str] = (), script: bool = True
    ) -> None:
        self.folder = folder
        (folder / "hosts.sh").write_text("#!/bin/sh\ncat hosts\n")
        (folder / "hosts.sh").chmod(0o755)
        source = ("--host-discovery-script", "./hosts.sh", "--discovery-interval", "200ms") if script else ()
        environment = own_environment(folder)
        environment.pop("STOKER_JOB_TOKEN", None)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "stoker.cli.main", "run", "--no-cache", "--audit", *source,
             *arguments],
            cwd=folder,
            env={**environment, "PYTHONPATH": f"{SOURCE}/src:{SOURCE}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def write_hosts(self, *hosts: str) -> None:
        (self.folder / "hosts.part").write_text("\n".join(hosts))
        (self.folder / "hosts.part").rename(self.folder / "hosts")

    def finish(self, timeout_s: float = 90.0) -> Finished:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            out, err = self.process.communicate()
            raise AssertionError(f"still runs after {timeout_s} s\n{Finished(-1, out, err).text}") from None
        return Finished(self.process.returncode, out, err)

    def stop(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()

    def processes(self) -> list[psutil.Process]:
        """All that runs for this job: it has this folder as its working directory or its runtime folder."""
        return [p for p in psutil.process_iter() if p.pid != self.process.pid and self._is_mine(p)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(self.folder) or str(self.folder) in process.environ().get(
                "XDG_RUNTIME_DIR", ""
            )
        except psutil.Error:
            return False

    def agent(self, host: str) -> psutil.Process:
        agents = [p for p in self.processes() if "stoker.cli.agent" in " ".join(command_of(p))]
        (found,) = [p for p in agents if p.environ().get("WHERE", host) == host]
        return found

    def entries(self) -> list[Entry]:
        return [entry for path in self.folder.glob("stoker-logs/**/audit") for entry in read_ledgers(path)]

    def commits(self) -> int:
        return max((e.step for e in self.entries() if isinstance(e, Committed)), default=0)

    def sizes(self) -> list[int]:
        """The size of each world in turn."""
        sizes = {e.generation: e.world_size for e in self.entries() if isinstance(e, Entered)}
        return [sizes[generation] for generation in sorted(sizes)]

    def decided(self, kind: str) -> list[str]:
        lines: list[dict[str, Any]] = []
        for path in self.folder.glob("stoker-logs/*/hosts.jsonl"):
            lines += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line["why"] for line in lines if line["kind"] == kind]

    def until(self, what: Callable[[], Any], why: str) -> None:
        """Wait, as long as the job runs."""

        def look() -> Any:
            if self.process.poll() is not None:
                raise AssertionError(f"the job has ended before {why}\n{self.finish().text}")
            return what()

        wait_for(look, 150, why=why)

    def wait_for_size(self, size: int, more: int = 5) -> None:
        """Until the newest world has this size and has made some steps."""
        self.until(lambda: self.sizes()[-1:] == [size], f"a world of {size}")
        before = self.commits()
        self.until(lambda: self.commits() > before + more, f"steps in a world of {size}")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()
        with contextlib.suppress(ValueError):  # it was heard to the end already
            print("\n".join(run.process.communicate()))


TRAIN = str(Path(__file__).with_name("discovery_train.py"))
STEPS = 10
"""Of an epoch."""


def assert_exact(job: Run) -> Finished:
    """Let it come to its end: all records of all epochs were read exactly once, and all workers hold the same."""
    (job.folder / "last.part").write_text(str(job.commits() // STEPS + 4))
    (job.folder / "last.part").rename(job.folder / "last-epoch")
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    last = int((job.folder / "last-epoch").read_text())
    workers = said(job.folder)
    assert {w["commits"] for w in workers} == {(last + 1) * STEPS}
    assert len(workers) == workers[0]["world_size"] == job.sizes()[-1]
    assert len({str(w["weights"]) for w in workers}) == 1, "all hold the same weights"
    assert not job.processes()
    return done


def trainers(job: Run) -> list[int]:
    return [p.pid for p in job.processes() if "discovery_train.py" in " ".join(command_of(p)[1:4])]


def test_hosts_added_and_removed(tmp_path: Path, runs: list[Run]) -> None:
    (tmp_path / "hosts").write_text("h1:1\n")
    job = Run(tmp_path, *LOCAL, "--nnodes", "1:4", TRAIN)
    runs.append(job)
    job.wait_for_size(1)
    first = trainers(job)
    job.write_hosts("h1:1", "h2:2")
    job.wait_for_size(3)
    job.write_hosts("h2:2")
    job.wait_for_size(2)
    job.until(lambda: not set(first) & set(trainers(job)), "h1's worker to have left")
    job.write_hosts("h2:2", "h3:1")
    job.wait_for_size(3)
    done = assert_exact(job)
    assert job.sizes() == [1, 3, 2, 3]
    assert ", 0 done again" in done.err, "no step was lost"
    assert "[h3] [rank 2] trained" in done.out


def test_other_slots(tmp_path: Path, runs: list[Run]) -> None:
    (tmp_path / "hosts").write_text("h1:1\nh2:1\n")
    job = Run(tmp_path, *LOCAL, "--nnodes", "1:4", TRAIN)
    runs.append(job)
    job.wait_for_size(2)
    job.write_hosts("h1:1", "h2:2")
    job.wait_for_size(3)
    assert ", 0 done again" in assert_exact(job).err, "no step was lost"
    assert job.decided("host-blacklisted") == []


def test_a_host_that_dies_is_left_out_and_comes_back(tmp_path: Path, runs: list[Run]) -> None:
    job = Run(tmp_path, *LOCAL, "--hosts", "h1,h2", "--nnodes", "1:2", "--blacklist-cooldown-range", "2s", "4s",
              TRAIN, script=False)  # fmt: skip
    runs.append(job)
    job.wait_for_size(2)
    before = len(job.sizes())
    job.agent("h2").kill()
    job.until(lambda: job.decided("host-blacklisted"), "the blacklist")
    job.until(lambda: 1 in job.sizes()[before:], "a world without it")
    job.wait_for_size(2)
    assert_exact(job)
    assert "killed by signal 9" in job.decided("host-blacklisted")[0]


def test_all_hosts_are_blacklisted(tmp_path: Path, runs: list[Run]) -> None:
    job = Run(tmp_path, *LOCAL, "--hosts", "h1,h2", "--remote-python", "/nowhere/python", "--timeout", "16s", TRAIN,
              script=False)  # fmt: skip
    runs.append(job)
    done = job.finish()
    assert done.code == 3, done.text
    assert "all hosts are blacklisted: h1 (its agent exited with code 127" in done.err
    assert not job.processes()


def test_the_scripts_own_error_ends_the_job(tmp_path: Path, runs: list[Run]) -> None:
    job = Run(tmp_path, *LOCAL, "--hosts", "h1,h2", TRAIN, "--fail", script=False)
    runs.append(job)
    done = job.finish()
    assert done.code == 1, done.text
    assert "this script is wrong" in done.err
    assert job.decided("host-blacklisted") == []
    assert not job.processes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_the_driver_ends(tmp_path: Path, runs: list[Run], number: signal.Signals) -> None:
    job = Run(tmp_path, *LOCAL, "--hosts", "h1,h2", "--timeout", "40s", TRAIN, script=False)
    runs.append(job)
    job.wait_for_size(2)
    job.process.send_signal(number)
    assert job.finish().code == (-9 if number == signal.SIGKILL else 130)
    wait_for(lambda: not job.processes(), why=f"nothing to be left: {job.processes()}")


@needs_hosts
def test_a_host_that_is_cut_off_is_left_out_and_comes_back(tmp_path: Path, runs: list[Run]) -> None:
    with Hosts(tmp_path / "network", 3) as hosts:
        first, second, third = hosts
        name = hosts.network.name
        enter = f"nsenter --net=/run/netns/{name}-{{host}} --uts=/run/stoker-test/{name}-{{host}} --"
        job = Run(tmp_path, "--hosts", "h2,h3", "--nnodes", "1:2", "--timeout", "30s", "--remote-shell", enter,
                  "--rdzv-endpoint", f"{first.address}:0", "--blacklist-cooldown-range", "1s", "1s", TRAIN,
                  script=False, prefix=first.entry)  # fmt: skip
        runs.append(job)
        job.wait_for_size(2)
        hosts.partition([first, second], [third])
        job.until(lambda: job.decided("host-blacklisted"), "the blacklist")
        assert "h3 is blacklisted" in job.decided("host-blacklisted")[0]
        job.wait_for_size(1, more=1)
        hosts.heal()
        job.wait_for_size(2)
        assert_exact(job)
