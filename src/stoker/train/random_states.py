"""The random generators of this process: kept aside at every commit, and as values that go into a checkpoint."""

from __future__ import annotations

import array
import contextlib
import random
from typing import Any

import numpy as np
import torch

from stoker.train.accelerator import device_rng_states, restore_rng_states
from stoker.train.numpy_random import NumpyRandomCopy

_ARRAY = "ndarray"


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


def random_states(rank: int, device: torch.device) -> dict[str, Any]:
    """All that `restore_random_states` needs; `rank`: whose they are."""
    return {
        "rank": rank,
        "python": python_plain(random),
        "numpy": plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "device": device_rng_states(device),
    }


def restore_random_states(states: Any, rank: int, device: torch.device) -> bool:
    """Go on where this rank was; False where the states are another's, or none: each rank keeps its own.

    A generator that does not fit this process's (another number of devices, another kind in NumPy) is left alone.
    """
    if not isinstance(states, dict) or states.get("rank") != rank:
        return False
    with contextlib.suppress(KeyError, ValueError, TypeError):
        random.setstate(python_from_plain(states["python"]))
    with contextlib.suppress(KeyError, ValueError, TypeError):
        np.random.set_state(from_plain(states["numpy"]))
    with contextlib.suppress(KeyError, RuntimeError, TypeError):
        torch.set_rng_state(states["torch"].cpu())
    held = states.get("device") or []
    if len(held) == len(device_rng_states(device)):
        with contextlib.suppress(RuntimeError, TypeError):
            restore_rng_states(device, [state.cpu() for state in held])
    return True


def python_plain(generator: Any) -> list[Any]:
    """The state of one of Python's generators, for `python_from_plain`."""
    version, words, gauss = generator.getstate()
    return [version, array.array("I", words).tobytes(), gauss]


def python_from_plain(state: Any) -> tuple[Any, ...]:
    """For `setstate`. Raises ValueError, TypeError."""
    version, words, gauss = state
    return version, tuple(array.array("I", words)), gauss


def plain(value: Any) -> Any:
    """With bytes in place of NumPy's arrays, however nested."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: [str(value.dtype), value.tobytes()]}
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    return value


def from_plain(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict) and set(value) == {_ARRAY}:
        name, raw = value[_ARRAY]
        return np.frombuffer(raw, dtype=name).copy()
    if isinstance(value, dict):
        return {key: from_plain(held) for key, held in value.items()}
    return value
