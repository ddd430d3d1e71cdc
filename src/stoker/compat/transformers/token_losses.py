"""Whether a model's loss is a mean over the tokens of the whole global batch, of which Trainer tells it the number."""

from __future__ import annotations

from typing import Any

import torch

from stoker.train.state_modes import Modes


def heeds_count(model: torch.nn.Module, inputs: dict[str, Any], count: Any) -> bool | None:
    """Whether the loss depends on `num_items_in_batch`; None: it cannot be seen on these inputs.

    Trainer takes this for granted of every model that takes any keyword, and multiplies its loss by the number of
    processes. Many such models, those for classification among them, mean their own records all the same.
    """
    modes = Modes([model])
    device = next(
        (one.device for one in inputs.values() if isinstance(one, torch.Tensor)), torch.device("cpu")
    )
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            once, twice = (
                _loss_of(model(**{**inputs, "num_items_in_batch": number})) for number in (count, 2 * count)
            )
    finally:
        modes.put_back()
    if once is None or twice is None or not torch.isfinite(once) or not once:
        return None
    return not torch.isclose(once, twice, rtol=1e-3, atol=0.0).item()


def _loss_of(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    return loss.float().mean() if isinstance(loss, torch.Tensor) else None
