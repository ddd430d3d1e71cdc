"""How a worker comes into a world and out of it: its process group, and whose state counts."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.data.session import Session
from stoker.errors import ConfigError, StokerError
from stoker.settings import Timeouts, WorkerSettings
from stoker.train.accelerator import ddp_device_ids, is_out_of_memory, synchronize
from stoker.train.breaks import Breaks
from stoker.train.collector import set_aside_from_collector
from stoker.train.confirm import Confirmation, wait_for_stream
from stoker.train.failures import is_collective_failure, is_device_lost, with_causes
from stoker.train.gradients import Reduction, weighted_mean
from stoker.train.group import GLOO, ProcessGroup
from stoker.train.member_link import MemberLink, WorldChanged, world_of_one
from stoker.train.sealed import Sealed
from stoker.train.steps import Steps
from stoker.train.transfer import receive_state, receivers_of, send_state
from stoker.wire.job import Member, WorldView

log = logging.getLogger("stoker.train")
BROKE_CHARACTERS = 1000
Meet = Callable[[WorldView, Member], None]
"""What a new world's members do together before its state counts as everybody's."""
LEVELS = {"quiet": logging.INFO, "loud": logging.WARNING, "known": logging.DEBUG}


class Worlds:
    """One worker's worlds, one after the other."""

    def __init__(
        self, settings: WorkerSettings, live: Session, link: MemberLink, steps: Steps, device: torch.device
    ) -> None:
        self._settings = settings
        self._live = live
        self._link = link
        self._steps = steps
        self._device = device
        self._group: ProcessGroup | None = None
        self._confirmation: Confirmation | None = None
        """None: collectives that fail raise."""
        self.member: Member | None = None
        """This worker's place in the newest world."""
        self._world: WorldView | None = None
        self._breaks = Breaks()
        self._broke = ""
        """What broke the world that is being left."""
        link.break_off = self.break_off

    def warm_up(self, state: Sealed, function: Callable[[Any], object]) -> None:
        """Call `function(state)` in a group of one, and undo what it did. Raises ConfigError where it cannot be undone.

        What it leaves is what does not belong to the state: compiled code, memory of the allocator, libraries loaded.
        """
        note_batch, self._live.on_batch = self._live.on_batch, None
        self._open_world(world_of_one(self._link.core.worker, 0, generation=0), 0)
        self._steps.sharded.rehearse(self._device)
        with state.rehearsal():
            function(state)
            synchronize(self._device)
        self._live.on_batch = note_batch
        self._live.share = None
        self._take_down(state)

    def park(self, state: Sealed) -> None:
        """Ready for a world."""
        # It makes the collection in `leave` a matter of microseconds instead of 0.15 s.
        set_aside_from_collector()
        self._link.park(clean=state.stands_at_commit, store=self._open_group().endpoint)

    def enter(self, state: Sealed, meet: Meet | None = None) -> None:
        """Wait for a world, join its group, share its state; `meet` is called in it. Comes back as a member.

        Raises MasterUnreachable when the agent is gone, and what says that this process cannot go on: its device is
        lost, or has no room for the state.
        """
        while True:
            world = self._link.wait_for_world()
            try:
                self._join(world, state, meet)
                self._live.is_closed = True
                return
            except (RuntimeError, WorldChanged) as error:
                if isinstance(error, StokerError) or is_out_of_memory(error) or is_device_lost(error):
                    raise
                self.note_broken(error, world.generation)
                self.leave(state)

    def leave(self, state: Sealed) -> None:
        """Out of the world: undo the broken step, take the group down, tell the agent.

        Raises RuntimeError when the device is lost: then this process must end, for a new one to take its place.
        """
        clean = state.stands_at_commit and not self._steps.sharded.is_lost
        self._take_down(state)
        synchronize(self._device)
        state.roll_back()
        self._live.share = None
        broke, self._broke = self._broke, ""
        self._link.leave(clean=clean, store=self._open_group().endpoint, broke=broke)

    def finish(self, state: Sealed) -> None:
        """The function has returned: wait until everybody's has. Raises WorldChanged if it must run again."""
        self._steps.keep_last(state)
        self._link.finish()
        self._live.is_closed = False
        self._steps.close()

    def is_broken_world(self, error: BaseException) -> bool:
        """Whether an exception of the training function means that the world, not the script, has failed.

        A script may have wrapped what it met in an exception of its own. Not where the device is lost: the process ends
        with that error, and its agent starts another.
        """
        if is_device_lost(error):
            return False
        if isinstance(error, WorldChanged):
            return True
        tuning = self._steps.tuning
        if tuning is not None and tuning.failed(error):
            return True
        if isinstance(error, StokerError):
            return False
        if self._link.channel is None:
            return False
        if is_collective_failure(error):
            return True
        kinds = (RuntimeError, WorldChanged) if self._link.is_interrupted() else (WorldChanged,)
        return isinstance(error, Exception) and any(isinstance(one, kinds) for one in with_causes(error))

    def note_broken(self, error: BaseException, generation: int) -> None:
        """Say what broke a world, before it is left."""
        is_polite = isinstance(error, WorldChanged)
        if is_polite:
            log.debug("generation %d is left", generation)
        else:
            commits = self._link.core.commits
            broken = self._breaks.note(error, commits)
            self._broke = broken.why[:BROKE_CHARACTERS]
            words = "generation %d broke at commit %d%s: %s"
            again = " as others did before, with no step between" if broken.importance == "loud" else ""
            log.log(LEVELS[broken.importance], words, generation, commits, again, broken.why)
        order = self._link.core.order
        if self._confirmation is not None and not (is_polite and order.stop_at_commit >= 0):
            self.break_off()  # what is queued may stand still, and the group cannot be shut down

    def break_off(self) -> None:
        """Wake whoever is blocked in a collective. In the thread that reads orders."""
        if self._group is not None:
            self._group.break_off()

    def wrap(self, module: torch.nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
        """DistributedDataParallel whose gradients are weighted by each rank's share."""
        if not dist.is_initialized():
            raise StokerError(
                "state.ddp is for use inside the @stoker.elastic function: there is no world yet"
            )
        own = {"device_ids": ddp_device_ids(self._device), "init_sync": False}
        wrapped = DistributedDataParallel(module, **{**own, **options})
        accumulation = self._steps.accumulation
        wrapped.register_comm_hook(Reduction(self._live, accumulation), weighted_mean)
        accumulation.watch(wrapped)
        return wrapped

    def _join(self, world: WorldView, state: Sealed, meet: Meet | None) -> None:
        link = self._link
        rank = link.core.rank_in(world)
        assert rank is not None
        self._open_world(world, rank)
        link.check()
        member = world.member(link.core.worker)
        assert member is not None
        if member.copy_state:
            received = self._receive(world)
            state.doubt()
            state.load(received)
            link.core.loaded(world.commits, "")
            state.seal()
        elif rank == world.source and receivers_of(world):
            send_state(world, rank, state.export(), self._device)
        self.member, self._world = member, world
        live = self._live
        live.rank, live.world_size, live.generation = rank, world.size, world.generation
        if meet is not None:
            meet(world, member)
        self._steps.begin()
        self._steps.sharded.enter(world, member.local_world_size, self._device, self._steps.confirm)
        link.synced(world.commits)
        self._steps.entered(world, rank, copied=member.copy_state, device=self._device)

    def share_state(self, state: Sealed, source: int) -> None:
        """Copy the state of a rank to all others, but for loaders' positions: a collective. Raises ConfigError."""
        world, live = self._world, self._live
        if world is None:
            raise ConfigError(
                "state.sync() is for use inside the @stoker.elastic function: there is no world yet"
            )
        if not 0 <= source < world.size:
            raise ConfigError(f"state.sync({source}): there is no such rank in a world of {world.size}")
        if world.size > 1:
            world = msgspec.structs.replace(world, source=source, all_receive=True)
            if live.rank != source:
                state.doubt()
            # From here on nobody who has not the source's state calls itself clean, whoever dies when.
            dist.barrier()
            if live.rank == source:
                send_state(world, source, state.export(), self._device)
            else:
                state.load(
                    self._receive(world), but=("positions",)
                )  # every rank's loaders stand where they stand
            self._steps.sharded.share(source)

    def _receive(self, world: WorldView) -> dict[str, Any]:
        try:
            return receive_state(world, self._device)
        finally:  # what is made of it by then may have failed in any way
            if self._confirmation is not None:
                self._confirmation.check()

    def _take_down(self, state: Sealed) -> None:
        state.forget_group()
        self._steps.sharded.forget()
        gc.collect()
        if self._group is not None:
            self._group.close()

    def _end(self) -> None:
        """The process ends. Others may still have to receive what it has sent, unless its function failed."""
        if self._confirmation is not None:
            if self._link.core.phase != "finished":
                self.break_off()
            with contextlib.suppress(RuntimeError):  # the device is lost
                synchronize(self._device)
        if self._group is not None:
            self._group.close()

    def _open_world(self, world: WorldView, rank: int) -> None:
        self._open_group().open(world, rank, self._link.check)
        if self._confirmation is not None:
            self._confirmation.begin()

    def _open_group(self) -> ProcessGroup:
        """Where this worker's worlds meet."""
        if self._group is None:
            address = None if self._link.channel is None else self._settings.address
            timeout_s = Timeouts.from_user_timeout(self._settings.timeout_s).collective_s
            self._group = ProcessGroup(self._device, timeout_s=timeout_s, address=address)
            atexit.register(self._end)
            if self._group.backend != GLOO:
                wait = functools.partial(wait_for_stream, self._device)
                self._confirmation = Confirmation(self._group, self._device, wait)
                self._steps.confirm = self._confirmation.check_news
                register_optimizer_step_pre_hook(self._confirmation.before_optimizer)
        return self._group
