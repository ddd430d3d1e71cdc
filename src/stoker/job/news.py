"""What a job's services hear of its workers. PURE."""

from __future__ import annotations

from stoker.job.machine import JobMachine
from stoker.job.relaunch import classify, describe
from stoker.job.services import Desk
from stoker.wire.job import NodeReport


class News:
    """Tells the services of worlds, leavings, returns and ends, each once."""

    def __init__(self, machine: JobMachine, desk: Desk) -> None:
        self._machine = machine
        self._desk = desk
        self._told: tuple[int, int] | None = None

    def on_report(self, report: NodeReport, now: float) -> bool:
        """Whether there was something to tell. To be called before the machine takes the report in: what a service
        knows of the work that a worker was at says more about its end than how it ended."""
        is_told = False
        roster, world = self._machine.roster, self._machine.world
        generation = world.generation if world is not None else 0
        for said in report.workers:
            worker = roster.workers.get(said.worker)
            if worker is None or worker.ended or worker.node != report.node:
                continue
            if worker.state.left < generation <= said.state.left:
                self._desk.on_left(said.worker)
                is_told = True
            has_returned = said.state.phase == "finished" and worker.state.phase != "finished"
            if has_returned and self._machine.phase == "running":
                self._desk.on_finished(said.worker)
                is_told = True
            if said.exit is not None:
                reason = classify(said.exit)
                last_words = f"\n{said.exit.message}" if reason == "user-error" and said.exit.message else ""
                self._desk.on_exit(said.worker, reason, f"{describe(reason, said.exit)}{last_words}", now)
                is_told = True
        return is_told

    def on_decision(self, now: float) -> None:
        """The machine has decided: the newest world may be another one, and other workers may live."""
        machine = self._machine
        world = machine.world if machine.phase != "forming" else None
        told = (world.generation if world is not None else 0, machine.roster.changes)
        if told != self._told:
            self._told = told
            self._desk.on_world(machine.world, (w.worker for w in machine.roster.live()), now)
