"""A snapshot's copy out of the training's own tensors, most of it while the next step runs.

Only an optimizer's step changes parameters and what optimizers keep, and it waits for the copy. All else is copied at
once. Whether a script has changed parameters meanwhile is seen by the versions that PyTorch counts for each tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch

from stoker.train.checkpoints.image import Piece
from stoker.train.checkpoints.layout import HEADER_BYTES, Place, piece_in

SMALL_BYTES = 64 * 1024
"""What is smaller is copied at once: that is as fast as to look after it."""
TINY_BYTES = 1024
"""On a device so is only what is smaller than this, such as a learning rate, which a scheduler may change."""
CPU, CUDA = "cpu", "cuda"


class _Move(NamedTuple):
    """A tensor, and where it goes to."""

    source: torch.Tensor
    place: Place


class Copy:
    """Into one slot's memory. `begin` and `settle` are for the training thread, `run` is for another."""

    def __init__(self, memory: mmap.mmap, pieces: Sequence[Piece], places: Sequence[Place]) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + HEADER_BYTES
        self._pieces, self._places = pieces, places
        self._later: list[_Move] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._event: Any = None
        """Of the device, when it has copied."""
        self._device: torch.device | None = None
        self._cloned: list[torch.Tensor] = []
        """Kept until the device has copied them."""
        self._guard = threading.Lock()
        self._is_settled = False
        self._copied = threading.Event()
        self.is_void = False
        """Something was changed while it was being copied."""

    def begin(self, stable: Container[int]) -> None:
        """Copy what may change at any time; `stable`: the storages of what only an optimizer's step changes."""
        on_cuda: list[_Move] = []
        for piece, place in zip(self._pieces, self._places, strict=True):
            tensor = piece.tensor
            if not place.size_bytes:
                continue
            is_stable = not tensor.is_inference() and tensor.untyped_storage().data_ptr() in stable
            if tensor.device.type == CUDA:
                is_stable = is_stable and place.size_bytes >= TINY_BYTES
                if not is_stable:
                    tensor = tensor.clone()
                    self._cloned.append(tensor)
                on_cuda.append(_Move(tensor, place))
            elif tensor.device.type == CPU and is_stable and place.size_bytes >= SMALL_BYTES:
                self._later.append(_Move(tensor, place))
            else:
                self._move(tensor, place)
                continue
            if is_stable:
                self._versions.append((tensor, tensor._version))
        if on_cuda:
            self._copy_aside(on_cuda)

    def run(self) -> None:
        """Copy the rest."""
        try:
            for tensor, place in self._later:
                self._move(tensor, place)
            if self._event is not None:
                self._event.synchronize()
            self.look()
        finally:
            self._copied.set()

    def settle(self) -> None:
        """The tensors are about to be changed: come back when that is no matter any more."""
        if self._is_settled:
            return
        if self._event is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(
                self._event
            )  # the device waits, not this thread
        else:
            self._copied.wait()
        self.look(settled=True)

    def look(self, *, settled: bool = False) -> bool:
        """Whether all is still as it was when the copy began; asked no more once it is settled."""
        with self._guard:
            if not self._is_settled and any(tensor._version != seen for tensor, seen in self._versions):
                self.is_void = True
            self._is_settled = self._is_settled or settled
            return not self.is_void

    def let_go(self) -> None:
        """Hold on to no tensor any more: it is done."""
        with self._guard:
            self._is_settled = True
            self._pieces, self._later, self._versions, self._cloned = (), [], [], []

    def _move(self, tensor: torch.Tensor, place: Place) -> None:
        if tensor.device.type == CPU and tensor.is_contiguous():
            # Without the GIL, and without threads beside those that compute.
            ctypes.memmove(self._address + place.position, tensor.data_ptr(), place.size_bytes)
        else:
            piece_in(self._memory, place).copy_(tensor)

    def _copy_aside(self, moves: Sequence[_Move]) -> None:
        """On a stream of its own, which the steps to come do not wait for."""
        device = self._device = moves[0].source.device
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for tensor, place in moves:
                piece_in(self._memory, place).copy_(tensor, non_blocking=True)
        self._event = aside.record_event()
