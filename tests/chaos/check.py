"""What must be true of a run under chaos, whatever happened to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stoker.data.audit import Committed, Entry, Read, Report, audit
from stoker.data.ledger import read_ledgers
from tests.chaos.inject import Injected
from tests.chaos.job import BACK, GONE_AND_BACK, RECORDS, SHORT_S, SILENT, TIMEOUT_S, TOLD, Event


@dataclass(frozen=True)
class Patience:
    """How long things may take on this machine: measured by how long the job took to start."""

    start_s: float

    @property
    def settled_s(self) -> float:
        """Until every host is back in the world; one that the others seemed not to reach stands aside for a minute."""
        return 150.0 + 3 * self.start_s

    @property
    def told_s(self) -> float:
        """From a fault's end to its last consequence: an agent starts, reaches the master, starts a worker."""
        return 45.0 + 3 * self.start_s

    @property
    def still_s(self) -> float:
        """Between two commits of the run."""
        return 6 * TIMEOUT_S + 3 * self.start_s


def ledger_folders(folder: Path) -> list[Path]:
    """Where the workers of every host wrote down what they did."""
    return sorted(folder.glob("h*/stoker-logs/*/audit"))


def read_all(folder: Path) -> list[Entry]:
    """The ledgers of every worker on every host, brought together."""
    return [e for audits in ledger_folders(folder) for e in read_ledgers(audits)]


def newest_epoch(entries: Iterable[Entry]) -> int:
    return max((e.epoch for e in entries if isinstance(e, Read)), default=0)


def untold(injected: Injected, log: Sequence[Event], told_s: float, anew: Sequence[float] = ()) -> list[str]:
    """What the event log should say of this fault and does not.

    `anew`: when a master came, or went on after it had been stopped. It gives every node the beat timeout from then on.
    Just before it came there was none that could tell of broken streams.
    """
    fault = injected.fault
    latest = max((at for at in anew if injected.wall_s <= at <= injected.until_s), default=None)
    is_forgiven = latest is not None and injected.until_s - latest < SHORT_S
    has_no_master = any(0 <= at - injected.wall_s < SHORT_S for at in anew)
    groups = TOLD.get(fault.kind, ())
    if (
        (fault.kind.startswith("cut") and fault.duration_s < SHORT_S)
        or (fault.kind in SILENT and is_forgiven)
        or (groups == BACK and has_no_master)
    ):
        groups = ()
    elif groups == BACK:
        fault = fault._replace(hosts=tuple(sorted(injected.cut_off)))
    elif groups == GONE_AND_BACK:
        fault = fault._replace(hosts=tuple(sorted(injected.lost)))
    elif fault.kind == "split" and not _are_neighbours(log, fault.hosts, injected.wall_s):
        groups = ()
    if injected.takes_master and ("master-restored",) not in groups:
        groups = (*groups, ("master-restored",))
    since, until = injected.wall_s - 0.1, injected.until_s + told_s
    window = [e for e in log if since <= e.wall_s <= until]
    # Where nobody else holds the state, the master waits for those who are silent, and some come back in time.
    silent = {e.host for e in window if e.kind == "node-silent"} - {
        e.host for e in window if e.kind == "node-lost"
    }
    if groups == GONE_AND_BACK:
        fault = fault._replace(hosts=tuple(host for host in fault.hosts if host not in silent))
    missing = []
    for group in groups:
        told = {e.host for e in window if e.kind in group}
        if group[0].startswith(("node-", "worker-")):
            missing += [f"{' or '.join(group)} of h{host}" for host in fault.hosts if host not in told]
        elif not told:
            missing.append(" or ".join(group))
    return missing


def _are_neighbours(log: Sequence[Event], hosts: Sequence[int], wall_s: float) -> bool:
    """Whether two hosts' workers sent each other anything in the world that ran then: gradients go around in a ring, by
    rank, so that opposite ones of four do not miss each other."""
    host_of = {e.details.get("worker"): e.host for e in log if e.kind == "worker-started"}
    worlds = [e.details["workers"] for e in log if e.kind == "world" and e.wall_s <= wall_s]
    if not worlds or not isinstance(worlds[-1], list):
        return True
    ring = [host_of.get(worker, 0) for worker in worlds[-1]]
    pairs = {frozenset(pair) for pair in zip(ring, ring[1:] + ring[:1], strict=True)}
    return frozenset(hosts) in pairs


def check_events(done: Sequence[Injected], log: Sequence[Event], patience: Patience) -> list[str]:
    """Every fault must be told."""
    wrong = []
    anew = [e.wall_s for e in log if e.kind == "master-restored"]
    anew += [other.until_s for other in done if other.fault.kind == "stop-master"]
    for injected in done:
        missing = untold(injected, log, patience.told_s, anew)
        if missing:
            wrong.append(
                f"the event log does not tell {str(injected.fault).strip()}: no {', no '.join(missing)}"
            )
    return wrong


def check_records(entries: Sequence[Entry], epochs: int) -> tuple[list[str], Report]:
    """Every record of every epoch exactly once, over the workers of all hosts."""
    datasets = {e.dataset for e in entries if isinstance(e, Read)}
    report = audit(entries, dict.fromkeys(datasets, RECORDS), epochs)
    wrong = []
    if report.missed or report.repeated or report.unseen_steps or not datasets:
        bad = {epoch: counts for epoch, counts in report.by_epoch.items() if counts != (0, 0)}
        wrong.append(
            f"records missed {report.missed}, repeated {report.repeated}, steps seen in part {report.unseen_steps}; "
            f"epoch: (missed, repeated) {bad}"
        )
    return wrong, report


def check_ends(folder: Path, epochs: int, hosts: int) -> list[str]:
    """What the last world's workers said."""
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    wrong = []
    if sorted(s["rank"] for s in said) != list(range(hosts)):
        wrong.append(
            f"the last world had ranks {sorted(s['rank'] for s in said)}, not one on each of {hosts} hosts"
        )
    if any(s["epochs"] != epochs for s in said):
        wrong.append(f"epochs at the end: {[s['epochs'] for s in said]}, not {epochs}")
    if len({str(s["weights"]) for s in said}) > 1:
        wrong.append(f"the workers' weights differ: {[s['weights'] for s in said]}")
    return wrong


def check_weights(said_in: Path, wanted: str) -> list[str]:
    """They may not tell that anything happened."""
    found = {str(json.loads(path.read_text())["weights"]) for path in said_in.glob("*.json")}
    return [] if found == {wanted} else [f"weights at the end: {sorted(found)}, undisturbed {wanted}"]


def check_pace(entries: Sequence[Entry], patience: Patience) -> list[str]:
    """The run may not stand still for long."""
    times = commit_times(entries)
    still = [(b - a, a) for a, b in pairwise(times) if b - a > patience.still_s]
    return [f"the run stood still for {gap:.1f} s from {since:.1f} on" for gap, since in still]


def commit_times(entries: Iterable[Entry]) -> list[float]:
    return sorted(e.wall_s for e in entries if isinstance(e, Committed))


def pause_s(injected: Injected, times: Sequence[float]) -> float:
    """The longest time without a commit that touches the fault."""
    since, until = injected.wall_s, injected.until_s + 2.0
    return max((b - a for a, b in pairwise(times) if b > since and a < until), default=0.0)
