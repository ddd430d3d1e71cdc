"""The worker's device: names, backends, memory and errors, on the CPU and on a kind that a plug-in brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.train.accelerator import (
    backend_of,
    choose_device,
    ddp_device_ids,
    device_rng_states,
    empty_cache,
    is_out_of_memory,
    memory_in_use_bytes,
    memory_limit_bytes,
    peak_memory_bytes,
    reset_peak_memory,
    restore_rng_states,
    set_device,
    synchronize,
)

CPU = torch.device("cpu")
MIB = 1 << 20
without_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu", 3) == CPU
    assert backend_of(CPU) == "gloo"
    assert ddp_device_ids(CPU) is None
    assert ddp_device_ids(torch.device("cuda", 2)) == [2]
    assert ddp_device_ids(torch.device("mps", 0)) is None


@without_gpu
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert choose_device("auto", 1) == CPU


@without_gpu
@pytest.mark.parametrize(
    ("name", "kind", "complaint"),
    [
        ("cuda", EnvironmentProblem, "sees no cuda device"),
        ("xpu", EnvironmentProblem, "sees no xpu device"),
        ("npu", ConfigError, "has no such device .it has no accelerator"),
        ("hpu", ConfigError, "has no such device"),
        ("meta", ConfigError, "has no such device"),
        ("cuda:1", ConfigError, "without a number"),
        ("CUDA", ConfigError, "without a number"),
        ("", ConfigError, "--accelerator ''"),
    ],
)
def test_a_name_that_cannot_be_says_what_can(name: str, kind: type[Exception], complaint: str) -> None:
    with pytest.raises(kind, match=complaint):
        choose_device(name)


@pytest.mark.parametrize("kind", ["meta", "hpu"])
def test_a_device_without_a_backend_is_refused(kind: str) -> None:
    import torch.testing._internal.distributed.fake_pg

    with pytest.raises(ConfigError, match=f"no collective backend for {kind} .*cpu: gloo"):
        backend_of(torch.device(kind))


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_backend_that_this_build_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="built without nccl"):
        backend_of(torch.device("cuda"))


def test_the_cpu_needs_nothing_of_what_devices_need() -> None:
    set_device(CPU)
    synchronize(CPU)
    empty_cache(CPU)
    assert device_rng_states(CPU) == []
    restore_rng_states(CPU, [])


def test_the_peak_of_memory_is_seen_and_can_be_counted_anew() -> None:
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 * MIB // 4)
    held = memory_in_use_bytes(CPU)
    del block
    assert peak_memory_bytes(CPU) >= before + 48 * MIB
    assert held >= 64 * MIB
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < held + 16 * MIB
    assert peak_memory_bytes(CPU) < memory_limit_bytes(CPU)


def test_running_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


PLUG_IN = """
import types, torch, torch.distributed as dist
module = types.ModuleType("torch.toy")
module.is_available = lambda: True
module.device_count = lambda: 2
module.chosen = []
module.set_device = module.chosen.append
module.get_rng_state_all = lambda: [torch.zeros(1), torch.ones(1)]
module.put = []
module.set_rng_state_all = module.put.extend
module.max_memory_allocated = lambda: 7
module.mem_get_info = lambda: (1, 9)
torch.utils.rename_privateuse1_backend("toy")
torch._register_device_module("toy", module)
dist.Backend.register_backend("toyccl", lambda *a: None, devices=["toy"])
from stoker.train.accelerator import *
device = choose_device("toy", local_rank=3)
assert str(device) == "toy:1", device
assert module.chosen == [1]
assert backend_of(device) == "toyccl", backend_of(device)
assert ddp_device_ids(device) == [1]
restore_rng_states(device, device_rng_states(device))
assert len(module.put) == 2
assert (peak_memory_bytes(device), memory_limit_bytes(device), memory_in_use_bytes(device)) == (7, 9, 0)
synchronize(device)
print("done")
"""


@pytest.mark.real
def test_a_kind_that_a_plug_in_brings_needs_no_line_here(tmp_path: Path) -> None:
    program = tmp_path / "plug_in.py"
    program.write_text(PLUG_IN)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["done"], done.stderr
