"""Chaos: a seeded plan of faults on four test hosts against one long elastic run.

    python -m tests.chaos.run --seconds 600 --seed 1
    python -m tests.chaos.run --seconds 600 --seed 1 --etcd
    python -m tests.chaos.run --seconds 600 --seed 1 --exact

Ends with 0 if every record of every epoch was committed exactly once, every agent ended as it should, the event log
tells every fault and nothing that no fault explains, and nothing is left; with --exact, if the weights are to the bit
those of a run that nothing happened to. Otherwise it prints the seed, the plan and
what everybody said, and keeps the folder, which `python -m tests.chaos.retell FOLDER` tells again.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.chaos import check, job
from tests.chaos.agents import Agents, Story
from tests.chaos.check import Patience
from tests.chaos.inject import Injector
from tests.chaos.job import EventLog, Files, Setting, WithEtcd, WithFile
from tests.chaos.plan import NOWHERE, WITH_ETCD, WITH_FILE, Fault, Ground, Kind, make_plan
from tests.chaos.quorum import Quorum
from tests.chaos.retell import chronicle
from tests.chaos.retell_check import Told, check_folder
from tests.e2e.hosts import Hosts
from tests.e2e.hosts_network import mount_disk, why_not

GROUND = Ground(hosts=4)
GROUND_ETCD = Ground(hosts=4, bound_to=0, quorum=(1, 2, 3))
EPOCHS_AHEAD = 3
TAIL = 300


class Chaos:
    """One run."""

    def __init__(self, folder: Path, plan: tuple[Fault, ...], *, with_etcd: bool, exact: bool) -> None:
        self.folder = folder
        self.plan = plan
        self.with_etcd = with_etcd
        self.exact = exact
        self.files = Files(folder)
        self.story = Story()
        self.log = EventLog()
        self.patience = Patience(start_s=30.0)
        self.quorum: Quorum | None = None
        self.epochs = 0
        self.wrong: list[str] = []
        self.summary: list[str] = []

    def run(self) -> None:
        """`wrong` says what came of it; empty: nothing is wrong."""
        for folder in (self.files.said, self.files.orders):
            folder.mkdir()
        with Hosts(self.folder, GROUND.hosts + 1) as self.hosts:
            mount_disk(self.files.checkpoints, "2m", self.hosts.network.name)
            mount_disk(self.files.journal, "64m", self.hosts.network.name)
            *workplaces, self.observer = self.hosts
            self.setting = self._setting()
            self.agents = Agents(
                workplaces, job.command(self.setting, self.files, exact=self.exact), self.story
            )
            self.injector = Injector(
                self.hosts, self.observer, self.agents, self.setting, self.files, self.story, self.quorum
            )
            try:
                began = time.monotonic()
                if self._until_whole("to begin with"):
                    self.patience = Patience(time.monotonic() - began)
                    self._inject()
                    self._finish()
                if self.log.outcome and not self.epochs:
                    self.wrong.append(f"the job ended: {self.log.outcome}")
            finally:
                self._keep_events()
            self._check()

    def _setting(self) -> Setting:
        if not self.with_etcd:
            return WithFile(self.hosts, self.files)
        self.quorum = Quorum([self.hosts[number - 1] for number in GROUND_ETCD.quorum])
        self.quorum.start()
        self.quorum.wait_healthy(self.observer)
        return WithEtcd(self.observer, GROUND_ETCD, self.quorum.url)

    # -- the run ------------------------------------------------------------------------------------------

    def _members(self) -> set[int]:
        """Hosts in the world that runs with the agents that run there now: a master hears late of a dead one."""
        self.log.refresh(self.setting)
        return {
            host for host, joined_s in self.log.members.items() if joined_s >= self.agents.runs_since(host)
        }

    def _until_whole(self, why: str) -> bool:
        """Wait until every host is in the world that runs."""
        deadline = time.monotonic() + self.patience.settled_s
        everybody = set(range(1, GROUND.hosts + 1))
        while self._members() != everybody:
            if self.log.outcome:
                return False
            if time.monotonic() > deadline:
                self.wrong.append(f"not every host was in the world {self.patience.settled_s:.0f} s {why}")
                return False
            self._pass_time(0.2)
        return True

    def _pass_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.agents.tick()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(0.05, left_s))

    def _inject(self) -> None:
        """Every fault at its time; one whose host is not back in the world yet waits for it."""
        began = time.monotonic()
        order = itertools.count()
        agenda = [(fault.at_s, next(order), fault, True) for fault in self.plan]
        heapq.heapify(agenda)
        while agenda and not self.log.outcome:
            at_s, _, fault, is_begin = heapq.heappop(agenda)
            self._pass_time(max(0.0, began + at_s - time.monotonic()))
            now_s = time.monotonic() - began
            ready = self._is_ready(fault) if is_begin else True
            if ready and (self.injector.begin(fault) if is_begin else self.injector.end(fault)):
                if is_begin:
                    heapq.heappush(agenda, (now_s + fault.duration_s, next(order), fault, False))
            elif now_s > fault.end_s + self.patience.settled_s and is_begin:
                self.wrong.append(f"{str(fault).strip()}: its hosts were not in the world for so long")
            else:
                heapq.heappush(agenda, (now_s + 0.2, next(order), fault, is_begin))

    def _is_ready(self, fault: Fault) -> bool:
        """Whether the hosts that it hits are in the world, and enough others."""
        members = self._members()
        return fault.kind in NOWHERE or (set(fault.hosts) <= members and len(members) > len(fault.hosts))

    def _finish(self) -> None:
        """All faults are over: everybody comes back, and then the job comes to its end."""
        if not self._until_whole("after the last fault"):
            return
        self._check_command()
        self.epochs = check.newest_epoch(check.read_all(self.folder)) + EPOCHS_AHEAD
        self.files.order("last-epoch", str(self.epochs))
        self.agents.over = True
        deadline = time.monotonic() + self.patience.settled_s
        while not self.agents.all_ended and time.monotonic() < deadline:
            self._pass_time(0.2)
        if not self.agents.all_ended:
            self.wrong.append(f"the job did not end within {self.patience.settled_s:.0f} s")
            return
        self.log.refresh(self.setting)
        if self.quorum is not None:
            self.quorum.stop()
        try:
            self.hosts.assert_nothing_left(30.0)
        except AssertionError as error:
            self.wrong.append(str(error))

    # -- what came of it ----------------------------------------------------------------------------------

    def _check_command(self) -> None:
        """`stoker job events` shows what the journal holds."""
        shown = job.stoker_job(self.observer, "events", self.setting.endpoint(), "--json")
        lines = shown.out.splitlines()
        self.log.refresh(self.setting)
        known = [msgspec.json.encode(event.said).decode() for event in self.log.events]
        if shown.code != 0 or lines != known[: len(lines)] or len(lines) < len(known) - 5:
            self.wrong.append(
                f"`stoker job events` ended with {shown.code} and {len(lines)} of {len(known)} events, "
                f"not as the journal has them: {shown.err}"
            )

    def _keep_events(self) -> None:
        self.log.refresh(self.setting)
        encode = msgspec.json.encode
        events = self.log.events
        self.files.events.write_bytes(b"".join(encode(event.said) + b"\n" for event in events))
        faults = [encode(Told.of(injected)) + b"\n" for injected in self.injector.done]
        (self.folder / "faults.jsonl").write_bytes(b"".join(faults))
        for event in events:
            where = f"h{event.host} " if event.host else ""
            self.story.add("events", f"{event.kind} {where}{event.why} {event.details}", event.wall_s)

    def _check(self) -> None:
        self.wrong += self.agents.wrong
        events, done, entries = self.log.events, self.injector.done, check.read_all(self.folder)
        tale, wrong = check_folder(self.folder, self.patience.told_s)
        (self.folder / "tale.txt").write_text("\n".join(chronicle(tale)) + "\n")
        self.wrong += wrong
        self.wrong += check.check_events(done, events, self.patience)
        self.wrong += check.check_pace(entries, self.patience)
        if self.epochs:
            records, report = check.check_records(entries, self.epochs)
            self.wrong += records + check.check_ends(self.files.said, self.epochs, GROUND.hosts)
            self.summary.append(
                f"{self.epochs} epochs, {report.steps} steps, {report.steps_lost} done again, "
                f"{report.generations} generations; records missed {report.missed}, repeated {report.repeated}"
            )
            if self.exact:
                wanted = job.undisturbed_weights(self.folder, self.epochs)
                self.wrong += check.check_weights(self.files.said, wanted)
                self.summary.append(f"undisturbed weights: {wanted:.16}")
        self.summary.append(chronicle(tale)[-1])
        times = check.commit_times(entries)
        for injected in done:
            self.summary.append(f"{injected.fault}: longest pause {check.pause_s(injected, times):.1f} s")


def story_of(chaos: Chaos) -> list[str]:
    """Everything that was said or done, by time."""
    lines = chaos.story.lines()
    first = lines[0].wall_s if lines else 0.0
    return [f"{line.wall_s - first:8.2f} {line.who:7} {line.text}" for line in lines]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--seed", type=int, default=1)
    flag("--seconds", type=float, default=600.0, help="how long faults come (600)")
    flag("--kinds", default="", help="comma-separated: only these faults")
    flag("--etcd", action="store_true", help="keep the journal in etcd, on three of the hosts")
    flag(
        "--exact", action="store_true", help="in exact mode: the weights must be those of an undisturbed run"
    )
    flag("--folder", type=Path, default=None, help="kept; by default one that goes if all is well")
    arguments = parser.parse_args(argv)
    if why_not():
        print(f"no test hosts: {why_not()}", file=sys.stderr)
        return 5
    chosen: tuple[Kind, ...] = WITH_ETCD if arguments.etcd else WITH_FILE
    if arguments.kinds:
        chosen = tuple(kind for kind in chosen if kind in arguments.kinds.split(","))
    ground = GROUND_ETCD if arguments.etcd else GROUND
    plan = make_plan(arguments.seed, arguments.seconds, ground=ground, kinds=chosen)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="stoker-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"seed {arguments.seed}: {len(plan)} faults in {arguments.seconds:.0f} s, folder {folder}", flush=True
    )
    chaos = Chaos(folder, plan, with_etcd=arguments.etcd, exact=arguments.exact)
    chaos.wrong.append("this program broke off")
    try:
        chaos.run()
        chaos.wrong.remove("this program broke off")
    finally:
        story = story_of(chaos)
        (folder / "story.txt").write_text("\n".join(story) + "\n")
        if chaos.wrong:
            replay = f"--seed {arguments.seed} --seconds {arguments.seconds:g}"
            replay += f" --kinds {arguments.kinds}" if arguments.kinds else ""
            replay += " --etcd" if arguments.etcd else ""
            replay += " --exact" if arguments.exact else ""
            report = [
                *("plan:", *map(str, plan)),
                *(f"the last {TAIL} of {len(story)} lines of {folder}/story.txt:", *story[-TAIL:]),
                *("summary:", *chaos.summary, "wrong:", *chaos.wrong),
                f"replay: python -m tests.chaos.run {replay}",
            ]
            print("\n".join(report), file=sys.stderr)
    if chaos.wrong:
        return 1
    print("\n".join([*chaos.summary, f"seed {arguments.seed}: all is well"]))
    if arguments.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
