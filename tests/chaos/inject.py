"""Carries faults out: what each kind does when it begins and when it ends."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import psutil

from stoker.errors import StokerError
from tests.chaos.agents import Agents, Story
from tests.chaos.job import TIMEOUT_S, Files, Setting, address_number, stoker_job
from tests.chaos.plan import Fault
from tests.chaos.quorum import Quorum
from tests.e2e import hosts_census as census
from tests.e2e.hosts import Host, Hosts, fill_disk, free_disk, freeze, kill, thaw


@dataclass
class Injected:
    """A fault as it was carried out."""

    fault: Fault
    wall_s: float
    """When it began, seconds since 1970."""
    ended_wall_s: float = 0.0
    """When it was taken back; 0: it is not, or cannot be."""
    lost: frozenset[int] = frozenset()
    """Hosts that the job must do without for as long as it lasts."""
    cut_off: frozenset[int] = frozenset()
    """Hosts whose agents lose their stream to the master for a moment."""
    takes_master: bool = False
    """The master dies, or cannot go on where it is."""

    @property
    def until_s(self) -> float:
        """When it was over."""
        return max(self.ended_wall_s, self.wall_s + self.fault.duration_s)


@dataclass
class Injector:
    """Begins and ends faults on these hosts."""

    hosts: Hosts
    observer: Host
    agents: Agents
    setting: Setting
    files: Files
    story: Story
    quorum: Quorum | None = None
    done: list[Injected] = field(default_factory=list)
    _network: list[Fault] = field(default_factory=list)
    _stopped: dict[Fault, list[psutil.Process]] = field(default_factory=dict)

    def begin(self, fault: Fault) -> bool:
        """Let it happen. False: there is nothing that it could hit yet, ask again."""
        try:
            injected = Injected(
                fault,
                time.time(),
                lost=self._lost(fault),
                cut_off=self._cut_off(fault),
                takes_master=self._takes_master(fault),
            )
            if not self._begin(fault):
                return False
        except StokerError as error:
            self.story.add("chaos", f"not yet {fault.kind}: {error}")
            return False
        self.done.append(injected)
        self.story.add("chaos", f"begins: {str(fault).strip()}", injected.wall_s)
        return True

    def end(self, fault: Fault) -> bool:
        """Take it back, where that is possible. False: not now, ask again."""
        try:
            if not self._end(fault):
                return False
        except StokerError as error:
            self.story.add("chaos", f"cannot end {fault.kind} yet: {error}")
            return False
        injected = next(i for i in reversed(self.done) if i.fault == fault)
        injected.ended_wall_s = time.time()
        if fault.duration_s:
            self.story.add("chaos", f"ends: {str(fault).strip()}")
        return True

    # -- whom it hits -------------------------------------------------------------------------------------

    def _lost(self, fault: Fault) -> frozenset[int]:
        """Who cannot be heard by those who go on."""
        match fault.kind:
            case "partition" | "cut-master":
                everybody = set(range(1, self.setting.ground.hosts + 1))
                return frozenset(everybody - self.setting.survivors(fault.hosts))
            case "cut" | "kill-agent" | "kill-run" | "kill-host" | "stop-agent" | "leave":
                return frozenset(fault.hosts)
            case _:
                return frozenset()

    def _cut_off(self, fault: Fault) -> frozenset[int]:
        """Of a host whose connections are reset the master hears no more; where it is there itself, of the others."""
        if fault.kind != "reset":
            return frozenset()
        with contextlib.suppress(StokerError):  # there is no master to lose
            if self._master_host().number in fault.hosts:
                return frozenset(range(1, self.setting.ground.hosts + 1)) - set(fault.hosts)
        return frozenset(fault.hosts)

    def _takes_master(self, fault: Fault) -> bool:
        """Whether another master must take up the journal."""
        if fault.kind == "kill-master":
            return True
        if self.setting.ground.bound_to or fault.kind not in ("partition", "cut", "kill-host"):
            return False
        return self._master_host().number in self._lost(fault) and fault.duration_s > TIMEOUT_S / 2

    def _master_host(self) -> Host:
        """Raises StokerError while there is none."""
        return self._host(self.setting.ground.bound_to or address_number(self.setting.endpoint()))

    def _masters(self) -> list[psutil.Process]:
        return [p for p in self._master_host().processes() if census.is_command(p, "master")]

    def _host(self, number: int) -> Host:
        return self.hosts[number - 1]

    # -- beginnings ---------------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> bool:
        hit = [self._host(number) for number in fault.hosts]
        match fault.kind:
            case "kill-worker":
                return bool(kill(*hit[0].workers()))
            case "kill-agent" | "kill-run":
                return self.agents.kill(hit[0].number, fault.duration_s)
            case "kill-host":
                return self._kill_host(hit[0], fault)
            case "kill-master":
                return bool(kill(*self._masters()))
            case "leave":
                return self.agents.leave(hit[0].number)
            case "stop-worker" | "blink-worker":
                return self._stop(fault, hit[0].workers())
            case "stop-agent" | "blink-agent":
                self.agents.excuse(hit[0].number, fault.duration_s + 3 * TIMEOUT_S)
                return self._stop(fault, hit[0].agents())
            case "stop-master":
                return self._stop(fault, self._masters())
            case "hang":
                self.files.order(f"hang.{hit[0].name}")
            case "scale":
                return self._scale(self.setting.ground.hosts - fault.fewer)
            case "full-disk":
                fill_disk(self.files.checkpoints)
            case "full-journal":
                fill_disk(self.files.journal)
            case "reset":
                self.hosts.reset(hit[0])
            case _:
                self._break(fault)
        return True

    def _kill_host(self, host: Host, fault: Fault) -> bool:
        if not self.agents.kill(host.number, fault.duration_s):
            return False
        host.kill()
        return True

    def _stop(self, fault: Fault, processes: list[psutil.Process]) -> bool:
        self._stopped[fault] = processes
        return bool(freeze(*processes))

    def _scale(self, nodes: int) -> bool:
        done = stoker_job(self.observer, "scale", self.setting.endpoint(), str(nodes))
        if done.code != 0:
            self.story.add("chaos", f"`stoker job scale {nodes}` ended with {done.code}: {done.err.strip()}")
        return done.code == 0

    def _break(self, fault: Fault) -> None:
        if fault.kind != "slow":  # whoever is cut off from the master, and from the next one, ends by itself
            for number in {*fault.hosts, *self._lost(fault)}:
                self.agents.excuse(number, fault.duration_s + 3 * TIMEOUT_S)
        self._network.append(fault)
        self._apply(fault)

    def _apply(self, fault: Fault) -> None:
        hit = [self._host(number) for number in fault.hosts]
        match fault.kind:
            case "partition":
                self.hosts.partition(hit, [host for host in self.hosts if host not in hit])
            case "split":
                self.hosts.partition(hit[:1], hit[1:])
            case "cut":
                self.hosts.cut(*hit)
            case "cut-master":
                self.hosts.cut(self._host(self.setting.ground.bound_to))
            case "slow":
                self.hosts.slow(hit[0], "500kbit")

    # -- ends ---------------------------------------------------------------------------------------------

    def _end(self, fault: Fault) -> bool:
        match fault.kind:
            case "stop-worker" | "blink-worker" | "stop-agent" | "blink-agent" | "stop-master":
                thaw(*census.alive(self._stopped.pop(fault, [])))
            case "leave":
                self.agents.come_back(fault.hosts[0])
            case "kill-host" if self.quorum is not None:
                self.quorum.start_on(*fault.hosts)
            case "scale":
                return self._scale(self.setting.ground.hosts)
            case "full-disk":
                free_disk(self.files.checkpoints)
            case "full-journal":
                free_disk(self.files.journal)
            case "partition" | "split" | "cut" | "cut-master" | "slow":
                self._network.remove(fault)
                self.hosts.heal()
                for other in self._network:
                    self._apply(other)
        return True
