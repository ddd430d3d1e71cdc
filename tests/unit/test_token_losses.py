"""Which models' losses depend on the number of tokens that Trainer tells them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from stoker.compat.transformers.token_losses import heeds_count

INPUTS = {"x": torch.ones(4, 3), "labels": torch.tensor([0, 1, 1, 0])}


class Model(torch.nn.Module):
    def __init__(self, *, heeds: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
        )
        self._heeds = heeds

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        total = F.cross_entropy(self.layers(x), labels, reduction="sum")
        return {"loss": total / (num_items_in_batch if self._heeds else len(labels))}


@pytest.mark.parametrize("heeds", [True, False])
def test_it_is_seen_and_nothing_is_changed(heeds: bool) -> None:
    torch.manual_seed(1)
    model = Model(heeds=heeds)
    model.layers[2].eval()  # the script's own choice
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert heeds_count(model, INPUTS, torch.tensor(12)) is heeds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [layer.training for layer in model.layers] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_loss_of_nothing_says_nothing() -> None:
    inputs = {**INPUTS, "labels": torch.full((4,), -100)}
    assert heeds_count(Model(heeds=True), inputs, torch.tensor(12)) is None
