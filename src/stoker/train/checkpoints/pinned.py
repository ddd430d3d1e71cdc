"""Shared memory that a CUDA device copies into by itself."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import torch


class Pinned:
    """Registers mappings with the driver, each once. Where it refuses, copies are slower, no more."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._held: dict[int, mmap.mmap] = {}
        """By their addresses; they must not be unmapped before."""

    def pin(self, memory: mmap.mmap) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if address not in self._held:
            with contextlib.suppress(RuntimeError):
                if int(_runtime().cudaHostRegister(address, len(memory), 0)) == 0:
                    self._held[address] = memory

    def close(self) -> None:
        held, self._held = self._held, {}
        if os.getpid() == self._pid:
            for address in held:
                with contextlib.suppress(RuntimeError):
                    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
