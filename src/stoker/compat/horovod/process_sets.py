"""Process sets: collectives of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.compat.horovod.basics import Span, horovod_world
from stoker.errors import ConfigError


class ProcessSet:
    """Some of Horovod's ranks, to be given to `hvd.init(process_sets=…)` or `hvd.add_process_set` before it is used."""

    def __init__(self, ranks: Iterable[int]) -> None:
        named = list(ranks)
        if not named or len(set(named)) < len(named) or any(type(r) is not int or r < 0 for r in named):
            raise ConfigError(f"ProcessSet({named}): give ranks from 0 on, each once")
        self._ranks = tuple(sorted(named))
        self.process_set_id: int | None = None
        """None: not added."""

    @property
    def ranks(self) -> list[int] | None:
        """Horovod's ranks in ascending order; None for the set of all before `hvd.init()`."""
        return list(self._ranks)

    def included(self) -> bool:
        """Whether this process is in it."""
        return horovod_world().place.rank in (self.ranks or ())

    def rank(self) -> int:
        """This process's number in it. Raises ConfigError in one that is not."""
        if not self.included():
            raise ConfigError(f"rank {horovod_world().place.rank} is not in {self}")
        return (self.ranks or []).index(horovod_world().place.rank)

    def size(self) -> int:
        """How many processes are in it."""
        return len(self.ranks or ())

    def forget(self) -> None:
        """It is not added any more: the group is gone, as after `hvd.shutdown()`."""
        self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Everybody(ProcessSet):
    """All ranks that there are now."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        world = horovod_world()
        return list(range(world.place.size)) if world.is_initialized else None


global_process_set = _Everybody()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """From now on collectives can be of these ranks. All ranks of the job call it, and connect for it.

    Raises ConfigError, also in an elastic script.
    """
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world = horovod_world()
    known = world.process_sets
    if given is not global_process_set and given.process_set_id not in known:
        ranks = tuple(given.ranks or ())
        same = [number for number, others in known.items() if others == ranks]
        number = same[0] if same else max(known, default=0) + 1
        if not same:
            world.add_set(number, ranks)
        given.process_set_id = number
        world.hold(given)
    return given


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; whether it was there. That of all stays."""
    if process_set is global_process_set:
        return False
    number, process_set.process_set_id = process_set.process_set_id, None
    return number is not None and horovod_world().process_sets.pop(number, None) is not None


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """All sets, that of all included."""
    everybody = list(range(horovod_world().place.size))
    return {0: everybody, **{n: list(ranks) for n, ranks in horovod_world().process_sets.items()}}


def span_of(process_set: Any) -> Span:
    """The ranks of a collective, which can be used. Raises ConfigError for what is not a set that was added."""
    world = horovod_world()
    if process_set is None or process_set is global_process_set:
        return world.ready()
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set takes an hvd.ProcessSet, not a {type(process_set).__name__}")
    if process_set.process_set_id not in world.process_sets:
        raise ConfigError(f"{process_set} is not known: give it to hvd.add_process_set on all ranks before")
    return world.ready(tuple(process_set.ranks or ()))
