"""`hvd.elastic`: a training function goes through every change of the world."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stoker.compat.horovod.basics import HorovodWorld, horovod_world
from stoker.compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from stoker.compat.horovod.sampler import ElasticSampler
from stoker.compat.horovod.state import ObjectState, State, TorchState
from stoker.errors import ConfigError
from stoker.train.elastic import check_is_first, run_through_worlds
from stoker.train.failures import is_device_lost
from stoker.train.member_link import WorldChanged
from stoker.train.runtime import Runtime, runtime
from stoker.wire.job import Member, WorldView

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a state survive deaths, joins and leaves of workers.

    In each world: the reset callbacks (not in the first), `state.sync()` if anybody has another state, and the function
    from its top. A failure brings back what was committed last. Raises ConfigError for a second such function and for
    another first argument.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise ConfigError(
                "the first argument of an @hvd.elastic.run function is an hvd.elastic.State, not "
                f"{type(state).__name__}"
            )
        owner, world = runtime(), horovod_world()
        owner.connect()
        check_is_first(owner, "@hvd.elastic.run")
        world.init()
        world.begin_elastic()
        through = _Through(state, owner, world)
        call = functools.partial(through.call, functools.partial(function, state, *args, **kwargs))
        try:
            return run_through_worlds(owner, through, call, through.meet)
        finally:
            state._point = None

    return wrapper


class _Through:
    """A Horovod state on its way through Stoker's worlds.

    What a worker says that it holds is the newest *saved* state: the count of commits goes back with it, so that two
    workers with equal counts hold the same, wherever each was interrupted.
    """

    def __init__(self, state: State, owner: Runtime, world: HorovodWorld) -> None:
        self._state, self._owner, self._world = state, owner, world
        self._saved_at = 0
        self._saves = False
        self._must_restore = False
        self._has_met = False
        state.save()

    # -- the worker's worlds ------------------------------------------------------------------------------

    def meet(self, world: WorldView, member: Member) -> None:
        """All members are here: make the state the same. Raises RuntimeError when a peer dies."""
        self._world.enter(world, member)
        self._must_restore = True
        if self._has_met:
            self._state.on_reset()
        if world.size == 1 or world.all_receive or world.receivers:
            self._state.sync()
            if not isinstance(self._state, ObjectState):
                self._state.save()
        else:
            self._state.save()  # what the callbacks have changed is not to be undone by the next failure
        self._state.unite()
        self._has_met = True
        self._saved_at = world.commits
        self._state._point = self.point

    def export_committed(self) -> dict[str, Any] | None:
        """Nothing: Horovod's scripts keep what they want to keep."""
        return None

    def call(self, function: Callable[[], Any]) -> Any:
        """The function, in one world."""
        try:
            return function()
        except (HorovodInternalError, HostsUpdatedInterrupt) as error:
            if is_device_lost(error) or self._owner.worlds.is_broken_world(error):
                raise
            raise WorldChanged from error  # a point, or the script itself, has said so

    def point(self, *, saves: bool) -> bool:
        """A step is done; whether the world must be left here, with the state as it is now, which then is saved."""
        self._saves = saves
        try:
            self._owner.steps.commit(self)
        except WorldChanged:
            if not saves:
                self._state.save()
            self._saved_at = self._owner.core.commits
            self._must_restore = False
            return True
        if saves:
            self._saved_at = self._owner.core.commits
        return False

    # -- what the runtime asks ----------------------------------------------------------------------------

    @property
    def stands_at_commit(self) -> bool:
        """Always, once it has been rolled back: parameters are copied as well."""
        return True

    def seal(self) -> None:
        if self._saves:
            self._saves = False
            self._state.save()

    def roll_back(self) -> None:
        if self._must_restore:
            self._state.restore()
        self._must_restore = False
        self._owner.core.commits = self._saved_at

    def export(self) -> dict[str, Any]:
        """Nothing: `meet` brings newcomers the state."""
        return {}

    def load(self, state: dict[str, Any], but: Collection[str] = ()) -> None:
        pass

    def doubt(self) -> None:
        pass

    def restore_random(self, state: dict[str, Any]) -> None:
        pass

    def stable_tensors(self) -> Iterable[torch.Tensor]:
        """None: no checkpoint is made of it."""
        return ()

    def forget_group(self) -> None:
        self._state._point = None
        self._world.forget()

    def rehearsal(self) -> AbstractContextManager[None]:
        raise ConfigError("a Horovod function has no warm-up")
