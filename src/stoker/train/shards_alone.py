"""Dynamic shards of a script that runs alone: the master's core, in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from stoker.job.shards import Decision, FailJob, Reply, Requeued, Shards
from stoker.wire.shards import LeaseShard, ReportShard, ShardAnswer, ShardCall, ShardLeased

log = logging.getLogger("stoker.train")
WORKER = "alone"


class AloneCaller:
    """Answers calls from a core of its own; several threads may call. Nothing outlives the process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._core = Shards()
        self._clock = clock
        self._changed = threading.Condition()
        self._calls = 0
        self._answers: dict[int, ShardAnswer] = {}
        self._abandoned: dict[int, str] = {}
        """Lease calls whose thread was interrupted while it waited: dataset."""

    def call(self, message: ShardCall, *, is_ahead: bool = False) -> ShardAnswer:
        """The answer, once there is one."""
        with self._changed:
            number = self._ask(message)
            try:
                while number not in self._answers:
                    deadline = self._core.next_deadline()
                    timeout_s = None if deadline is None else max(0.0, deadline - self._clock())
                    self._changed.wait(timeout_s)
                    self._carry_out(self._core.tick(self._clock()))
            except BaseException:
                if isinstance(message, LeaseShard):
                    self._abandon(number, message.dataset)
                raise
            return self._answers.pop(number)

    def _ask(self, message: ShardCall) -> int:
        self._calls += 1
        number = self._calls
        self._carry_out(self._core.call(WORKER, number, message, self._clock()))
        return number

    def _abandon(self, number: int, dataset: str) -> None:
        """Nobody waits for this lease any more: should it come, it is handed back."""
        answer = self._answers.pop(number, None)
        if answer is None:
            self._abandoned[number] = dataset
        elif isinstance(answer, ShardLeased):
            shard = answer.shard
            report = ReportShard(dataset, shard.number, number, "returned", rewinds=shard.rewinds)
            self._answers.pop(self._ask(report))

    def _carry_out(self, decision: Decision) -> None:
        for effect in decision.effects:
            match effect:
                case Reply(_, number, answer):
                    self._answers[number] = answer
                    if number in self._abandoned:
                        self._abandon(number, self._abandoned.pop(number))
                case Requeued(dataset, number, failures, why):
                    log.info("shard %d of %s goes back (%d failures): %s", number, dataset, failures, why)
                case FailJob(_, _, why):
                    log.error("%s", why)
        self._changed.notify_all()
