"""Horovod's states: what a commit keeps, a failure brings back, and a newcomer gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stoker.compat.horovod.exceptions import HostsUpdatedInterrupt
from stoker.compat.horovod.functions import broadcast_object
from stoker.compat.horovod.held import Held, hold
from stoker.errors import ConfigError
from stoker.train.runtime import runtime


class State:
    """What a training function works on. Subclasses say how it is saved, restored and synchronized.

    Horovod's own arguments `bcast_object` and `get_rank` are taken and not needed.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        runtime().connect()  # so that the job knows early that this script is elastic
        self._reset_callbacks: list[Callable[[], None]] = []
        self._point: Callable[..., bool] | None = None
        """Set while the function runs: tells the job of a step, and whether this worker is to leave its world."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these when the world has changed, before the state is synchronized: to scale a learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world has changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Horovod's notice. Nothing calls it here: the job names the step at which a world ends."""

    def commit(self) -> None:
        """Keep the state as it is now; the world may change here.

        Raises HostsUpdatedInterrupt, which leaves the function, with this very state.
        """
        if self._point is None:
            self.save()
        elif self._point(saves=True):
            raise HostsUpdatedInterrupt

    def check_host_updates(self) -> None:
        """The world may change here, and nothing is lost by that, though there was no commit.

        Raises HostsUpdatedInterrupt, which leaves the function, with this very state.
        """
        if self._point is not None and self._point(saves=False):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Bring back what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state rank 0's everywhere."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the world has changed, before the callbacks."""

    def unite(self) -> None:
        """In each new world, also where nothing was synchronized, on all ranks: what each holds a part of."""


class ObjectState(State):
    """Plain attributes: `ObjectState(epoch=0, batch=0)`."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__()
        for name in kwargs:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"{type(self).__name__} cannot hold {name!r}: the name is taken")
        self._names = sorted(kwargs)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        for name, value in broadcast_object(self._values()).items():
            setattr(self, name, value)
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


class TorchState(ObjectState):
    """Modules, optimizers, samplers, other objects with `state_dict()`, and plain values.

    All of them are copied to the host's memory at each commit and go back together. A module or optimizer may be
    assigned anew, and is saved by that: `state.model = other`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        held = {name: one for name, value in given.items() if (one := hold(value)) is not None}
        self._held: dict[str, Held] = held
        super().__init__(**{name: value for name, value in given.items() if name not in held})

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("_held", {})
        if name in held:
            return held[name].value
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get("_held", {})
        if name not in held:
            super().__setattr__(name, value)
            return
        another = hold(value)
        if type(another) is not type(held[name]):
            raise ConfigError(
                f"state.{name} is a {type(held[name].value).__name__}, not a {type(value).__name__}"
            )
        if value is not held[name].value:
            held[name].value = value
            held[name].save()  # what was saved of the other does not fit it

    def save(self) -> None:
        for one in self._held.values():
            one.save()
        super().save()

    def restore(self) -> None:
        for one in self._held.values():
            one.restore()
        super().restore()

    def sync(self) -> None:
        for one in self._held.values():
            one.sync()
        super().sync()  # saves all of it

    def unite(self) -> None:
        for one in self._held.values():
            one.unite()
