"""`@stoker.elastic`: run a training function through every change of the world."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from stoker.errors import ConfigError
from stoker.train.attempts import attempts
from stoker.train.failures import with_causes
from stoker.train.runtime import Runtime
from stoker.train.sealed import Sealed
from stoker.train.state import State
from stoker.train.worlds import Meet

P = ParamSpec("P")
R = TypeVar("R")
WarmUp = Callable[[State], object]


@overload
def elastic(function: Callable[Concatenate[State, P], R], /) -> Callable[Concatenate[State, P], R]: ...


@overload
def elastic(
    *, warm_up: WarmUp | None = None
) -> Callable[[Callable[Concatenate[State, P], R]], Callable[Concatenate[State, P], R]]: ...


def elastic(
    function: Callable[..., R] | None = None, /, *, warm_up: WarmUp | None = None
) -> Callable[..., Any]:
    """Make a training function survive deaths, joins and leaves of workers.

    The function's first argument is the `stoker.State`. It is called once the world is there; when the world
    changes, the step under way is undone, the group is rebuilt, and the function is called again with the state
    of the last commit. It returns when every worker's has.

    `@stoker.elastic(warm_up=rehearse)`: each worker calls `rehearse(state)` before it takes part, so that code is
    compiled and memory allocated while the others, if there are any, still train. It may do what a step does, on
    made-up input and with `state.ddp` over this worker alone, but for stepping an optimizer or committing. All of it is
    undone.

    Raises ConfigError for a second such function, for another first argument, and for a warm-up that steps or commits.
    """
    if warm_up is not None and not callable(warm_up):
        raise ConfigError(
            f"@stoker.elastic(warm_up=…) takes a function of the state, not a {type(warm_up).__name__}: "
            "give it without calling it"
        )
    if function is None:
        return functools.partial(_make_elastic, warm_up=warm_up)
    return _make_elastic(function, warm_up=None)


def _make_elastic(function: Callable[..., R], *, warm_up: WarmUp | None) -> Callable[..., R]:
    @functools.wraps(function)
    def run(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise ConfigError(
                f"the first argument of an @stoker.elastic function is a stoker.State, not {type(state).__name__}"
            )
        owner = state._runtime
        check_is_first(owner, "@stoker.elastic")
        owner.steps.load_checkpoint(state)
        if warm_up is not None:
            owner.worlds.warm_up(state, warm_up)

        def call() -> R:
            state.entered_world()
            return function(state, *args, **kwargs)

        return run_through_worlds(owner, state, call)

    return run


def check_is_first(owner: Runtime, decorator: str) -> None:
    """Raises ConfigError where a function of this process has gone through its worlds already."""
    if owner.core.phase != "starting":
        raise ConfigError(f"a script runs one {decorator} function, once: put the loop over epochs into it")


def run_through_worlds(owner: Runtime, state: Sealed, call: Callable[[], R], meet: Meet | None = None) -> R:
    """Call this in one world after the other, until one call has come to its end everywhere; see `Worlds.enter`."""
    owner.worlds.park(state)
    while True:
        owner.worlds.enter(state, meet)
        outcome = _attempt(owner, state, call)
        if outcome is not None:
            return outcome[0]
        owner.worlds.leave(state)


def _attempt(owner: Runtime, state: Sealed, call: Callable[[], R]) -> tuple[R] | None:
    """One call in one world; None when that world is over."""
    attempt = attempts().begin()
    try:
        result = call()
        attempt.end(world_broke=False)
        owner.steps.tell_time_spent()
        owner.worlds.finish(state)
        return (result,)
    except BaseException as error:
        world_broke = owner.worlds.is_broken_world(error)
        attempt.end(world_broke=world_broke)
        if not world_broke:
            raise
        owner.worlds.note_broken(error, owner.session.generation)
        # The frames hold DDP and its pending work, and with them the sockets of the dead group.
        for one in with_causes(error):
            traceback.clear_frames(one.__traceback__)
        return None
