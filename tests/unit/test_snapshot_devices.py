"""Snapshots of what lies on an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.memory import MemorySlots
from tests.unit.snapshot_helpers import RUN, newest_in_memory, same

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_the_device_copies_beside_the_next_step_and_the_optimizer_waits_for_it(tmp_path: Path) -> None:
    """Buffers change at once, parameters after `settle`; each snapshot is what was there at its commit."""
    slots = MemorySlots(tmp_path, RUN, 0)
    parameters = [torch.randn(4_000_000, device="cuda") for _ in range(20)]
    buffers = [torch.randn(1_000_000, device="cuda") for _ in range(5)]
    state = {"modules": {"model": {"parameters": parameters, "buffers": buffers}}}
    stable = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    slots.prepare(image_of(0, state))
    slots.finish()
    square = torch.randn(2000, 2000, device="cuda")
    for commits in range(1, 20):
        torch.cuda.synchronize()
        expected = [tensor.cpu() for tensor in [*parameters, *buffers]]
        assert slots.take(image_of(commits, state), stable)
        for buffer in buffers:
            buffer.add_(1)
        for _ in range(5):
            square = torch.nn.functional.normalize(square @ square)
        slots.settle()
        torch._foreach_add_(parameters, 1.0)
        slots.finish()
        image = newest_in_memory(tmp_path, RUN)
        assert image is not None
        assert image.commits == commits, slots.problem
        assert same([piece.tensor for piece in image.pieces], expected)
    assert slots.overlaps
    slots.close()


@needs_cuda
def test_a_change_that_is_not_an_optimizers_makes_the_snapshot_of_a_device_void(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    parameter = torch.randn(50_000_000, device="cuda")
    state = {"modules": {"model": {"w": parameter}}}
    assert slots.take(image_of(1, state), {parameter.untyped_storage().data_ptr()})
    parameter.add_(1)
    slots.settle()
    slots.finish()
    assert slots.void == 1
    assert newest_in_memory(tmp_path, RUN) is None
    slots.close()


@pytest.mark.skipif(not hasattr(torch, "mps") or not torch.backends.mps.is_available(), reason="needs MPS")
def test_other_devices_are_copied_at_the_commit(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, RUN, 0)
    state = {"modules": {"model": {"w": torch.ones(100_000, device="mps")}}}
    assert slots.take(image_of(1, state), set())
    slots.finish()
    image = newest_in_memory(tmp_path, RUN)
    assert image is not None
    assert torch.equal(image.pieces[0].tensor, torch.ones(100_000))
