"""What stacks say about who waits and who works."""

from __future__ import annotations

import pytest

from stoker.job.health_stacks import (
    Standing,
    describe,
    format_stacks,
    format_world,
    is_awake,
    moved,
    name_ranks,
    standing,
)
from stoker.wire.health import Frame
from tests.unit.health_dumps import (
    BACKWARD,
    MODULE,
    PACKAGES,
    QUEUEING,
    REDUCING,
    STANDARD,
    STUCK,
    WAITING_FOR_ORDERS,
    stacks,
    still,
)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (REDUCING, Standing.WAITS),
        (BACKWARD, Standing.WAITS),
        (WAITING_FOR_ORDERS, Standing.WAITS),
        ((Frame("forward", f"{PACKAGES}/torch/nn/parallel/distributed.py", 3), *REDUCING), Standing.WAITS),
        (STUCK, Standing.WORKS),
        (QUEUEING, Standing.WORKS),
        (
            (Frame("write", f"{PACKAGES}/torch/distributed/checkpoint/filesystem.py", 3), MODULE),
            Standing.WORKS,
        ),
        ((Frame("synchronize", f"{PACKAGES}/torch/cuda/__init__.py", 3), MODULE), Standing.UNCLEAR),
        ((Frame("wait", f"{STANDARD}/threading.py", 3),), Standing.UNCLEAR),
        ((Frame("_find_and_load", "<frozen importlib._bootstrap>", 3), MODULE), Standing.WORKS),
        ((), Standing.UNCLEAR),
    ],
)
def test_where_a_thread_stands(frames: tuple[Frame, ...], expected: Standing) -> None:
    assert standing(still(*frames)) is expected


def test_a_backward_pass_that_runs_is_unclear() -> None:
    assert standing(still(*BACKWARD, active=True)) is Standing.UNCLEAR
    assert standing(still(*BACKWARD, active=None)) is Standing.UNCLEAR


def test_line_numbers_are_no_movement() -> None:
    other_line = tuple(Frame(f.function, f.file, f.line + 1) for f in STUCK)
    assert not moved([stacks(*STUCK), stacks(*other_line)])
    assert moved([stacks(*STUCK), stacks(*STUCK[1:])])
    assert not moved([stacks(*STUCK), stacks(unavailable="gone")])
    assert not is_awake(still(*STUCK))


def test_stacks_in_words() -> None:
    assert describe(still(*QUEUEING)) == "load (train.py:11)"
    assert describe([]) == "no stacks (its node gave none)"
    text = format_stacks(stacks(*STUCK))
    assert text.index("in train") < text.index("in load"), "innermost last"
    assert "thread MainThread (main, idle)" in text
    assert format_stacks(stacks(unavailable="why not")) == "process 1: no stacks: why not"
    together = format_world(
        {"a": still(*STUCK), "b": still(*REDUCING), "c": still(*STUCK)}, {"a": 0, "b": 1, "c": 2}
    )
    assert together.startswith("ranks 0, 2:\n")
    assert "\nrank 1:\n" in together
    assert name_ranks([5, 1, 2, 3, 9, 8]) == "ranks 1-3, 5, 8-9"
