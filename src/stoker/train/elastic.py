"""`@stoker.elastic`: run a training function through every change of the world."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from stoker.errors import ConfigError
from stoker.train.runtime import Runtime
from stoker.train.state import State

log = logging.getLogger("stoker.train")
P = ParamSpec("P")
R = TypeVar("R")


def elastic(function: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Make a training function survive deaths, joins and leaves of workers.

    The function's first argument is the `stoker.State`. It is called once the world is there; when the world
    changes, the step under way is undone, the group is rebuilt, and the function is called again with the state
    of the last commit. It returns when every worker's has.
    """

    @functools.wraps(function)
    def run(state: State, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise ConfigError(
                f"the first argument of an @stoker.elastic function is a stoker.State, not {type(state).__name__}"
            )
        owner = state._runtime
        if owner.core.phase != "starting":
            raise ConfigError(
                "a script runs one @stoker.elastic function, once: put the loop over epochs into it"
            )
        owner.load_checkpoint(state)
        owner.park(state)
        while True:
            owner.enter(state)
            outcome = _attempt(owner, functools.partial(function, state, *args, **kwargs))
            if outcome is not None:
                return outcome[0]
            owner.leave(state)

    return cast(Callable[Concatenate[State, P], R], run)


def _attempt(owner: Runtime, call: Callable[[], R]) -> tuple[R] | None:
    """One call in one world; None when that world is over."""
    try:
        result = call()
        owner.finish()
        return (result,)
    except BaseException as error:
        if not owner.is_broken_world(error):
            raise
        log.debug("leaving generation %d: %r", owner.session.generation, error)
        # The frames hold DDP and its pending work, and with them the sockets of the dead group.
        traceback.clear_frames(error.__traceback__)
        return None
