"""This process's place among the ranks, as Horovod numbers them, and the group that its collectives use."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from stoker.errors import ConfigError
from stoker.settings import LaunchPlace, Timeouts, launch_place, worker_settings
from stoker.train.accelerator import CPU, backend_of, choose_device
from stoker.train.group import wait_for_leavers
from stoker.train.runtime import runtime
from stoker.wire.job import Member, WorldView


class Place(NamedTuple):
    """Where a process stands in a world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    order: tuple[int, ...]
    """torch's rank of each of Horovod's ranks: here those who have the state come first."""


class Span(NamedTuple):
    """The ranks that a collective is of."""

    rank: int
    """This process's number among them."""
    ranks: Sequence[int]
    """Horovod's ranks of them, in ascending order."""
    order: tuple[int, ...]
    """The group's rank of each."""
    group: dist.ProcessGroup | None = None
    """None: that of all."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def number_of(self, root_rank: int) -> int:
        """Which of them a rank is. Raises ConfigError."""
        if root_rank not in self.ranks:
            known = f"{list(self.ranks)}" if self.group is not None else f"0 to {self.size - 1}"
            raise ConfigError(f"root_rank={root_rank}: ranks are {known}")
        return self.ranks.index(root_rank)


class Forgetful(Protocol):
    """What holds pending collectives, and with them the group's sockets."""

    def forget(self) -> None: ...


class StandIn(Protocol):
    """What can take part in the reduction of gradients without any of its own."""

    layout: int
    """The same number on every rank."""

    def reduce_zeros(self) -> None: ...


class HorovodWorld:
    """Of one process."""

    def __init__(self, launch: LaunchPlace) -> None:
        self._launch = launch
        self._place: Place | None = None
        """None: before `init` or after `shutdown`."""
        self._is_elastic = False
        self._made: Store | None = None
        """Where the ranks of the group have met that was made here; None: there is none."""
        self._meeting_place: Store | None = None
        """Of all groups that are made here, one after the other: it is opened once, by what the environment says."""
        self._turns = 0
        """Groups made here."""
        self._kinds: frozenset[str] = frozenset()
        """Kinds of devices whose tensors the group takes; empty: any."""
        self._device = torch.device(CPU)
        self._pending: weakref.WeakSet[Forgetful] = weakref.WeakSet()
        self._reducers: weakref.WeakSet[StandIn] = weakref.WeakSet()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Of the process sets that this rank is in, by Horovod's ranks."""
        self.process_sets: dict[int, tuple[int, ...]] = {}
        """The ranks of each that was added, by its number from 1 on."""

    # -- Horovod's basics ---------------------------------------------------------------------------------

    def init(self) -> None:
        """Take this process's place from the environment. May be called again.

        The group is made by the first collective: in an elastic job the environment's place may be an old one, and the
        group is the elastic function's.
        """
        if self._place is None:
            if dist.is_initialized():
                rank, size = dist.get_rank(), dist.get_world_size()
            else:
                rank, size = self._launch.rank, self._launch.world_size
            self._place = Place(
                rank=rank,
                size=size,
                local_rank=self._launch.local_rank,
                local_size=self._launch.local_world_size,
                cross_rank=self._launch.group_rank,
                cross_size=self._launch.group_world_size,
                order=tuple(range(size)),
            )

    def shutdown(self) -> None:
        """Give the group back, if it is ours. `init` may come again, and finds nothing of what was."""
        self.forget()
        if self._made is not None and dist.is_initialized():
            # Others may still read what this rank has sent, which closed connections would take from them.
            wait_for_leavers(self._made, dist.get_world_size())
            dist.destroy_process_group()
        self._made = self._place = None
        if not self._is_elastic:
            self._kinds, self._device = frozenset(), torch.device(CPU)

    @property
    def is_initialized(self) -> bool:
        return self._place is not None

    @property
    def place(self) -> Place:
        """Raises ConfigError before `hvd.init()`."""
        if self._place is None:
            raise ConfigError("Horovod has not been initialized: call hvd.init() first")
        return self._place

    # -- collectives --------------------------------------------------------------------------------------

    def ready(self, ranks: tuple[int, ...] | None = None) -> Span:
        """There is a group to use, from now on, of these of Horovod's ranks or of all.

        Raises ConfigError where there cannot be one, or where this process is not in it.
        """
        place = self.place
        if not dist.is_initialized():
            if self._is_elastic:
                raise ConfigError(
                    "collectives of an elastic script belong into the function under @hvd.elastic.run: there is no "
                    "world before it is called, and state.sync() brings everybody the same state"
                )
            self._make_group(place)
        if self._is_elastic:
            runtime().session.progress += 1
        if ranks is None:
            return Span(place.rank, range(place.size), place.order)
        return self._part(place, ranks)

    def add_set(self, number: int, ranks: tuple[int, ...]) -> None:
        """Make a group of some ranks; all ranks do so, those outside too. Raises ConfigError in an elastic script."""
        if self._is_elastic:
            raise ConfigError(
                "process sets are for scripts that are not elastic: in a world that changes, a rank may be another's"
            )
        order = self.ready().order
        if ranks[-1] >= len(order):
            raise ConfigError(f"process set {list(ranks)}: this world has ranks 0 to {len(order) - 1}")
        group = dist.new_group(sorted(order[rank] for rank in ranks))
        self.process_sets[number] = ranks
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._groups[ranks] = group

    def own_sets(self) -> list[Span]:
        """The process sets that this rank is in, in the same order on all ranks."""
        return [
            self._part(self.place, ranks)
            for _, ranks in sorted(self.process_sets.items())
            if ranks in self._groups
        ]

    def _part(self, place: Place, ranks: tuple[int, ...]) -> Span:
        if ranks not in self._groups:
            raise ConfigError(f"rank {place.rank} is not in the process set {list(ranks)}")
        members = sorted(place.order[rank] for rank in ranks)
        order = tuple(members.index(place.order[rank]) for rank in ranks)
        return Span(ranks.index(place.rank), ranks, order, self._groups[ranks])

    def on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that the group can exchange, dense and on the right device."""
        device = tensor.device if not self._kinds or tensor.device.type in self._kinds else self._device
        return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the group can exchange this very tensor."""
        return tensor.is_contiguous() and (not self._kinds or tensor.device.type in self._kinds)

    @property
    def device(self) -> torch.device:
        """Of small messages."""
        return self._device

    def hold(self, pending: Forgetful) -> None:
        """This one must let go when the group goes."""
        self._pending.add(pending)

    def forget(self) -> None:
        """Drop all pending collectives, and process sets with their groups."""
        for pending in list(self._pending):
            pending.forget()
        self._groups.clear()
        self.process_sets.clear()

    def know(self, reducer: StandIn) -> None:
        """An optimizer whose gradients other ranks may reduce while this one has joined."""
        self._reducers.add(reducer)

    def stand_in(self, layout: int) -> None:
        """Reduce zeros with the others. Raises ConfigError where there is no such optimizer here."""
        for reducer in self._reducers:
            if reducer.layout == layout:
                reducer.reduce_zeros()
                return
        raise ConfigError(
            "others reduce gradients of an optimizer that this rank, which has joined, does not have"
        )

    def confirm(self) -> None:
        """Raises RuntimeError where what collectives have brought cannot be believed."""
        if self._is_elastic:
            runtime().steps.confirm()

    # -- elastic ------------------------------------------------------------------------------------------

    def begin_elastic(self) -> None:
        """Groups are Stoker's from now on. Raises ConfigError where the script has made one."""
        if dist.is_initialized() and not self._is_elastic:
            raise ConfigError(
                "this script has used a collective before @hvd.elastic.run: leave it out, workers that join later "
                "would wait in it for ever; state.sync() broadcasts model and optimizer"
            )
        self._is_elastic = True

    def enter(self, world: WorldView, member: Member) -> None:
        """A new world's group is there. Raises RuntimeError when a peer dies."""
        self._device = runtime().device
        self._kinds = frozenset((self._device.type,))
        mine = torch.tensor([member.group_rank, member.local_rank], device=self._device)
        everybody = [torch.zeros_like(mine) for _ in range(world.size)]
        dist.all_gather(everybody, mine)
        across = sorted(node for node, local in (two.tolist() for two in everybody) if local == mine[1])
        order = ranks_with_the_state_first(world)
        self._place = Place(
            rank=order.index(member.rank),
            size=world.size,
            local_rank=member.local_rank,
            local_size=member.local_world_size,
            cross_rank=across.index(member.group_rank),
            cross_size=len(across),
            order=order,
        )

    def _make_group(self, place: Place) -> None:
        settings = worker_settings()
        self._device = choose_device(settings.accelerator, place.local_rank)
        backend = backend_of(self._device)
        self._kinds = frozenset((CPU, self._device.type))
        if self._device.type != CPU:
            backend = f"{CPU}:{backend_of(torch.device(CPU))},{self._device.type}:{backend}"
        timeout = timedelta(seconds=Timeouts.from_user_timeout(settings.timeout_s).collective_s)
        if self._meeting_place is None:
            self._meeting_place = HashStore() if place.size == 1 else _meeting_place(place, timeout)
        self._turns += 1
        if self._turns == 1:
            # As Horovod does: who ends while others still read would reset their connections, and Gloo may abort them.
            atexit.register(self.shutdown)
        store = PrefixStore(f"horovod-{self._turns}", self._meeting_place)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        self._made = store


def _meeting_place(place: Place, timeout: timedelta) -> Store:
    """Where the environment says (MASTER_ADDR and MASTER_PORT). Rank 0 hosts it, unless the agent does."""
    store: Store
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def ranks_with_the_state_first(world: WorldView) -> tuple[int, ...]:
    """The world's ranks in Horovod's order: rank 0 holds the state, and newcomers come last.

    What a script broadcasts from rank 0 is then never a newcomer's, as Horovod promises.
    """

    def copies(rank: int) -> bool:
        return rank != world.source if world.all_receive else rank in world.receivers

    return tuple(sorted(range(world.size), key=lambda rank: (copies(rank), rank)))


@functools.cache
def horovod_world() -> HorovodWorld:
    """The process's one."""
    return HorovodWorld(launch_place())
