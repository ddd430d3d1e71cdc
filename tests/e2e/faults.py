"""One elastic job over test hosts whose workers do what they are told, and what came of it.

with job_over(tmp_path, 3, "2:3") as job:
    job.start(*job.hosts)
    job.wait_for_steps(10)
    job.order(job.hosts[1], "hang")
    ...
    job.finish()
    job.assert_exact()
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from stoker.cli.job_events import read_events
from stoker.data.audit import Committed, Entered, Entry, Read, audit, audit_known
from stoker.data.ledger import read_ledgers
from stoker.errors import EnvironmentProblem
from stoker.wire.control import JobEvent
from tests.e2e import hosts_census as census
from tests.e2e.hosts import Host, Hosts
from tests.e2e.run_helpers import SCRIPTS, Finished, Stoker, wait_for

OBEDIENT = str(SCRIPTS / "obedient.py")
RECORDS, BATCH = 100, 20
STEPS_AN_EPOCH = RECORDS // BATCH
EPOCHS_AHEAD = 10
"""Epochs between the newest one and the last, so that the order to end reaches every worker in time."""
BEAT_TIMEOUT_S, USER_TIMEOUT_S = 5.0, 60.0
"""Of a job that is told nothing else."""
WAIT_S = 90.0
"""Generous: the machine may be busy with other things."""


class Job:
    """`stoker run` on several hosts, all with the same script and flags."""

    def __init__(
        self,
        hosts: Hosts,
        nodes: str,
        *flags: str,
        slots: int = 1,
        timeout: str = f"{USER_TIMEOUT_S:.0f}s",
        endpoint: str = "",
        script: Sequence[str] = (),
    ) -> None:
        self.hosts = hosts
        self.orders = hosts.folder / "orders"
        self.orders.mkdir()
        where = ("--rdzv-endpoint", endpoint or hosts.endpoint) if nodes != "1" else ()
        self.command = (
            *("run", "--nnodes", nodes, *where, "--nproc-per-node", str(slots), "--timeout", timeout),
            *("--no-cache", "--audit", *flags),
        )
        self.script = script or (OBEDIENT, "--orders", str(self.orders), "--out", ".")
        self.runs: dict[Host, Stoker] = {}
        """The newest `stoker run` of each host."""
        self.others: list[Stoker] = []
        """Other commands whose words belong to the story."""

    # -- steering -----------------------------------------------------------------------------------------

    def start(
        self, *hosts: Host, flags: Sequence[str] = (), environment: dict[str, str] | None = None
    ) -> None:
        """Start an agent on each, with flags and variables that the others do not have."""
        for host in hosts:
            self.runs[host] = host.stoker(*self.command, *flags, *self.script, environment=environment)

    def also(self, host: Host, *arguments: str) -> Stoker:
        """Start another `stoker` command."""
        command = host.stoker(*arguments)
        self.others.append(command)
        return command

    def order(self, host: Host, what: str, argument: object = "", *, slot: int = 0) -> Path:
        """Tell the worker in this slot to do something; returns the file, which is gone once it begins."""
        path = self.orders / f"{what}.{host.name}.{slot}"
        self._write(path, str(argument))
        return path

    def end_soon(self) -> int:
        """Have the training end some epochs ahead; returns how many epochs there will be."""
        epochs = self.commits() // STEPS_AN_EPOCH + EPOCHS_AHEAD
        self._write(self.orders / "last-epoch", str(epochs))
        return epochs

    def finish(self, *hosts: Host, timeout_s: float = WAIT_S) -> list[Finished]:
        """End the training; the runs on these hosts (all by default) must succeed, and leave nothing behind."""
        self.end_soon()
        return self.ends(0, *hosts, timeout_s=timeout_s)

    def ends(self, code: int, *hosts: Host, timeout_s: float = WAIT_S) -> list[Finished]:
        """The runs on these hosts (all by default) must end with this code, and leave nothing behind."""
        done = [self.runs[host].finish(timeout_s) for host in hosts or list(self.runs)]
        assert [d.code for d in done] == [code] * len(done), "\n".join(d.text for d in done)
        if not hosts:
            self.hosts.assert_nothing_left(WAIT_S)
        return done

    # -- what runs ----------------------------------------------------------------------------------------

    def pids(self, *hosts: Host) -> set[int]:
        """Process ids of the workers on these hosts (all by default)."""
        return {worker.pid for host in hosts or self.hosts.hosts for worker in host.workers()}

    def worker(self, host: Host, slot: int = 0) -> psutil.Process:
        """The newest worker in a slot."""
        return self.workers(host)[slot]

    def workers(self, host: Host) -> dict[int, psutil.Process]:
        """The newest worker in each slot."""
        found = {}
        for process in host.workers():
            with contextlib.suppress(psutil.Error):
                found[int(process.environ()["LOCAL_RANK"])] = process
        return found

    def master(self) -> psutil.Process:
        """The master's process, on whichever host it is."""
        (master,) = self.masters()
        return master

    def masters(self) -> list[psutil.Process]:
        return [master for host in self.hosts for master in host.masters()]

    def is_served(self) -> bool:
        """Whether somebody listens at the endpoint."""
        host, _, port = self.hosts.endpoint.rpartition(":")

        def connect() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
                return True
            return False

        return self.hosts[0].call(connect)

    # -- what was written down ----------------------------------------------------------------------------

    def commits(self, *hosts: Host) -> int:
        """The newest commit of any worker (on these hosts)."""
        return max((last_commit(path) for path in self._ledgers(*hosts)), default=0)

    def entries(self) -> list[Entry]:
        """The ledgers of every worker on every host, brought together."""
        return [entry for folder in {p.parent for p in self._ledgers()} for entry in read_ledgers(folder)]

    def worlds(self) -> list[tuple[int, int]]:
        """(generation, workers) of each world in turn, as its workers entered it."""
        return sorted({(e.generation, e.world_size) for e in self.entries() if isinstance(e, Entered)})

    def hosts_by_rank(self) -> list[Host]:
        """Whose workers the newest world has, by rank."""
        found: dict[int, dict[int, Host]] = {}
        for host in self.hosts:
            for folder in {path.parent for path in self._ledgers(host)}:
                for entry in read_ledgers(folder):
                    if isinstance(entry, Entered):
                        found.setdefault(entry.generation, {})[entry.rank] = host
        newest = found[max(found)]
        return [newest[rank] for rank in sorted(newest)]

    def events(self, *kinds: str, after: int = 0) -> list[JobEvent]:
        """What the event log holds of these kinds (all by default)."""
        found: list[JobEvent] = []
        for path in self.hosts.folder.glob("h*/*/*/events.db"):
            with contextlib.suppress(EnvironmentProblem):  # it has just been made
                found += read_events(path, after)
        return [event for event in found if not kinds or event.kind in kinds]

    def said(self) -> list[dict[str, Any]]:
        """What the workers wrote at their end, by rank."""
        words = [json.loads(p.read_text()) for p in self.hosts.folder.glob("h*/*.json")]
        return sorted(words, key=lambda said: said["rank"])

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, what: Callable[[], Any], why: str, timeout_s: float = WAIT_S) -> Any:
        """Wait until `what()` is true; returns it. In vain, once no run is left."""

        def found() -> Any:
            value = what()
            if not value and self.runs and all(run.process.poll() is not None for run in self.runs.values()):
                value = what()
                assert value, f"every run has ended, and no {why}"
            return value

        return wait_for(found, timeout_s, why)

    def wait_for_steps(self, count: int = 5, *hosts: Host) -> int:
        """Wait for so many more commits (on these hosts); returns the newest."""
        before = self.commits(*hosts)
        self.wait(lambda: self.commits(*hosts) >= before + count, f"{count} commits after {before}")
        return self.commits(*hosts)

    def wait_for_world(self, size: int = 0, *, after: int = 0) -> int:
        """Wait until a generation newer than `after` with so many workers (0: any) commits; returns its number."""

        def found() -> int:
            newest, workers = self.worlds()[-1] if self.worlds() else (0, 0)
            return newest if newest > after and size in (0, workers) else 0

        generation: int = self.wait(found, f"a world of {size} after generation {after}")
        self.wait_for_steps(3)
        return generation

    def wait_for_event(self, kind: str, *, words: str = "", after: int = 0) -> JobEvent:
        """Wait for an event of this kind whose words hold these."""

        def found() -> list[JobEvent]:
            return [event for event in self.events(kind, after=after) if words in event.why]

        event: JobEvent = self.wait(found, f"event {kind} {words}")[0]
        return event

    def generation(self) -> int:
        """Of the newest world that workers have entered."""
        return self.worlds()[-1][0]

    # -- verdicts -----------------------------------------------------------------------------------------

    def assert_exact(self, *, steps_lost: int = 0, ended: bool = True) -> None:
        """No record was missed or read twice in what was committed; `ended`: and all epochs were read to their end."""
        entries = self.entries()
        if ended:
            epochs = int((self.orders / "last-epoch").read_text())
            (dataset,) = {e.dataset for e in entries if isinstance(e, Read)}
            report = audit(entries, {dataset: RECORDS}, epochs)
            assert report.steps == epochs * STEPS_AN_EPOCH, report
            self.assert_same_weights()
        else:
            report = audit_known(entries)
        assert (report.missed, report.repeated, report.unseen_steps) == (0, 0, 0), report
        assert report.steps_lost <= steps_lost, report

    def steps_lost(self) -> int:
        """Steps that were committed and had to be done again, so far."""
        return audit_known(self.entries()).steps_lost

    def assert_left_at_an_agreed_commit(self, after: int) -> int:
        """Of the worlds newer than generation `after`, the first one took over where the older one had agreed to end
        because a node leaves, and nothing was lost. Returns how many commits that was after the node said so."""
        agreed, *_ = [e for e in self.events("generation") if e.details["generation"] > after]
        world, *_ = [e for e in self.events("world") if e.details["generation"] > after]
        leaving = [e for e in self.events("node-leaving") if e.wall_s <= agreed.wall_s][-1]
        assert "leaves: " in agreed.why
        assert 0 <= agreed.details["stop_at_commit"] <= world.details["commits"], (agreed, world)
        assert world.details["commits_lost"] == 0
        commits = [e for e in self.entries() if isinstance(e, Committed) and e.wall_s <= leaving.wall_s]
        ahead: int = agreed.details["stop_at_commit"] - max(e.step for e in commits)
        return ahead

    def assert_same_weights(self) -> None:
        """All workers that came to the end hold the same state."""
        weights = [(said["commits"], said["weights"]) for said in self.said()]
        assert weights
        assert all(w == weights[0] for w in weights), weights

    def story(self) -> str:
        """For a failing test: what the runs said, and the event log."""
        census.kill_all(self.hosts.processes)
        lines = []
        for run in [*self.runs.values(), *self.others]:
            with contextlib.suppress(AssertionError, ValueError):
                done = run.finish(5)
                words = f"{done.out[-2000:]}\n{done.err[-6000:]}"
                lines.append(f"=== {run.folder.name}: {run.arguments[0]} ended with {done.code}\n{words}")
        lines += [f"{e.wall_s:.2f} {e.kind}: {e.why[:300]} {e.details}"[:600] for e in self.events()]
        return "\n".join(lines)

    def _ledgers(self, *hosts: Host) -> list[Path]:
        names = [host.name for host in hosts] or ["h*"]
        return [path for name in names for path in self.hosts.folder.glob(f"{name}/*/*/audit/*.jsonl")]

    def _write(self, path: Path, text: str) -> None:
        part = path.with_name(f".{path.name}")
        part.write_text(text)
        part.rename(path)


@contextlib.contextmanager
def job_over(folder: Path, count: int, nodes: str, *flags: str, **options: Any) -> Iterator[Job]:
    """A job over so many hosts, none of them started; a failing test tells its story."""
    with Hosts(folder, count) as hosts:
        job = Job(hosts, nodes, *flags, **options)
        try:
            yield job
        except BaseException as error:
            error.add_note(job.story())
            raise


def last_commit(path: Path) -> int:
    """The newest commit in a ledger, whose last lines alone are read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        if line.startswith(b'{"type":"commit"') and line.endswith(b"}"):
            return int(json.loads(line)["step"])
    return 0


def is_by_beats(why: str) -> bool:
    """Whether the beat timeout has decided, by an event's `… for X s`, and not the user's, which is a minute. On a busy
    machine it may be late, and a master that stood still itself gives as long again."""
    (found,) = re.findall(r" for ([0-9.]+) s", why)
    return BEAT_TIMEOUT_S <= float(found) < USER_TIMEOUT_S / 2


def runs_on(process: psutil.Process) -> bool:
    """Whether this very process still runs."""
    return bool(census.alive([process]))


def kill_at_once(*processes: psutil.Process) -> None:
    """SIGKILL them all before any of them can be missed."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.send_signal(signal.SIGKILL)
