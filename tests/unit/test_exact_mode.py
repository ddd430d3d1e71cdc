"""What a State does in exact mode, in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    live = session()
    live.virtual_ranks, live.micro_batch, live.begin_micro_batch, live.end_micro_batches = 0, None, None, None
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, record: int) -> torch.Tensor:
        return torch.full((2,), float(record))


class Decay:
    """A scheduler that is none of PyTorch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def script(**more: Any) -> tuple[State, Loader]:
    loader = Loader(Numbers(), global_batch_size=8, virtual_ranks=4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {name: make(optimizer) for name, make in more.items()}
    return State(model=model, optimizer=optimizer, seen=0, **made), loader


def chained(optimizer: torch.optim.Optimizer) -> Any:
    lr_scheduler = torch.optim.lr_scheduler
    return lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize("make", [Decay, chained])
def test_what_a_loop_changes_counts_once_a_global_batch(make: Any) -> None:
    state, loader = script(scheduler=make)
    committed = []

    @elastic
    def train(state: State) -> None:
        for x in loader:
            state.optimizer.zero_grad()
            state.ddp(x).mean().backward()
            state.optimizer.step()
            state.scheduler.step()
            for group in state.optimizer.param_groups:
                group["weight_decay"] += 1.0
            state.seen += 1
            committed.append(state.commit())

    train(state)
    assert committed == [False, False, False, True] * 3
    assert loader.global_batches == state.commits == state.seen == 3
    (group,) = state.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.1 * 0.9**3)
    assert group["weight_decay"] == 3.0


def test_a_loop_that_is_left_at_its_top_stands_where_every_rank_does() -> None:
    state, loader = script()

    @elastic
    def train(state: State) -> None:
        for x in loader:
            if state.commits == 1:
                break
            state.optimizer.zero_grad()
            state.ddp(x).mean().backward()
            state.optimizer.step()
            state.commit()
        assert loader.cursor == 16
        state.seen = 7
        assert state.commit()

    train(state)
    assert state.commits == 2


def test_a_validation_loop_between_a_batch_and_its_backward_changes_nothing() -> None:
    def weights(*, validates: bool) -> torch.Tensor:
        torch.manual_seed(0)
        state, loader = script()
        other = Loader(Numbers(), global_batch_size=3, keep_position=False)

        def train(state: State) -> None:
            for x in loader:
                if validates:
                    for y in other:
                        state.model(y)
                state.optimizer.zero_grad()
                state.ddp(x).square().mean().backward()
                state.optimizer.step()
                state.commit()

        state.entered_world()
        train(state)
        return state.model.weight.detach().clone()

    assert torch.equal(weights(validates=True), weights(validates=False))


def test_what_cannot_be_done_within_a_global_batch_is_refused() -> None:
    state, loader = script()

    @elastic
    def train(state: State) -> None:
        with pytest.raises(ConfigError, match="name this one, too"):
            state.wrap(torch.nn.Linear(2, 2))
        for x in loader:
            state.ddp(x).mean().backward()
            with pytest.raises(ConfigError, match=r"state.sync\(\) within a global batch"):
                state.sync()
            with pytest.raises(ConfigError, match="not within a global batch"):
                loader.retune(num_workers=1)
            break
        state.restore()
        for x in loader:
            state.ddp(x).mean().backward()
            state.optimizer.step()
            state.commit()

    train(state)
    assert state.commits == 3


def test_generators_are_the_same_on_every_rank_between_backward_and_commit() -> None:
    state, loader = script()
    drawn = []

    @elastic
    def train(state: State) -> None:
        for x in loader:
            loss = state.ddp(x).mean() * torch.rand(())
            loss.backward()
            if not state._exact._engine.is_between:  # type: ignore[union-attr]
                part = session().micro_batch
                assert part is not None
                drawn.append(torch.rand(()).item())
                torch.manual_seed(part.batch_seed)
                assert torch.rand(()).item() == drawn[-1]
            state.commit()

    train(state)
    assert len(set(drawn)) == 3
