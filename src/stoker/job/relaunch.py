"""What to do about a worker that ended: a pure function of how it ended and what is left of the budget."""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple

from stoker.wire.job import WorkerExit

Action = Literal["done", "replace", "shrink", "stop"]


class Decision(NamedTuple):
    """What happens now, and why."""

    action: Action
    why: str


def describe_exit(ended: WorkerExit) -> str:
    """`was killed by SIGKILL`, `exited with code 3`."""
    if ended.signal is not None:
        try:
            name = signal.Signals(ended.signal).name
        except ValueError:
            name = f"signal {ended.signal}"
        return f"was killed by {name}"
    return f"exited with code {ended.code}"


def decide(ended: WorkerExit, *, elastic: bool, restarts_used: int, max_restarts: int | None) -> Decision:
    """Relaunch policy.

    | how it ended             | elastic script                          | other script                        |
    |--------------------------|-----------------------------------------|-------------------------------------|
    | exit code 0              | done                                    | done                                |
    | signal (killed, evicted) | replace while the budget lasts, else go | restart all while the budget lasts, |
    |                          | on without it                           | else stop                           |
    | other exit code          | stop: the script's own error would only | restart all while the budget lasts, |
    |                          | come again                              | else stop                           |

    The budget is `--max-restarts`; by default 3 for elastic scripts and 0 for others, as torchrun has it.
    """
    how = describe_exit(ended)
    if ended.code == 0:
        return Decision("done", "it finished")
    budget = max_restarts if max_restarts is not None else (3 if elastic else 0)
    left = restarts_used < budget
    if elastic and ended.signal is None:
        return Decision("stop", f"it {how}: an error of the script itself would come again")
    if left:
        return Decision("replace", f"it {how}; restart {restarts_used + 1} of {budget}")
    if elastic:
        return Decision("shrink", f"it {how} and all {budget} restarts are used: going on without it")
    return Decision("stop", f"it {how} and all {budget} restarts are used")
