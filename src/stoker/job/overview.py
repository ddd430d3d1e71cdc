"""What a master shows of its job and takes from those who steer it: the control API's port on a running master."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from stoker.base.version import VERSION
from stoker.errors import ConfigError, JobError
from stoker.job.events import NodeAsked, ScaleRequested
from stoker.job.machine import JobMachine
from stoker.job.roster import Node, Worker
from stoker.job.shard_service import ShardService
from stoker.wire import control
from stoker.wire.control import (
    Accepted,
    JobEvent,
    JobOutcome,
    JobStatus,
    MasterStatus,
    NodeState,
    NodeStatus,
    ScaleAdvice,
    ShardLease,
    ShardStatus,
    SpeedAt,
    StackFrame,
    StackThread,
    WorkerStacks,
    WorkerStatus,
)
from stoker.wire.health import NodeUse, StackReply, StackRequest, Stacks, ThreadStack

if TYPE_CHECKING:
    from stoker.job.master import Master


class Overview:
    """Implements `JobControl` for a `Master`."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._looks = 0

    @property
    def _machine(self) -> JobMachine:
        return self._master.machine

    def status(self) -> JobStatus:
        """See the port."""
        master, machine = self._master, self._machine
        state, config = machine.state, machine.config
        now = master.clock.now()
        scores = machine.care.stragglers.scores()
        return JobStatus(
            job=config.job,
            phase="running" if _is_asynchronous(machine) or _is_plain(machine, now) else state.phase,
            why=_why(machine, now),
            generation=machine.generation,
            world_size=_world_size(machine, now),
            nodes_min=config.min_nodes,
            nodes_max=config.max_nodes,
            nodes_target=state.target_nodes,
            node_unit=config.node_unit,
            commits=state.roster.highest_commit,
            steps_per_s=state.roster.pace if state.phase == "running" else 0.0,
            restarts=state.restarts,
            restarts_used=machine.restarts_used,
            restarts_max=config.relaunch.restarts(elastic=state.roster.elastic),
            since_commit_s=now - state.roster.committed_at if state.roster.committed_at else None,
            started_wall_s=master.keeper.masters.began_wall_s,
            nodes=tuple(
                _node_status(machine, node, now, scores, master.uses.get(node.node))
                for node in sorted(state.roster.nodes.values(), key=lambda n: n.age)
            ),
            outcome=self.outcome(),
            master=MasterStatus(
                pid=os.getpid(),
                started_wall_s=master.started_wall_s,
                incarnation=master.keeper.masters.count - 1,
                version=VERSION,
                journal=master.keeper.problem or str(master.keeper.journal),
            ),
        )

    def outcome(self) -> JobOutcome | None:
        """See the port."""
        outcome = self._machine.outcome
        if outcome is None:
            return None
        return JobOutcome(
            outcome.success, outcome.exit_code, outcome.why, outcome.error, outcome.failed_worker
        )

    def node_names(self) -> Collection[str]:
        """See the port."""
        return self._machine.roster.nodes.keys()

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        """See the port."""
        rows = await self._master.keeper.journal.read_entries(after, limit)
        names = ("seq", "wall_s", "kind", "why")
        return [
            JobEvent(
                seq=row["seq"],
                wall_s=row["wall_s"],
                kind=row["kind"],
                why=row["why"],
                details={key: value for key, value in row.items() if key not in names},
            )
            for row in rows
        ]

    async def wait_for_events(self, after: int, timeout_s: float) -> None:
        """See the port."""
        keeper = self._master.keeper
        written = keeper.next_entries
        if not await keeper.journal.read_entries(after, 1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await written.wait()

    def scale(self, nodes: int) -> Accepted:
        """See the port."""
        self._check_alive()
        state, config = self._machine.state, self._machine.config
        if not config.min_nodes <= nodes <= config.max_nodes:
            raise ConfigError(
                f"{nodes} nodes are outside of --nnodes {config.min_nodes}:{config.max_nodes}: stay within, or start "
                "the job with another range"
            )
        if nodes % config.node_unit:
            raise ConfigError(f"{nodes} nodes are no multiple of --node-unit {config.node_unit}")
        before, here = state.target_nodes, len(state.roster.willing())
        if nodes == before:
            return Accepted(f"the job has {nodes} nodes as its target already")
        self._master.feed(ScaleRequested(nodes, "asked for through the control API"))
        if nodes > here:
            return Accepted(f"from {before} to {nodes} nodes; {here} are here, more may join")
        how = "its workers start again" if state.runs_plain else "at an agreed commit"
        return Accepted(f"from {before} to {nodes} nodes, {how}")

    def stop(self, why: str, exit_code: int) -> Accepted:
        """See the port."""
        self._check_alive()
        self._master.stop(why, exit_code)
        return Accepted("the job ends now")

    def leave_node(self, node: str, why: str) -> Accepted:
        """See the port."""
        self._check_alive()
        known = self._machine.roster.nodes.get(node)
        if known is None:
            raise ConfigError(f"the job has no node {node!r}: `stoker job status` lists them")
        if known.leaving or known.asked_to_leave:
            return Accepted(f"{node} is leaving already: {known.going}")
        state = self._machine.state
        others = [n for n in state.roster.willing() if n is not known]
        if not others and not self._machine.config.outlives_nodes:
            raise ConfigError(
                f"{node} is the only node of the job, and the state would go with it: start another node first, or end "
                "the job (`stoker job stop`)"
            )
        self._master.feed(NodeAsked(node, why))
        how = "and the others' workers start again" if state.runs_plain else "at an agreed commit"
        least = self._machine.config.min_nodes
        if len(others) < least:
            timeout_s = self._machine.config.timeout_s
            how += (
                f"; {len(others)} of at least {least} nodes are left then: the job waits for another, and ends after "
                f"{timeout_s:g} s without one (--timeout)"
            )
        return Accepted(f"{node} leaves {how}")

    async def stacks(self, timeout_s: float) -> list[WorkerStacks]:
        """See the port."""
        master, machine = self._master, self._machine
        self._looks += 1
        look, replies = -self._looks, dict[str, Stacks]()
        wanted = {w.worker: w for w in machine.roster.live() if w.pid}
        done = asyncio.Event()

        def on_reply(reply: StackReply) -> None:
            if reply.look == look and reply.samples:
                replies[reply.worker] = reply.samples[-1]
                if wanted.keys() <= replies.keys():
                    done.set()

        master.stack_listeners.append(on_reply)
        try:
            for node in machine.roster.nodes.values():
                here = tuple(w.worker for w in machine.roster.on_node(node.node) if w.worker in wanted)
                if here:
                    master.tell(node.node, StackRequest(look, here, samples=1, interval_s=0.0))
            if wanted:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await done.wait()
        finally:
            master.stack_listeners.remove(on_reply)
        dumps = [_worker_stacks(machine, w, replies.get(w.worker)) for w in wanted.values()]
        return sorted(dumps, key=lambda d: (d.rank is None, d.rank, d.worker))

    def recommendation(self) -> ScaleAdvice | None:
        """See the port."""
        machine = self._machine
        advice = machine.growth.advice
        if advice is None:
            return None
        return ScaleAdvice(
            nodes=advice.nodes,
            nodes_now=machine.state.generations.node_count,
            why=advice.why,
            speedup=advice.predicted_speedup,
            confidence=advice.confidence,
            applies=machine.config.auto_scale == "apply",
            measured=tuple(SpeedAt(m.nodes, 1.0 / m.step_s) for m in machine.growth.measured),
        )

    def shards(self) -> list[ShardStatus]:
        """See the port."""
        service = self._master.desk.services.get("shards")
        if not isinstance(service, ShardService):
            return []
        now = self._master.clock.now()
        return [
            ShardStatus(
                dataset=far.dataset,
                total=far.total,
                done=far.done,
                doing=far.doing,
                todo=far.todo,
                waiting=far.waiting,
                failures=far.failures,
                epoch=far.epoch,
                is_finished=far.is_finished,
                leases=tuple(
                    ShardLease(lease.number, lease.worker, lease.left_s, lease.failures)
                    for lease in service.leases(far.dataset, now)
                ),
            )
            for far in service.status()
        ]

    def _check_alive(self) -> None:
        outcome = self._machine.outcome
        if outcome is not None:
            raise JobError(f"the job has ended: {outcome.why}")


def _worker_stacks(machine: JobMachine, worker: Worker, stacks: Stacks | None) -> WorkerStacks:
    member = machine.state.generations.members.get(worker.worker)
    problem = "its node has not answered in time" if stacks is None else stacks.unavailable
    return WorkerStacks(
        worker=worker.worker,
        node=worker.node,
        rank=member.rank if member is not None else None,
        pid=worker.pid,
        threads=() if stacks is None else tuple(_thread(thread) for thread in stacks.threads),
        state=stacks.state if stacks is not None else "",
        problem=problem,
    )


def _thread(thread: ThreadStack) -> StackThread:
    frames = tuple(StackFrame(f.function, f.file, f.line) for f in thread.frames)
    return StackThread(thread.name, frames, thread.is_main, thread.holds_gil)


def _why(machine: JobMachine, now: float) -> str:
    """The phase in a sentence."""
    state = machine.state
    if state.outcome is not None:
        return state.outcome.why
    if state.note:
        return state.note
    if _is_asynchronous(machine):
        return f"{len(state.roster.live())} workers work, each at its own speed"
    if _is_plain(machine, now):
        return f"{len(state.roster.live())} workers run a script that forms its own world"
    if state.phase == "forming":
        waiting = len(state.generations.pending)
        return f"{state.generations.why}; {waiting} workers are awaited"
    if state.phase == "running" and machine.world is not None:
        return f"{machine.world.size} workers train since: {state.generations.why}"
    return "waiting for more nodes"


def _world_size(machine: JobMachine, now: float) -> int:
    if _is_plain(machine, now):
        return len(machine.roster.live())
    return machine.world.size if machine.world is not None else 0


def _is_plain(machine: JobMachine, now: float) -> bool:
    """Whether the workers run scripts that do not use Stoker."""
    state = machine.state
    return state.runs_plain and not state.is_kind_open(now) and bool(state.roster.live())


def _is_asynchronous(machine: JobMachine) -> bool:
    """Whether workers do their work without a world."""
    state = machine.state
    return (
        state.phase == "forming"
        and state.generations.world is None
        and any(_works_alone(worker) for worker in state.roster.live())
    )


def _works_alone(worker: Worker) -> bool:
    """Whether it does its work without having asked for a world."""
    return worker.state.phase == "starting" and worker.state.progress > 0


def _node_status(
    machine: JobMachine, node: Node, now: float, scores: Mapping[str, float], use: NodeUse | None
) -> NodeStatus:
    memory = {w.worker: w.resident_bytes for w in use.workers} if use is not None else {}
    workers: Sequence[Worker] = sorted(
        machine.roster.on_node(node.node), key=lambda w: (w.spec.slot, w.worker)
    )
    state, why = _node_state(node)
    return NodeStatus(
        node=node.node,
        host=node.join.host,
        address=node.join.address,
        slots=node.join.slots,
        age=node.age,
        state=state,
        why=why,
        silent_s=max(0.0, now - node.last_seen),
        workers=tuple(_worker_status(machine, w, now, scores, memory) for w in workers if not w.ended),
        use=_use(use) if use is not None else None,
    )


def _use(use: NodeUse) -> control.NodeUse:
    gpus = (
        control.GpuUse(g.index, g.name, g.busy_share, g.memory_used_bytes, g.memory_total_bytes)
        for g in use.gpus
    )
    return control.NodeUse(
        cores=use.cores,
        cpu_share=use.cpu_share,
        load=use.load,
        memory_total_bytes=use.memory_total_bytes,
        memory_available_bytes=use.memory_available_bytes,
        disk_free_bytes=use.disk_free_bytes,
        gpus=tuple(gpus),
    )


def _node_state(node: Node) -> tuple[NodeState, str]:
    if node.cordoned:
        return "cordoned", node.cordoned
    if node.leaving or node.asked_to_leave:
        return "leaving", node.leaving or node.asked_to_leave
    if node.cut_since is not None:
        return "away", "its stream is broken"
    if node.check != "passed":
        return "checking", "it is checked before it joins"
    if node.standby:
        return "standby", node.standby
    return "active", ""


def _worker_status(
    machine: JobMachine, worker: Worker, now: float, scores: Mapping[str, float], memory: Mapping[str, int]
) -> WorkerStatus:
    member = machine.state.generations.members.get(worker.worker)
    is_plain = _is_plain(machine, now) and not worker.ended
    return WorkerStatus(
        worker=worker.worker,
        rank=member.rank if member is not None else worker.spec.rank if is_plain else None,
        slot=worker.spec.slot,
        pid=worker.pid,
        phase="stopped"
        if worker.stopped_s
        else "working"
        if is_plain or _works_alone(worker)
        else worker.state.phase,
        commits=worker.state.commits,
        straggler_score=scores.get(worker.worker),
        memory_bytes=memory.get(worker.worker),
        metrics={
            name: value if math.isfinite(value) else None for name, value in worker.state.metrics.items()
        },
    )
