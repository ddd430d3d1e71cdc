"""Runs of one worker that take snapshots, for tests of `stoker.Checkpointer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.train.elastic import elastic
from stoker.train.runtime import runtime
from stoker.train.state import State
from tests.unit.snapshot_helpers import newest_in_memory

WIDE = 40_000
"""Parameters of so many elements are copied while the next step runs."""


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, record: int) -> int:
        return record


_LAST: list[object] = []
"""The group before, until there is another one."""


def begin_anew() -> None:
    """As another process would."""
    if torch.distributed.is_initialized():
        # Not gone with a wrapper that somebody still has: that holds Python's lock then, for which a thread of the
        # group may be waiting.
        _LAST[:] = [torch.distributed.group.WORLD]
        torch.distributed.destroy_process_group()
    runtime.cache_clear()
    session.cache_clear()


def make(seed: int = 0, **more: Any) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, WIDE), torch.nn.BatchNorm1d(WIDE))
    return State(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), epoch=0, **more
    )


def step(state: State) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(4, 2)).sum().backward()
    state.optimizer.step()
    state.commit()


def finish(state: State) -> None:
    """All snapshots that were begun are done."""
    checkpointer = state._runtime.steps._checkpointer
    assert checkpointer is not None
    assert checkpointer.slots is not None
    checkpointer.slots.finish()


def newest(folder: Path) -> int | None:
    image = newest_in_memory(folder, "run-1")
    return image.commits if image is not None else None


def train_until(state: State, loader: Loader, stop: int) -> list[int]:
    """Commits until `stop`; which records that took."""
    seen: list[int] = []

    @elastic
    def train(state: State) -> None:
        while state.epoch < 2:
            for batch in loader:
                seen.extend(batch.tolist())
                state.ddp(torch.randn(4, 2)).sum().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.commit()
                finish(state)
                if state.commits == stop:
                    return
            state.epoch += 1

    train(state)
    return seen
