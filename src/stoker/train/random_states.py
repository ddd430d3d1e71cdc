"""The random generators of one process, kept aside at every commit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from stoker.train.accelerator import device_rng_states, restore_rng_states
from stoker.train.numpy_random import NumpyRandomCopy


class RandomStates:
    """Of Python, NumPy and PyTorch, on the host and on this worker's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy = NumpyRandomCopy()
        self._kept: tuple[Any, Any, torch.Tensor, list[torch.Tensor]] | None = None

    def keep(self) -> None:
        """Remember them as they are."""
        self._kept = (
            random.getstate(),
            self._numpy.renew(),
            torch.get_rng_state(),
            device_rng_states(self._device),
        )

    def put_back(self) -> None:
        """Make them what they were at the last `keep`."""
        if self._kept is None:
            return
        own, arrays, host, device = self._kept
        random.setstate(own)
        np.random.set_state(arrays)
        torch.set_rng_state(host)
        restore_rng_states(self._device, device)
