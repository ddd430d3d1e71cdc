"""The shell around `NodeCore`: one stream to the master, child processes, a Unix socket for the workers."""

from __future__ import annotations

import asyncio
import logging
import signal

import msgspec

from stoker.agent import core as decisions
from stoker.agent.checks import checker_of
from stoker.agent.core import NodeCore
from stoker.agent.duties import Duties
from stoker.agent.environment import worker_environment
from stoker.agent.exits import MESSAGE_CHARACTERS, ExitFactsReader
from stoker.agent.exits_signs import shortened
from stoker.agent.link import COALESCE_S, AgentConfig, MasterLink
from stoker.agent.output import WorkerOutput
from stoker.agent.resources import belongs_to, process_state
from stoker.agent.running import RunningWorker, WorkerFiles
from stoker.agent.saving import NodeSaver
from stoker.agent.stops import StopWatch
from stoker.agent.workers import WorkerChannel, socket_path
from stoker.agent.writers import WriterThread
from stoker.base.clock import Clock
from stoker.base.ids import new_id
from stoker.errors import EnvironmentProblem, WireError
from stoker.platform.memory import MemoryLimits
from stoker.platform.port import Platform
from stoker.wire.job import (
    Call,
    Outcome,
    WorkerCall,
    WorkerSpec,
    WorkerState,
)
from stoker.wire.remarks import Remark

log = logging.getLogger("stoker.agent")
STOPPED = ("T", "t")
"""State letters of a process that is stopped: by a signal, by a debugger."""
UNKILLABLE_S = 30.0
"""Seconds after SIGKILL in which a process ends unless the kernel itself waits for something (state D)."""


class Agent:
    """Runs a node's workers until the job ends."""

    def __init__(
        self,
        config: AgentConfig,
        platform: Platform,
        clock: Clock,
        *,
        killed: asyncio.Event | None = None,
    ) -> None:
        """`killed` is set by `kill`."""
        self.config = config
        self.platform = platform
        self.clock = clock
        self._running: dict[str, RunningWorker] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._exits = ExitFactsReader(watched=(config.log_dir,))
        self._limits = MemoryLimits()
        self._files = WriterThread("stoker-files")
        self._is_stuck = False
        self._remarks = 0
        self._stops = StopWatch(self._on_run_state, self._on_run_state)
        self.link = MasterLink(
            config, clock, NodeCore(new_id("node")), apply=self._apply, is_idle=self._idle.is_set
        )
        self.link.on_beat = self._on_beat
        self._duties = Duties(
            config.log_dir,
            clock,
            workers=lambda: {name: running.target for name, running in self._running.items()},
            send=self.link.send,
            checker=checker_of(config),
        )
        self.link.on_task = self._duties.take
        self._saver = NodeSaver(
            config.snapshot_dir, config.run_id, {**config.environment, **config.extra}, remark=self._remark
        )
        self._killed = killed if killed is not None else asyncio.Event()
        self.late_failure = ""
        """Last words of a worker that failed after the run had succeeded."""
        self._done: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._channel = WorkerChannel(
            socket_path(config.runtime_dir),
            on_hello=self._on_hello,
            on_state=self._on_state,
            on_failure=self._on_failure,
            on_call=self._on_call,
        )

    @property
    def core(self) -> NodeCore:
        return self.link.core

    async def run(self) -> Outcome | None:
        """Until the job ends (its outcome) or this node has left it (None).

        Raises MasterUnreachable when there is no master for the whole timeout, WireError and AccessDenied when
        it refuses this node.
        """
        await self._channel.start()
        self._stops.start()
        self._duties.start()
        try:
            while True:
                reader = await self.link.connect(self._done)
                if reader is None:
                    return self._done.result() if self._done.done() else None
                refused = await self.link.session(reader, self._done)
                if self._done.done():
                    return self._done.result()
                if self.core.directive.outcome is not None:
                    left = len(self._running)
                    still = f"{left} workers that still run" if left > 1 else "a worker that still runs"
                    log.info("the training has ended; waiting for %s", still)
                elif refused is None:
                    log.warning("lost the master; the workers go on, looking for it")
                elif self.core.was_taken and refused.outcome is not None:
                    log.warning(
                        "the job has ended while this node did not reach its master: %s", refused.outcome.why
                    )
                    return refused.outcome
                elif not self.core.was_taken:
                    raise WireError(f"the master refuses this node: {refused.why}")
                elif refused.is_stranger:
                    log.warning("%s; the workers go on, looking for their own master", refused.why)
                    await self.link.bear_with_a_stranger(refused.why)
                else:
                    log.warning("%s; its workers are stopped, joining again", refused.why)
                    self._apply(self.core.stop_all())
                    await self._idle.wait()
                    if self.core.leaving:
                        return None
                    self.link.core = NodeCore(new_id("node"))
        finally:
            self._apply(self.core.stop_all())
            await self._idle.wait()
            self._saver.look(writes=self.core.directive.saves)
            turn, _ = self.core.turn_to_save()
            await self._saver.finish(self._saver_limit_s(), self._killed, turn=turn)
            await self._flush()
            self._duties.close()
            self._stops.close()
            self._limits.close()
            await self._channel.close()

    @property
    def is_killed(self) -> bool:
        """Whether it is to end at once."""
        return self._killed.is_set()

    def leave(self, why: str) -> None:
        """Ask to leave the job in good order."""
        self._saver.save_soon()  # this machine may be taken away before the workers have ended
        self._apply(self.core.leave(why))
        self.link.report_soon(0.0)

    def kill(self) -> None:
        """End every worker now; `run` returns once they are gone, or given up after UNKILLABLE_S."""
        self._killed.set()
        self._apply(self.core.stop_all())
        if not self._done.done():
            self._done.set_result(None)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running workers, as they were started: each leads a session of its own."""
        return {name: running.process.pid for name, running in self._running.items()}

    def _saver_limit_s(self) -> float:
        """A node that is taken away has the grace time; else it is the user's."""
        timeouts, outcome = self.config.timeouts, self.core.directive.outcome
        is_taken = outcome is not None and outcome.exit_code == 128 + signal.SIGTERM
        return timeouts.stop_grace_s if self.core.leaving or is_taken else timeouts.user_s

    def _remark(self, remark: Remark) -> None:
        """A line for the event log, of this node's own."""
        self._remarks += 1
        call = Call(self._remarks, "remarks", msgspec.msgpack.encode(remark))
        self.link.send(WorkerCall(self.core.node, call))

    async def _flush(self) -> None:
        """Have the workers' files written out, within the user's timeout."""
        if not await self._files.flush(self.config.timeouts.user_s, self._killed):
            log.warning("the end of the workers' output is not kept: %s takes nothing", self.config.log_dir)
        self._files.close()

    # -- workers ------------------------------------------------------------------------------------------

    def _apply(self, effects: list[decisions.Effect]) -> None:
        for effect in effects:
            match effect:
                case decisions.Spawn(spec):
                    self._spawn(spec)
                case decisions.Stop(worker, at_once):
                    self._stop(worker, at_once=at_once)
                case decisions.GiveOrder(worker, order):
                    self._channel.give(worker, order)
                case decisions.GiveAnswer(worker, answer):
                    self._channel.give(worker, answer)
                case decisions.PassCall(call):
                    self.link.send(call)
                case decisions.Leave(outcome):
                    if not self._done.done():
                        self._done.set_result(outcome)

    def _spawn(self, spec: WorkerSpec) -> None:
        config = self.config
        folder = config.log_dir / self.core.node / spec.worker
        files = WorkerFiles.of(config.runtime_dir, self.core.node, spec.worker)
        output = WorkerOutput(
            folder, self._files, lambda stream, lines: self._show(spec, stream, lines), config.shown
        )
        environment = worker_environment(
            config.environment,
            spec,
            run_id=config.run_id,
            address=config.address,
            agent_socket=str(self._channel.path),
            error_file=str(files.error),
            timeout_s=config.timeouts.user_s,
            extra=config.extra,
            by_slot=config.slot_environments,
        )
        environment["STOKER_STACK_FILE"] = str(files.stacks)
        memory = self._limits.prepare(spec.worker, spec.memory_bytes) if spec.memory_bytes else None
        try:
            process = self.platform.start(
                config.command,
                environment,
                on_output=output.feed,
                on_exit=lambda code, signal_number: self._on_exit(spec.worker, code, signal_number),
                before_exec=memory.before_exec if memory is not None else lambda: None,
            )
        except EnvironmentProblem as error:
            output.close()
            if memory is not None:
                memory.close()
            self._apply(self.core.on_not_started(spec.worker, str(error)))
            self.link.report_soon(0.0)
            return
        output.reads_from(process)
        self._running[spec.worker] = RunningWorker(process, output, files, memory)
        self._stops.watch(process.pid)
        self._idle.clear()
        self.core.on_spawned(spec.worker, process.pid)
        self.link.renew_port()
        self.link.report_soon(COALESCE_S)

    def _stop(self, worker: str, *, at_once: bool) -> None:
        running = self._running.get(worker)
        if running is None:
            return
        if at_once:
            self._kill(worker, running)
            return
        running.process.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        running.kill_timer = loop.call_later(self.config.timeouts.stop_grace_s, self._kill, worker, running)

    def _kill(self, worker: str, running: RunningWorker) -> None:
        running.process.signal(signal.SIGKILL)
        if running.give_up_timer is None:
            loop = asyncio.get_running_loop()
            running.give_up_timer = loop.call_later(UNKILLABLE_S, self._give_up, worker, running)

    def _give_up(self, worker: str, running: RunningWorker) -> None:
        """Nobody can end it, and nobody shall wait for it."""
        pid = running.process.pid
        log.error(
            "%s: process %d cannot be killed (state %s): a driver or file system holds it; it is left behind",
            worker,
            pid,
            process_state(pid) or "unknown",
        )
        self._on_exit(worker, None, signal.SIGKILL)

    def _show(self, spec: WorkerSpec, stream: str, lines: list[bytes]) -> None:
        config = self.config
        hidden = config.redirects.has(spec.slot, stream) and not config.tee.has(spec.slot, stream)
        if config.show is not None and not hidden:
            config.show(self.rank_of(spec), stream, lines)

    def rank_of(self, spec: WorkerSpec) -> int:
        """The worker's rank in the current world, or the one it was started with."""
        world = self.core.directive.world
        member = world.member(spec.worker) if world is not None else None
        return member.rank if member is not None else spec.rank

    def _on_exit(self, worker: str, code: int | None, signal_number: int | None) -> None:
        running = self._running.pop(worker, None)
        if running is None:
            return  # it had been given up
        self._stops.forget(running.process.pid)
        ended = self._exits.read(
            code,
            signal_number,
            said=running.failure or running.files.read_error(),
            tail=running.output.tail(),
            memory=running.memory,
            now=self.clock.now(),
            wall_s=self.clock.wall(),
        )
        running.close()
        if running.memory is not None:
            running.memory.close()
        failed, words, outcome = ended.code != 0, ended.message, self.core.directive.outcome
        was_released = outcome is not None and outcome.success and not self.core.is_stopping(worker)
        if failed and was_released and not self.late_failure:
            self.late_failure = (
                words or f"{worker} ended with {ended.code if ended.code is not None else ended.signal}"
            )
        if failed:
            self._saver.save_soon()
        self._apply(self.core.on_exit(worker, ended))
        self.link.report_soon(0.0)
        if not self._running:
            self._idle.set()

    def _on_hello(self, worker: str, pid: int) -> None:
        running = self._running.get(worker)
        if running is not None:
            is_below = pid != running.process.pid and belongs_to(pid, running.process.pid)
            running.speaker_pid = pid if is_below else 0
            self.core.on_spawned(worker, running.pid)
        self._apply(self.core.on_hello(worker))
        self.link.report_soon(COALESCE_S)

    def _on_state(self, worker: str, state: WorkerState) -> None:
        known = self.core.workers.get(worker)
        only_commits = known is not None and known.state.phase == state.phase == "member"
        self._apply(self.core.on_state(worker, state))
        least_s = max(COALESCE_S, self.core.directive.report_interval_s)
        self.link.report_soon(least_s if only_commits else 0.0)

    def _on_run_state(self, pid: int) -> None:
        """A process that this agent has started was stopped, or goes on."""
        for worker, running in self._running.items():
            if running.process.pid == pid:
                self._look_at(worker, running)
                self.link.report_soon(0.0)

    def _on_beat(self) -> None:
        """The kernel tells of children that are stopped, but not of those that they have started, nor of those that a
        debugger holds."""
        now = self.clock.now()
        self._exits.tick(now)
        self._saver.look(writes=self.core.directive.saves)
        silence_s = self.config.timeouts.beat_timeout_s / 2
        for worker, running in self._running.items():
            self._look_at(worker, running)
        stuck_s = max((running.output.stuck_s() for running in self._running.values()), default=0.0)
        if stuck_s > silence_s and not self._is_stuck:
            log.warning(
                "%s has taken nothing for %.0f s: workers that print wait for it",
                self.config.log_dir,
                stuck_s,
            )
        self._is_stuck = stuck_s > silence_s

    def _look_at(self, worker: str, running: RunningWorker) -> None:
        if process_state(running.pid) in STOPPED:
            self._apply(self.core.on_stopped(worker, self.clock.now()))
        else:
            self._apply(self.core.on_continued(worker))

    def _on_call(self, worker: str, call: Call) -> None:
        self._apply(self.core.on_call(worker, call))

    def _on_failure(self, worker: str, message: str) -> None:
        running = self._running.get(worker)
        if running is not None:
            running.failure = shortened(message, MESSAGE_CHARACTERS)
