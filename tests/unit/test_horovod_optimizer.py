"""`hvd.DistributedOptimizer` between three real processes, against one that has the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stoker.compat.horovod.torch as hvd
from stoker.compat.horovod.reducer import BUCKET_BYTES
from stoker.errors import ConfigError
from tests.unit.horovod_peers import Peers

pytestmark = pytest.mark.real
SIZE, STEPS, BATCH = 3, 4, 12


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    some = Peers(SIZE)
    some.all(hvd.init)
    yield some
    some.close()


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 2, generator=generator)


def share(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(step)
    return x[hvd.rank() :: SIZE], y[hvd.rank() :: SIZE]


def make_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole_batch(scale: float = 1.0) -> torch.nn.Sequential:
    """What one process with all the data comes to."""
    model = make_model()
    optimizer = make_sgd(model)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * scale).backward()
        optimizer.step()
    return model


def assert_same(model: torch.nn.Module, expected: torch.nn.Module, atol: float = 1e-6) -> None:
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=atol), (one - other).abs().max()


def trained(**options: Any) -> torch.nn.Sequential:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), **options)
    for step in range(STEPS):
        x, y = share(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def check_training() -> None:
    assert_same(trained(), whole_batch())
    assert_same(trained(op=hvd.Sum), whole_batch(scale=SIZE))
    assert_same(trained(gradient_predivide_factor=2.0), whole_batch())
    halves = trained(compression=hvd.Compression.fp16)
    assert_same(halves, whole_batch(), atol=0.01)
    sums = hvd.allgather_object([p.sum().item() for p in halves.parameters()])
    assert sums[0] == sums[1] == sums[2]


def test_steps_are_those_of_the_whole_batch(peers: Peers) -> None:
    peers.all(check_training)


def check_passes() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=2)
    for step in range(STEPS):
        x, y = share(step)
        optimizer.zero_grad()
        for half in (slice(0, 2), slice(2, 4)):
            (F.mse_loss(model(x[half]), y[half]) / 2).backward()
        optimizer.step()
    assert_same(model, whole_batch())
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(ConfigError, match="more than backward_passes_per_step=2 times"):
        model(x).sum().backward()
    optimizer.synchronize()  # type: ignore[attr-defined]
    optimizer.set_backward_passes_per_step(1)  # type: ignore[attr-defined]
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_several_backward_passes(peers: Peers) -> None:
    peers.all(check_passes)


def check_clipping() -> None:
    expected, model = make_model(), make_model()
    alone, optimizer = make_sgd(expected), hvd.DistributedOptimizer(make_sgd(model), op=hvd.Sum)
    for step in range(STEPS):
        x, y = data(step)
        alone.zero_grad()
        (F.mse_loss(expected(x), y) * SIZE).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        alone.step()
        x, y = share(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.synchronize()  # type: ignore[attr-defined]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step % 2:
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        else:
            optimizer.step()  # Horovod would add the sums up once more
    assert_same(model, expected)


def test_synchronize_and_clip(peers: Peers) -> None:
    peers.all(check_clipping)


def check_closures() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model))
    for step in range(STEPS):
        x, y = share(step)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert isinstance(loss, torch.Tensor)
    assert_same(model, whole_batch())


def test_gradients_that_a_closure_makes_are_reduced(peers: Peers) -> None:
    """Horovod reduces before the closure is called, and steps with each rank's own."""
    peers.all(check_closures)


def check_left_out_step() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model))
    model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    optimizer.synchronize()  # type: ignore[attr-defined]
    optimizer.zero_grad()  # as a GradScaler that has found an infinite gradient: no step
    model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    optimizer.step()
    sums = hvd.allgather_object([p.sum().item() for p in model.parameters()])
    assert sums[0] == sums[1] == sums[2]


def test_a_step_that_was_left_out_after_synchronize(peers: Peers) -> None:
    peers.all(check_left_out_step)


class Branches(torch.nn.Module):
    """Each rank uses another part, one is used by none, and they are more than one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(SIZE + 1))
        self.exact = torch.nn.Linear(2, 1).double()
        self.wide = torch.nn.Linear(2, BUCKET_BYTES // 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            self.parts[hvd.rank()](x).sum() + self.exact(x.double()).sum().float() + self.wide(x).mean()
        )
        return result


def check_branches() -> None:
    model = Branches()
    before = copy.deepcopy(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=3.0))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).backward()
        optimizer.step()
    for rank in range(SIZE):
        moved = before[f"parts.{rank}.weight"] - model.state_dict()[f"parts.{rank}.weight"]
        assert torch.allclose(moved, torch.full((1, 2), 2.0)), "a third of it each time"
    assert torch.equal(before[f"parts.{SIZE}.weight"], model.state_dict()[f"parts.{SIZE}.weight"])
    assert torch.allclose(before["exact.bias"] - model.exact.bias, torch.tensor(6.0, dtype=torch.float64))


def test_parts_that_only_some_ranks_use(peers: Peers) -> None:
    peers.all(check_branches)


def check_guards() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"zero_grad\(\) came after loss\.backward"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # no gradients anywhere


def test_gradients_are_not_dropped_on_their_way(peers: Peers) -> None:
    peers.all(check_guards)


def check_schedulers() -> None:
    model = make_model()
    plain = make_sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            x, y = share(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    sums = hvd.allgather_object([p.sum().item() for p in model.parameters()])
    assert sums[0] == sums[1] == sums[2], (
        "a scheduler made before replaces step(): gradients are reduced still"
    )
    again = torch.optim.SGD(model.parameters(), lr=1.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(again.state_dict())
    optimizer.zero_grad()
    model(share(0)[0]).sum().backward()
    optimizer.step()


def test_schedulers_and_state_dicts(peers: Peers) -> None:
    peers.all(check_schedulers)


def check_later() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[:1].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model[2].parameters())})

    def step(number: int) -> list[list[float]]:
        x, y = share(number)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        sums: list[list[float]] = hvd.allgather_object([p.sum().item() for p in model.parameters()])
        return sums

    frozen = step(0)
    assert frozen[0] == frozen[1] == frozen[2]
    model[0].requires_grad_(True)
    for number in (1, 2):
        free = step(number)
        assert free[0] == free[1] == free[2], "what is released later is reduced, too"
    assert free[0][0] != frozen[0][0]


def test_parameters_that_come_later(peers: Peers) -> None:
    peers.all(check_later)


def check_join() -> int:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    for step in range(hvd.rank() + 1):
        x, y = share(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    expected = make_model()
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(SIZE):
        alone.zero_grad()
        x, y = data(step)
        loss = sum(F.mse_loss(expected(x[r::SIZE]), y[r::SIZE]) for r in range(step, SIZE))
        loss.backward()  # type: ignore[union-attr]
        alone.step()
    assert_same(model, expected)
    return last


def test_ranks_with_less_data_join(peers: Peers) -> None:
    assert peers.all(check_join) == [2, 2, 2]


def check_sparse() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=3.0), sparse_as_dense=True)
    table(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    assert table.weight.tolist() == [[-1.0, -1.0]] * 3 + [[0.0, 0.0]]
    another = torch.nn.Embedding(4, 2, sparse=True)
    hvd.DistributedOptimizer(torch.optim.SGD(another.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        another(torch.tensor([0])).sum().backward()


def test_sparse_gradients(peers: Peers) -> None:
    peers.all(check_sparse)


def check_broadcast_of_states() -> None:
    for root in (1, 0):
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
        for _ in range(hvd.rank()):  # rank 0's has no state
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        weights = [p.detach().clone() for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (root + 1))
        states = hvd.allgather_object([s["step"].item() for s in optimizer.state_dict()["state"].values()])
        assert states == [[1.0, 1.0] if root else []] * SIZE
        same = all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert same, "no step is made for it"
        hvd.broadcast_parameters(model.state_dict(), root_rank=2)
        sums = hvd.allgather(model.weight.detach().sum().reshape(1))
        assert len(set(sums.tolist())) == 1
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)


def test_states_of_optimizers_are_broadcast(peers: Peers) -> None:
    peers.all(check_broadcast_of_states)


def check_different_models() -> str:
    model = torch.nn.Linear(2, 2 + (hvd.rank() == 1))
    hvd.DistributedOptimizer(make_sgd(model))
    with pytest.raises(ConfigError, match="not in the same collective") as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_models_that_differ(peers: Peers) -> None:
    words = "rank 1 in gradients of 2 parameters with 9 elements"
    assert all(words in text for text in peers.all(check_different_models))


def check_refusals() -> None:
    model = make_model()
    parameters = list(model.named_parameters())
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (
            "more than once: 0.bias",
            lambda: distributed([*parameters, ("0.bias", torch.nn.Parameter(torch.ones(1)))]),
        ),
        ("does not name 1 of the optimizer's 4", lambda: distributed(parameters[1:])),
        ("pairs of name", lambda: distributed(list(model.parameters()))),  # type: ignore[arg-type]
        (
            r"Adasum is not there in Stoker: use op=hvd\.Average",
            lambda: distributed(parameters, op=hvd.Adasum),
        ),
        ("hvd.Average or hvd.Sum", lambda: distributed(parameters, op=hvd.Max)),
        ("is for op=hvd.Average", lambda: distributed(parameters, op=hvd.Sum, gradient_predivide_factor=2.0)),
        ("at least 1", lambda: distributed(parameters, backward_passes_per_step=0)),
        ("LBFGS", lambda: hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))),
        ("already", lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(make_sgd(model)))),
    ]

    def distributed(named: list[tuple[str, torch.nn.Parameter]], **options: Any) -> None:
        hvd.DistributedOptimizer(make_sgd(model), named, **options)

    for words, attempt in wrong:
        with pytest.raises(ConfigError, match=words):
            attempt()


def test_refusals(peers: Peers) -> None:
    peers.all(check_refusals)
