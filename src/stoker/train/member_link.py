"""A worker's word with its agent: `MemberCore` between the training loop and the thread that reads the orders."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from stoker.data.session import Session
from stoker.errors import ConfigError
from stoker.settings import Timeouts, WorkerSettings
from stoker.train.channel import AgentChannel, LateAnswer
from stoker.train.failures import report_exception
from stoker.train.member import MemberCore
from stoker.wire.job import Member, Order, WorldView
from stoker.wire.remarks import Remark

SAY_INTERVAL_S = 0.1
"""Seconds between two words about commits alone: each costs the node about 0.5 ms of CPU."""


class WorldChanged(BaseException):
    """Leaves the step that is under way. Not an Exception, so that `except Exception` lets it pass."""


class MemberLink:
    """The core under a lock. What the loop does is said to the agent, what the agent orders reaches the loop."""

    def __init__(self, worker: str, session: Session) -> None:
        self.core = MemberCore(worker)
        self.channel: AgentChannel | None = None
        """None: the script runs alone."""
        self.break_off: Callable[[], None] = lambda: None
        """Wakes the loop out of a collective of a world that is over. Called in the reading thread."""
        self._session = session
        self._changed = threading.Condition()
        self._is_lost = False
        self._open_leases = 0
        """The training loop's own."""
        self._leases_ahead = 0
        self._is_waiting = 0
        self._said_at = 0.0

    def connect(self, settings: WorkerSettings, socket_path: str) -> None:
        """Say hello to the agent. Raises ConfigError."""
        self.channel = AgentChannel(socket_path, settings.worker)
        sys.excepthook = functools.partial(report_exception, self.channel)
        beat_s = Timeouts.from_user_timeout(settings.timeout_s).beat_interval_s
        self.channel.start(self._on_order, self._on_lost, on_beat=self._on_beat, beat_s=beat_s)

    # -- the loop's moves ---------------------------------------------------------------------------------

    def park(self, *, clean: bool, store: str) -> None:
        """Ready for the first world."""
        with self._changed:
            self.core.park(commits=self.core.commits, clean=clean, store=store)
            self._say()

    def wait_for_world(self) -> WorldView:
        """The next world of this worker, which it enters.

        Raises MasterUnreachable when the agent is gone, ConfigError in a process that is not the worker itself.
        """
        if self.channel is None:
            return self._world_of_one()
        with self._changed:
            while (world := self.core.offered_world()) is None:
                self._wait()
            self.core.enter(world)
            self._say()
            return world

    def synced(self, commits: int) -> None:
        """The state is the world's own now."""
        with self._changed:
            self.core.synced(commits)
            self._say()

    def commit(self, busy_s: float) -> bool:
        """Count a step, with its own work; whether the world is to be left here."""
        with self._changed:
            self.core.commit()
            self.core.busy_s += busy_s
            self._session.progress = 0
            now = time.monotonic()
            if now - self._said_at >= SAY_INTERVAL_S:
                self._said_at = now
                self._say()
            return self.core.interruption() == "now"

    def leave(self, *, clean: bool, store: str, broke: str) -> None:
        """Out of the world; `broke` says what broke it, unless an order did."""
        with self._changed:
            self.core.leave(clean=clean, store=store, broke=broke)
            self._say()

    def finish(self) -> None:
        """The function has returned: wait until everybody's has. Raises WorldChanged if it must run again."""
        with self._changed:
            self.core.finish()
            self._say()
            while self.channel is not None and not self.core.released:
                if self.core.interruption() != "no":
                    raise WorldChanged
                self._wait()

    # -- meanwhile ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises WorldChanged when the world must be left now."""
        if self.core.phase == "member" and self.is_interrupted():
            raise WorldChanged

    def is_interrupted(self) -> bool:
        """Whether the world must be left now."""
        return self.core.interruption() == "now"

    def report(self, metrics: dict[str, float]) -> None:
        """Take over figures of the script, to be said with the next words."""
        with self._changed:
            self.core.metrics = {**self.core.metrics, **metrics}

    def remark(self, remark: Remark) -> None:
        """Have a line written into the job's event log."""
        if self.channel is not None:
            self.channel.tell("remarks", msgspec.msgpack.encode(remark))

    def lease(self, service: str, body: bytes, on_late: LateAnswer) -> bytes:
        """As `call`, for something that may be long in coming: to wait for it is not to stand still."""
        with self._changed:
            self._open_leases += 1
        try:
            return self.call(service, body, on_late)
        finally:
            with self._changed:
                self._open_leases -= 1

    def lease_ahead(self, service: str, body: bytes, on_late: LateAnswer) -> bytes:
        """As `lease`, for loader processes: the loop may go on meanwhile, or stand still; see `waiting`."""
        with self._changed:
            self._leases_ahead += 1
        try:
            return self.call(service, body, on_late)
        finally:
            with self._changed:
                self._leases_ahead -= 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop waits for loader processes: it does not stand still where these wait for a lease."""
        with self._changed:
            self._is_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._is_waiting -= 1

    def call_through(self, service: str, body: bytes) -> bytes:
        """As `call`, but to its end, even if the world ends meanwhile: for what must not stay in doubt."""
        return self._call(service, body, lambda: None, None)

    def call(self, service: str, body: bytes, on_late: LateAnswer | None = None) -> bytes:
        """Ask a service of the master's; `on_late` as in `AgentChannel.call`. Raises WorldChanged where the world ends
        meanwhile, JobError, MasterUnreachable, ConfigError."""
        return self._call(service, body, self.check, on_late)

    def _call(
        self, service: str, body: bytes, check: Callable[[], None], on_late: LateAnswer | None
    ) -> bytes:
        assert self.channel is not None
        if self.core.phase == "finished":
            raise ConfigError(
                "after the @stoker.elastic function the job is over: use stoker.shards, barrier and sync before its end"
            )
        self._session.progress += 1
        return self.channel.call(service, body, check, on_late)

    # -- the reading thread -------------------------------------------------------------------------------

    def _on_order(self, order: Order) -> None:
        with self._changed:
            before = self.core.state()
            self.core.on_order(order)
            if self.core.state() != before:
                self._say()
            must_break = self.is_interrupted() and self.core.phase != "finished"
            self._changed.notify_all()
        if must_break:
            self.break_off()

    def _on_lost(self) -> None:
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _on_beat(self) -> None:
        with self._changed:
            if self._open_leases or (self._is_waiting and self._leases_ahead):
                self._session.progress += 1
            self._say()

    # -- helpers ------------------------------------------------------------------------------------------

    def _say(self) -> None:
        if self.channel is not None:
            self.core.progress = self._session.progress
            self.channel.say(self.core.state())

    def _wait(self) -> None:
        if self._is_lost and self.channel is not None:
            raise self.channel.loss()
        self._changed.wait()

    def _world_of_one(self) -> WorldView:
        world = world_of_one(self.core.worker, self.core.commits)
        self.core.enter(world)
        return world


def world_of_one(worker: str, commits: int, generation: int = 1) -> WorldView:
    """A world in which a worker is alone."""
    me = Member(
        worker=worker,
        node="",
        rank=0,
        local_rank=0,
        local_world_size=1,
        group_rank=0,
        copy_state=False,
    )
    return WorldView(generation=generation, size=1, members=(me,), source=0, commits=commits, store="")
