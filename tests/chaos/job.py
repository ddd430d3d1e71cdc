"""The job under chaos, as its command line and its event log show it: all that is known of them is here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from stoker.cli.job_events import read_events
from stoker.errors import StokerError
from stoker.job.journal.open import open_journal, open_locator
from stoker.wire.control import JobEvent
from tests.chaos.plan import Ground, Kind
from tests.e2e.hosts import Host, Hosts
from tests.e2e.run_helpers import SCRIPTS, Finished, own_environment

TIMEOUT_S = 16
HANG_AFTER_S = 3
RECORDS, BATCH = 1000, 20
VIRTUAL_RANKS = 4
MIN_NODES = 2
EXIT_NO_MASTER = 3
"""An agent that reaches no master for the whole timeout."""
JOB = "chaos"


@dataclass(frozen=True)
class Files:
    """What the hosts share."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """A disk of its own."""
        return self.folder / "checkpoints"

    @property
    def journal(self) -> Path:
        """A disk of its own, with the master's journal if that is a file."""
        return self.folder / "journal"

    @property
    def orders(self) -> Path:
        """What the workers look at; see tests/scripts/chaos.py."""
        return self.folder / "orders"

    @property
    def said(self) -> Path:
        """What the workers say at their end."""
        return self.folder / "said"

    @property
    def events(self) -> Path:
        """The event log at the end, a JSON object a line."""
        return self.folder / "events.jsonl"

    def order(self, name: str, text: str = "") -> Path:
        """Give an order to the workers, whole at once."""
        part, path = self.orders / f".{name}", self.orders / name
        part.write_text(text)
        part.rename(path)
        return path


class Setting(Protocol):
    """Where the master keeps what it must remember, and so which host it is on."""

    @property
    def ground(self) -> Ground: ...

    @property
    def flags(self) -> Sequence[str]:
        """For `stoker run`."""
        ...

    def read(self, after: int) -> Iterable[JobEvent]:
        """Events that are newer; raises StokerError while they cannot be read."""
        ...

    def endpoint(self) -> str:
        """Where the master is now. Raises StokerError while there is none."""
        ...

    def survivors(self, hit: Sequence[int]) -> set[int]:
        """Hosts on the side that goes on when those that were hit and the others hear nothing of each other."""
        ...


class WithFile:
    """The journal is a file and the master on the first host."""

    def __init__(self, hosts: Hosts, files: Files) -> None:
        self.ground = Ground(hosts.count - 1)
        self.path = files.journal / "events.db"
        self.flags: Sequence[str] = ("--rdzv-endpoint", hosts.endpoint, "--journal", str(self.path))
        self._endpoint = hosts.endpoint
        self._everybody = set(range(1, self.ground.hosts + 1))

    def read(self, after: int) -> Iterable[JobEvent]:
        return read_events(self.path, after) if self.path.exists() else ()

    def endpoint(self) -> str:
        return self._endpoint

    def survivors(self, hit: Sequence[int]) -> set[int]:
        return set(hit) if self.ground.bound_to in hit else self._everybody - set(hit)


class WithEtcd:
    """The journal is in etcd, with members on three of the hosts; the master is on any."""

    def __init__(self, observer: Host, ground: Ground, url: str, job: str = JOB) -> None:
        self.ground = ground
        self._job = job
        self.flags: Sequence[str] = ("--journal", url)
        self._observer = observer
        self._url = url
        self._everybody = set(range(1, ground.hosts + 1))

    def read(self, after: int) -> Iterable[JobEvent]:
        return self._observer.call(lambda: asyncio.run(self._read(after)))

    def endpoint(self) -> str:
        return self._observer.call(lambda: asyncio.run(self._locate()))

    def survivors(self, hit: Sequence[int]) -> set[int]:
        has_quorum = len(set(hit) & set(self.ground.quorum)) * 2 > len(self.ground.quorum)
        return set(hit) if has_quorum else self._everybody - set(hit)

    async def _read(self, after: int) -> list[JobEvent]:
        journal = open_journal(self._url, self._job)
        try:
            return [_event(entry) for entry in await journal.read_entries(after)]
        finally:
            await journal.close()

    async def _locate(self) -> str:
        locator = open_locator(self._url, self._job)
        try:
            return await asyncio.wait_for(locator.locate(), 3.0)
        except TimeoutError:
            raise StokerError("etcd names no master") from None
        finally:
            await locator.close()


def _event(entry: dict[str, object]) -> JobEvent:
    own = {name: entry.pop(name) for name in ("seq", "wall_s", "kind", "why")}
    return msgspec.convert({**own, "details": entry}, JobEvent)


def command(setting: Setting, files: Files, *, exact: bool) -> list[str]:
    """What every host runs."""
    return [
        *(sys.executable, "-m", "stoker.cli.main", "run", *setting.flags, "--rdzv-id", JOB),
        *("--nnodes", f"{MIN_NODES}:{setting.ground.hosts}", "--timeout", f"{TIMEOUT_S}s", "--no-cache"),
        *("--max-restarts", "1000000", "--forgive-after", "30s", "--hang-after", f"{HANG_AFTER_S}s"),
        *("--audit", "--checkpoint-dir", str(files.checkpoints), "--checkpoint-every", "50"),
        *_script(files, exact=exact),
    ]


def _script(files: Files, *, exact: bool) -> list[str]:
    divided = ("--virtual-ranks", str(VIRTUAL_RANKS)) if exact else ()
    return [
        *(str(SCRIPTS / "chaos.py"), "--orders", str(files.orders), "--out", str(files.said)),
        *("--records", str(RECORDS), "--batch", str(BATCH), *divided),
    ]


def undisturbed_weights(folder: Path, epochs: int) -> str:
    """What the weights are after so many epochs where nothing happens: the script alone, in exact mode."""
    files = Files(folder / "undisturbed")
    for made in (files.folder, files.said, files.orders):
        made.mkdir()
    files.order("last-epoch", str(epochs))
    environment = own_environment(files.folder)
    script = [sys.executable, *_script(files, exact=True), "--step-s", "0"]
    subprocess.run(script, env=environment, cwd=files.folder, check=True, timeout=600)
    (path,) = files.said.glob("*.json")
    return str(msgspec.json.decode(path.read_bytes())["weights"])


def stoker_job(observer: Host, *arguments: str) -> Finished:
    """`stoker job …`, on a host that is in no job."""
    return observer.run(sys.executable, "-m", "stoker.cli.main", "job", *arguments, timeout_s=60.0)


@dataclass(frozen=True)
class Event:
    """A line of the job's event log, and the host that it is about."""

    said: JobEvent
    host: int
    """0: none."""

    @property
    def wall_s(self) -> float:
        return self.said.wall_s

    @property
    def kind(self) -> str:
        return self.said.kind

    @property
    def why(self) -> str:
        return self.said.why

    @property
    def details(self) -> dict[str, object]:
        return self.said.details


class EventLog:
    """The event log as far as it is known, oldest first."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._after = 0
        self._host_of_node: dict[object, int] = {}
        self._joined: dict[object, float] = {}
        self._node_of_worker: dict[object, object] = {}
        self._world: Event | None = None
        self.outcome = ""
        """Why the job has ended; empty: it has not."""

    def take(self, said: Iterable[JobEvent]) -> None:
        """Newer events."""
        for event in said:
            self._after = event.seq
            self.events.append(Event(event, self._host(event)))
            if event.kind in ("generation", "world", "ended"):
                self._world = self.events[-1]
            if event.kind == "ended":
                self.outcome = event.why.split("\n")[0]

    def refresh(self, setting: Setting) -> None:
        """Take what has come since; nothing while it cannot be read."""
        try:
            self.take(setting.read(self._after))
        except StokerError:
            return

    @property
    def members(self) -> dict[int, float]:
        """Hosts whose workers are in the world that runs now, and when their agents joined, seconds since 1970.

        Empty while a world is being formed.
        """
        if self._world is None or self._world.kind != "world":
            return {}
        workers = self._world.details["workers"]
        assert isinstance(workers, list)
        nodes = {self._node_of_worker[worker] for worker in workers}
        return {self._host_of_node.get(node, 0): self._joined.get(node, 0.0) for node in nodes}

    def _host(self, event: JobEvent) -> int:
        node, worker = event.details.get("node"), event.details.get("worker")
        if event.kind == "node-joined":
            self._host_of_node[node] = host_number(event.why.split()[0])
            self._joined[node] = event.wall_s
        if event.kind == "worker-started":
            self._node_of_worker[worker] = node
        if node not in self._host_of_node:
            node = self._node_of_worker.get(worker)
        return self._host_of_node.get(node, 0)


def host_number(name: str) -> int:
    """`h3` → 3; 0 for what is no host of the test."""
    return int(name[1:]) if name[:1] == "h" and name[1:].isdigit() else 0


def address_number(endpoint: str) -> int:
    """`10.77.1.3:29400` → 3."""
    return int(endpoint.rpartition(":")[0].rpartition(".")[2])


WORKER_ENDED = ("worker-replace", "worker-shrink", "node-lost")
GONE_AND_BACK = (("node-lost",), ("node-joined",))
BACK = (("node-lost", "node-cut"), ("node-joined", "node-back"))
"""A short break costs nothing: the agent comes back as what it was."""
REGROUPED = (("generation",), ("world",))

TOLD: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "kill-worker": (WORKER_ENDED, *REGROUPED),
    "kill-agent": (*GONE_AND_BACK, *REGROUPED),
    "kill-run": (*GONE_AND_BACK, *REGROUPED),
    "kill-host": (*GONE_AND_BACK, *REGROUPED),
    "kill-master": (("master-restored",),),
    "stop-worker": (WORKER_ENDED, *REGROUPED),
    "stop-agent": (*GONE_AND_BACK, *REGROUPED),
    "hang": (WORKER_ENDED, *REGROUPED),
    "partition": GONE_AND_BACK,
    "split": REGROUPED,
    "cut": GONE_AND_BACK,
    "cut-master": GONE_AND_BACK,
    "reset": BACK,
    "leave": (("node-leaving",), *REGROUPED, ("node-joined",)),
    "scale": (("scale",),),
}
"""What the event log must say of each fault after it began: one event of each group; where it is about a host, about
each that was hit. Of the others (`blink-…`, `stop-master`, `slow`, full disks) it may say nothing."""

SILENT = frozenset({"cut", "cut-master", "partition", "stop-agent"})
"""Faults of which a master hears by silence alone."""
SHORT_S = 5.0
"""Breaks of a link that are shorter may pass unnoticed."""
