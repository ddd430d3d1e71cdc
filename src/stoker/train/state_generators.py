"""Random generators of a script's own, as a State holds them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stoker.train.random_states import from_plain, plain, python_from_plain, python_plain

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def with_generators(items: Mapping[str, Any]) -> dict[str, Any]:
    """`items` with adapters in place of generators of torch, NumPy and Python."""
    return {k: HeldGenerator(v) if isinstance(v, GENERATORS) else v for k, v in items.items()}


class HeldGenerator:
    """One generator. As with all that a State holds, a worker that joins goes on with a copy of the source's."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state_dict(self) -> dict[str, Any]:
        given = self.given
        if isinstance(given, torch.Generator):
            return {"torch": given.get_state()}
        if isinstance(given, np.random.Generator):
            return {"numpy": plain(given.bit_generator.state)}
        if isinstance(given, np.random.RandomState):
            return {"legacy": plain(given.get_state(legacy=False))}
        return {"python": python_plain(given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises KeyError, ValueError, TypeError, RuntimeError where it is another kind's."""
        given = self.given
        if isinstance(given, torch.Generator):
            given.set_state(state["torch"].cpu())
        elif isinstance(given, np.random.Generator):
            given.bit_generator.state = from_plain(state["numpy"])
        elif isinstance(given, np.random.RandomState):
            given.set_state(from_plain(state["legacy"]))
        else:
            given.setstate(python_from_plain(state["python"]))
