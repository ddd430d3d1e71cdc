"""Stacks as workers show them, for tests."""

from __future__ import annotations

from stoker.job.health_hangs import SAMPLES
from stoker.wire.health import Frame, Stacks, ThreadStack

PACKAGES = "/venv/lib/python3.11/site-packages"
STANDARD = "/usr/lib/python3.11"
SCRIPT = "/home/me/train.py"
C10D = f"{PACKAGES}/torch/distributed/distributed_c10d.py"

MODULE = Frame("<module>", SCRIPT, 90)
REDUCING = (Frame("all_reduce", C10D, 3252), Frame("train", SCRIPT, 20), MODULE)
BACKWARD = (
    Frame("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py", 979),
    Frame("train", SCRIPT, 22),
    MODULE,
)
WAITING_FOR_ORDERS = (
    Frame("Condition.wait", f"{STANDARD}/threading.py", 320),
    Frame("_wait", f"{PACKAGES}/stoker/train/runtime.py", 200),
    MODULE,
)
STUCK = (Frame("load", SCRIPT, 11), Frame("train", SCRIPT, 19), MODULE)
EVALUATING = (Frame("evaluate", SCRIPT, 40), Frame("train", SCRIPT, 25), MODULE)
QUEUEING = (Frame("Queue.get", f"{STANDARD}/queue.py", 171), *STUCK)


def stacks(
    *frames: Frame, active: bool | None = False, state: str = "S", wakeups: int = 7, unavailable: str = ""
) -> Stacks:
    if unavailable:
        return Stacks(pid=1, unavailable=unavailable)
    main = ThreadStack("MainThread", frames, is_main=True, active=active)
    other = ThreadStack("stoker-orders", (Frame("recv", f"{STANDARD}/socket.py", 1),))
    return Stacks(pid=1, source="py-spy", threads=(other, main), state=state, wakeups=wakeups)


def still(*frames: Frame, **options: object) -> list[Stacks]:
    return [stacks(*frames, **options) for _ in range(SAMPLES)]  # type: ignore[arg-type]


MOVING = [
    stacks(*EVALUATING, active=True),
    stacks(Frame("forward", SCRIPT, 5), *EVALUATING),
    stacks(*EVALUATING),
]
SPINNING = still(*STUCK, active=True, state="R")
