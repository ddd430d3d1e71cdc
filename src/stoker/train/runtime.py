"""The shell around `MemberCore`: threads, sockets and process groups of one worker."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stoker.data.ledger import Ledger
from stoker.data.session import HandedOut, Session, session
from stoker.errors import ConfigError, MasterUnreachable, StokerError
from stoker.settings import Timeouts, WorkerSettings, survive_nccl_errors, worker_settings
from stoker.train.channel import AgentChannel
from stoker.train.checkpoint import CheckpointFolder
from stoker.train.gradients import weighted_mean
from stoker.train.group import ProcessGroup, is_collective_failure
from stoker.train.member import MemberCore
from stoker.train.transfer import receive_state, receivers_of, send_state
from stoker.wire.job import Member, Order, World

log = logging.getLogger("stoker.train")
SAY_INTERVAL_S = 0.1
"""Seconds between two words about commits alone: each costs the node about 0.5 ms of CPU."""


class WorldChanged(BaseException):
    """Leaves the step that is under way. Not an Exception, so that `except Exception` lets it pass."""


class Sealed(Protocol):
    """What the runtime needs of a State."""

    @property
    def stands_at_commit(self) -> bool: ...

    def seal(self) -> None: ...

    def roll_back(self) -> None: ...

    def export(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...

    def forget_group(self) -> None: ...


class Runtime:
    """One worker: connects, enters worlds, commits, leaves."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.session: Session = session()
        self.session.rank, self.session.world_size = settings.rank, settings.world_size
        self.session.check = self._check
        self.session.on_batch = self._on_batch
        self.core = MemberCore(settings.worker)
        self.channel: AgentChannel | None = None
        self.member: Member | None = None
        self.device = _device(settings.local_rank)
        self._group: ProcessGroup | None = None
        self._changed = threading.Condition()
        self._lost_agent = False
        self._connected = False
        self._said_at = 0.0
        self._checkpoints: CheckpointFolder | None = None
        self._checkpoint_every = settings.checkpoint_every
        self._ledger = Ledger(settings.audit_dir, settings.worker) if settings.audit_dir else None

    # -- start --------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Say hello to the agent, if there is one. Raises ConfigError."""
        if self._connected:
            return
        self._connected = True
        if self.settings.agent_socket is None:
            if self.settings.world_size > 1:
                raise ConfigError(
                    f"WORLD_SIZE={self.settings.world_size} is set, but no agent of Stoker has started this process: "
                    "start the script with `stoker run` in place of torchrun, or unset it to run it alone"
                )
            self.session.rank, self.session.world_size = 0, 1
            return
        survive_nccl_errors()
        self.channel = AgentChannel(self.settings.agent_socket, self.settings.worker)
        sys.excepthook = functools.partial(_report_exception, self.channel)
        self.channel.start(self._on_order, self._on_lost_agent)

    def checkpoint_to(self, checkpoint_dir: str | None, checkpoint_every: int | None) -> None:
        """Where a State's checkpoints go and how often; None leaves it to the settings."""
        folder = checkpoint_dir or self.settings.checkpoint_dir
        if folder is not None:
            self._checkpoints = CheckpointFolder(Path(folder))
        if checkpoint_every is not None:
            self._checkpoint_every = checkpoint_every

    def load_checkpoint(self, state: Sealed) -> None:
        """Start from the newest checkpoint, if there is one."""
        saved = self._checkpoints.newest() if self._checkpoints is not None else None
        if saved is not None:
            self.core.commits, exported = saved
            state.load(exported)
            log.info("state loaded from the checkpoint at commit %d", self.core.commits)
        state.seal()

    # -- worlds -------------------------------------------------------------------------------------------

    def park(self, state: Sealed) -> None:
        """Ready for a world."""
        # What imports and set-up made lives as long as the process. Out of the collector's sight it makes the
        # collection in `leave` a matter of microseconds instead of 0.15 s.
        gc.collect()
        gc.freeze()
        with self._changed:
            self.core.park(
                commits=self.core.commits, clean=state.stands_at_commit, store=self._open_store().endpoint
            )
            self._say()

    def enter(self, state: Sealed) -> None:
        """Wait for a world, join its group, share its state. Comes back as a member.

        Raises MasterUnreachable when the agent is gone.
        """
        while True:
            world = self._wait_for_world()
            try:
                self._join(world, state)
                self.session.is_closed = True
                return
            except (RuntimeError, WorldChanged) as error:
                if isinstance(error, StokerError):
                    raise
                log.debug("generation %d did not come about: %s", world.generation, error)
                self.leave(state)

    def leave(self, state: Sealed) -> None:
        """Out of the world: undo the broken step, take the group down, tell the agent."""
        clean = state.stands_at_commit
        state.forget_group()
        gc.collect()
        if self._group is not None:
            self._group.close()
        state.roll_back()
        self.session.share = None
        with self._changed:
            self.core.leave(clean=clean, store=self._open_store().endpoint)
            self._say()

    def is_broken_world(self, error: BaseException) -> bool:
        """Whether an exception of the training function means that the world, not the script, has failed."""
        if isinstance(error, WorldChanged):
            return True
        if self.channel is None or isinstance(error, StokerError):
            return False
        return is_collective_failure(error) or (
            isinstance(error, RuntimeError) and self.core.interruption() == "now"
        )

    def finish(self) -> None:
        """The function has returned: wait until everybody's has. Raises WorldChanged if it must run again."""
        with self._changed:
            self.core.finish()
            self._say()
            while self.channel is not None and not self.core.released:
                if self.core.interruption() != "no":
                    raise WorldChanged
                self._wait()
        self.session.is_closed = False
        if self._ledger is not None:
            self._ledger.close()

    # -- steps --------------------------------------------------------------------------------------------

    def commit(self, state: Sealed) -> None:
        """Seal the step; leave the world here if it is to change."""
        state.seal()
        with self._changed:
            self.core.commit()
            now = time.monotonic()
            if now - self._said_at >= SAY_INTERVAL_S:
                self._said_at = now
                self._say()
            stop = self.core.interruption() == "now"
        commits = self.core.commits
        if self._ledger is not None:
            self._ledger.committed(self.session.generation, commits, self.session.rank)
        if self._checkpoints is not None and self.session.rank == 0 and commits % self._checkpoint_every == 0:
            self._checkpoints.save(commits, state.export())
        if stop:
            raise WorldChanged

    def wrap(self, module: torch.nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
        """DistributedDataParallel whose gradients are weighted by each rank's share."""
        if not dist.is_initialized():
            raise StokerError(
                "state.ddp is for use inside the @stoker.elastic function: there is no world yet"
            )
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(module, **{"device_ids": device_ids, "init_sync": False, **options})
        wrapped.register_comm_hook(self.session, weighted_mean)
        return wrapped

    # -- threads ------------------------------------------------------------------------------------------

    def _on_order(self, order: Order) -> None:
        """In the reading thread."""
        with self._changed:
            before = self.core.state()
            self.core.on_order(order)
            if self.core.state() != before:
                self._say()
            must_break = self.core.interruption() == "now" and self.core.phase != "finished"
            self._changed.notify_all()
        if must_break and self._group is not None:
            self._group.break_off()

    def _on_lost_agent(self) -> None:
        with self._changed:
            self._lost_agent = True
            self._changed.notify_all()

    def _wait(self) -> None:
        if self._lost_agent:
            raise MasterUnreachable("this worker's agent is gone")
        self._changed.wait()

    def _wait_for_world(self) -> World:
        if self.channel is None:
            return self._world_of_one()
        with self._changed:
            while (world := self.core.offered_world()) is None:
                self._wait()
            self.core.enter(world)
            self._say()
            return world

    def _world_of_one(self) -> World:
        me = Member(
            worker=self.core.worker,
            node="",
            rank=0,
            local_rank=0,
            local_world_size=1,
            group_rank=0,
            copy_state=False,
        )
        world = World(generation=1, members=(me,), source=0, commits=self.core.commits, store="")
        self.core.enter(world)
        return world

    def _join(self, world: World, state: Sealed) -> None:
        rank = self.core.rank_in(world)
        assert rank is not None
        group = self._open_store()
        group.open(world, rank, self._check)
        self._check()
        copies = world.members[rank].copy_state
        if copies:
            received = receive_state(world, self.device)
            state.load(received)
            state.seal()
        elif rank == world.source and receivers_of(world):
            send_state(world, rank, state.export(), self.device)
        self.member = world.members[rank]
        live = self.session
        live.rank, live.world_size, live.generation = rank, len(world.members), world.generation
        with self._changed:
            self.core.synced(world.commits)
            self._say()
        if self._ledger is not None:
            self._ledger.entered(world, rank, copied=copies)

    def _open_store(self) -> ProcessGroup:
        if self._group is None:
            address = None if self.channel is None else self.settings.address
            timeout_s = Timeouts.from_user_timeout(self.settings.timeout_s).collective_s
            self._group = ProcessGroup(self.device, timeout_s=timeout_s, address=address)
            atexit.register(self._group.close)
        return self._group

    # -- helpers ------------------------------------------------------------------------------------------

    def _say(self) -> None:
        if self.channel is not None:
            self.channel.say(self.core.state())

    def _check(self) -> None:
        if self.core.phase == "member" and self.core.interruption() == "now":
            raise WorldChanged

    def _on_batch(self, batch: HandedOut) -> None:
        if self._ledger is not None:
            self._ledger.read(self.session, self.core.commits + 1, batch)


@functools.cache
def runtime() -> Runtime:
    """The process's one runtime: a process is one worker."""
    return Runtime(worker_settings())


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def readable_traceback(error: BaseException) -> str:
    """The traceback; for our own errors without our own frames: the message says what they would."""
    told = traceback.TracebackException.from_exception(error)
    if isinstance(error, StokerError):
        ours = str(Path(__file__).parents[1]) + "/"
        part: traceback.TracebackException | None = told
        while part is not None:
            kept = [frame for frame in part.stack if not frame.filename.startswith(ours)]
            part.stack = traceback.StackSummary.from_list(kept)
            part = part.__cause__
    return "".join(told.format())


def _report_exception(
    channel: AgentChannel,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """`sys.excepthook` of a worker: the agent learns the traceback, the exit code is the error's own."""
    text = readable_traceback(error)
    channel.fail(text)
    sys.stderr.write(text)
    if isinstance(error, StokerError):
        sys.stderr.flush()
        sys.exit(error.exit_code)
