"""Exact mode within one process: what a micro-batch begins with, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from stoker.data.order import share_of
from stoker.data.session import MicroBatch, Session
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.train.exact import numerics
from stoker.train.exact.engine import Engine
from stoker.train.exact.faces import ExactModule, ExactOptimizer, ExactScheduler

COUNT = 3


class Script:
    """A model in exact mode, and micro-batches as a loader in a world of one gives them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        )
        self.live = Session(virtual_ranks=COUNT)
        self.kept: list[str] = []
        self.engine = Engine(
            [self.model],
            self.live,
            keep=lambda: self.kept.append("keep"),
            put_back=lambda: self.kept.append("put back"),
        )

    def micro_batches(self, records: int) -> Iterator[torch.Tensor]:
        data = torch.arange(records * 4, dtype=torch.float32).view(records, 4).sin()
        for number in range(COUNT):
            share = share_of(number, COUNT, 0, records, records)
            micro_batch = MicroBatch(number, COUNT, number, 0, COUNT, number == 0, number == COUNT - 1, share)
            self.engine.begin(micro_batch)
            self.live.share = None  # that of some other loader, by the time of backward()
            yield data[share.start : share.stop]


def test_gradients_are_those_of_the_mean_over_all_records() -> None:
    script = Script()
    script.model[1].eval()
    for x in script.micro_batches(10):
        script.model(x).square().mean().backward()
    found = [parameter.grad for parameter in script.model.parameters()]
    alone = Script()
    alone.model[1].eval()
    data = torch.arange(40, dtype=torch.float32).view(10, 4).sin()
    alone.model(data).square().mean().backward()
    for mine, parameter in zip(found, alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_buffers_begin_anew_and_are_combined_by_records() -> None:
    script = Script()
    norm = script.model[1]
    before = norm.running_mean.clone()
    means, counts = [], []
    for x in script.micro_batches(10):
        assert torch.equal(norm.running_mean, before)
        assert norm.num_batches_tracked.item() == 0
        script.model(x).square().mean().backward()
        if len(means) < COUNT - 1:
            means.append(norm.running_mean.clone())
        counts.append(len(x))
    assert counts == [3, 3, 4]
    assert norm.num_batches_tracked.item() == 1
    last = 0.1 * script.model[0](torch.arange(24, 40).view(4, 4).float().sin()).mean(0)
    torch.testing.assert_close(norm.running_mean, means[0] * 0.3 + means[1] * 0.3 + last * 0.4)
    assert script.kept == ["keep", "put back", "put back"]


def test_a_part_without_records_is_left_out_and_a_layer_without_gradients_has_none() -> None:
    script = Script()
    script.model[1].eval()
    unused = torch.nn.Linear(2, 2)
    script.model.add_module("unused", torch.nn.Identity())
    script.model.unused.layer = unused
    for x in script.micro_batches(2):
        filler = x if len(x) else torch.full((1, 4), 1e9)
        script.model(filler).sum().backward()
    assert unused.weight.grad is None
    assert all(bool(p.grad.abs().max() < 1e6) for p in script.model[0].parameters() if p.grad is not None)


def test_the_next_global_batch_does_not_begin_with_gradients_of_the_last() -> None:
    script = Script()
    script.model[1].eval()
    found = []
    for _ in range(2):
        for x in script.micro_batches(10):
            script.model(x).square().mean().backward()
        found.append([p.grad.clone() for p in script.model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def test_frozen_parameters_may_change_between_global_batches() -> None:
    script = Script()
    for frozen in (False, True, False):
        script.model[0].requires_grad_(not frozen)
        for x in script.micro_batches(10):
            script.model(x).square().mean().backward()
        assert (script.model[0].weight.grad is None) == frozen


def test_an_optimizer_steps_once_and_clipping_sees_the_whole_gradient() -> None:
    script = Script()
    raw = torch.optim.SGD(script.model.parameters(), lr=0.1)
    optimizer = ExactOptimizer(raw, script.engine)
    steps = []
    raw.register_step_post_hook(lambda *_: steps.append(1))
    norms = []
    for x in script.micro_batches(10):
        optimizer.zero_grad()
        (script.model(x).sum() * 100).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)))
        optimizer.step()
    assert len(steps) == 1
    assert norms[:2] == [0.0, 0.0]
    assert norms[2] > 1.0
    optimizer.param_groups[0]["lr"] = 0.5
    assert raw.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match="without a closure"):
        optimizer.step(lambda: 0.0)


def test_two_backward_passes_are_refused() -> None:
    script = Script()
    x = next(script.micro_batches(10))
    script.model(x).sum().backward()
    again = script.model(x).sum()
    with pytest.raises(ConfigError, match="takes one backward"):
        again.backward()


def test_a_micro_batch_that_is_left_out_is_refused_and_a_loop_without_training_is_not() -> None:
    script = Script()
    for x in script.micro_batches(10):
        script.model(x)
    batches = script.micro_batches(10)
    script.model(next(batches)).sum().backward()
    next(batches)
    with pytest.raises(ConfigError, match="takes one backward"):
        next(batches)


def test_a_loop_that_is_left_within_a_global_batch_is_refused() -> None:
    script = Script()
    for x in script.micro_batches(10):
        script.model(x).sum().backward()
        break
    with pytest.raises(ConfigError, match="left within a global batch"):
        next(script.micro_batches(10))
    script.engine.forget()
    next(script.micro_batches(10))


def test_a_loop_that_is_left_at_its_top_leaves_nothing_behind() -> None:
    script = Script()
    next(script.micro_batches(10))
    part = script.engine.micro_batch
    assert part is not None
    assert script.engine.is_between
    script.engine.left(part)
    assert not script.engine.is_between
    for x in script.micro_batches(10):
        script.model(x).sum().backward()
    part = script.engine.micro_batch
    assert part is not None
    script.engine.left(part)
    assert not script.engine.is_between


def test_a_loop_that_is_left_after_backward_is_told_at_the_next_step() -> None:
    script = Script()
    script.model(next(script.micro_batches(10))).sum().backward()
    part = script.engine.micro_batch
    assert part is not None
    script.engine.left(part)
    optimizer = ExactOptimizer(torch.optim.SGD(script.model.parameters(), lr=0.1), script.engine)
    with pytest.raises(ConfigError, match="left within a global batch"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_laid_out_as_parameters_are(fused: bool) -> None:
    def train(engine: Engine | None, model: torch.nn.Module) -> torch.Tensor:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        x = torch.arange(2 * 3 * 5 * 5).view(2, 3, 5, 5).float().sin()
        if engine is not None:
            share = share_of(0, 1, 0, 2, 2)
            engine.begin(MicroBatch(0, 1, 0, 0, 1, is_first=True, is_last=True, share=share))
        model(x).square().mean().backward()
        optimizer.step()
        return model.weight.detach().contiguous()  # type: ignore[union-attr,operator]

    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    alone = copy.deepcopy(model)
    live = Session(virtual_ranks=1)
    engine = Engine([model], live, keep=lambda: None, put_back=lambda: None)
    torch.testing.assert_close(train(engine, model), train(None, alone))


def test_buffers_that_nobody_changes_keep_their_bits() -> None:
    script = Script()
    constants = torch.rand(1000)
    script.model.register_buffer("constants", constants.clone())
    script.model.register_buffer("expanded", torch.ones(1).expand(5))
    script.model.register_buffer("cache", torch.ones(1), persistent=False)
    for number, x in enumerate(script.micro_batches(10)):
        script.model.cache = torch.ones(number + 2)
        script.model(x).sum().backward()
    assert torch.equal(script.model.constants, constants)  # type: ignore[arg-type]
    assert torch.equal(script.model.expanded, torch.ones(5))  # type: ignore[arg-type]


def test_a_buffer_that_grows_is_refused_within_a_global_batch_and_taken_between_two() -> None:
    script = Script()
    script.model.register_buffer("seen", torch.ones(1))
    for size in (1, 4):
        script.model.seen = torch.ones(size)
        for x in script.micro_batches(10):
            script.model(x).sum().backward()
    batches = script.micro_batches(10)
    script.model(next(batches)).sum().backward()
    loss = script.model(next(batches)).sum()
    script.model.seen = torch.ones(9)
    with pytest.raises(ConfigError, match="persistent=False"):
        loss.backward()


def test_ranks_that_wait_for_each_other_have_come_equally_far() -> None:
    script = Script()
    for x in script.micro_batches(10):
        script.live.progress += 1  # as a loader counts
        script.model(x).sum().backward()
    assert script.live.progress == 2 * COUNT
    other = Engine([script.model], Session(virtual_ranks=COUNT), keep=lambda: None, put_back=lambda: None)
    assert other._live.progress == 0


def test_a_schedulers_attributes_are_its_own() -> None:
    script = Script()
    raw = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(script.model.parameters(), lr=0.1), 1, 0.9)
    face = ExactScheduler(raw, script.engine)
    face.gamma = 0.5
    assert raw.gamma == 0.5


def test_sparse_gradients_are_refused() -> None:
    live = Session(virtual_ranks=1)
    model = torch.nn.Embedding(5, 2, sparse=True)
    engine = Engine([model], live, keep=lambda: None, put_back=lambda: None)
    share = share_of(0, 1, 0, 2, 2)
    engine.begin(MicroBatch(0, 1, 0, 0, 1, is_first=True, is_last=True, share=share))
    with pytest.raises(ConfigError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_what_cannot_be_exact_is_refused_with_the_reason() -> None:
    plain = torch.nn.Linear(2, 2)
    numerics.refuse([plain], [object()], auto_tune=False)
    with pytest.raises(ConfigError, match="SyncBatchNorm takes its statistics over the world"):
        numerics.refuse([torch.nn.Sequential(torch.nn.SyncBatchNorm(3))], [], auto_tune=False)
    with pytest.raises(ConfigError, match="GradScaler"):
        numerics.refuse([plain], [torch.amp.GradScaler("cpu")], auto_tune=False)
    with pytest.raises(ConfigError, match="--auto-tune"):
        numerics.refuse([plain], [], auto_tune=True)
    with pytest.raises(ConfigError, match="no_sync"):
        ExactModule(plain).no_sync()


def test_machines_that_compute_otherwise_are_refused_as_peers(caplog: pytest.LogCaptureFixture) -> None:
    mine = numerics.signature(torch.device("cpu"))
    numerics.check_same(mine, mine, is_peer=True)
    theirs = {**mine, "cpu": "OTHER"}
    with pytest.raises(EnvironmentProblem, match="cpu 'OTHER' there"):
        numerics.check_same(theirs, mine, is_peer=True)
    numerics.check_same(theirs, mine, is_peer=False)
    assert "the checkpoint was made elsewhere" in caplog.text


def test_the_loss_of_a_micro_batch_is_the_users_own() -> None:
    script = Script()
    for x in script.micro_batches(10):
        loss = F.mse_loss(script.model(x), torch.zeros(len(x), 1))
        loss.backward()
        assert loss.requires_grad
