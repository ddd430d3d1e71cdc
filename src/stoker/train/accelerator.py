"""The device that a worker trains on, whatever its make: all that the rest of `train` needs to know of it.

Devices are reached through torch.accelerator and the module that torch registers for each kind (`torch.cuda`,
`torch.xpu`, `torch.npu`, …), so that a new kind needs no line here.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stoker.errors import ConfigError, EnvironmentProblem

AUTO, CPU = "auto", "cpu"
_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
PRETENDED = "fake"
"""A backend that exchanges nothing: torch's compiler, once imported, registers it for devices that have no other."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "OutOfMemory", "OUT_OF_MEMORY")
"""How allocators say so that raise a plain RuntimeError: the CPU's, and those of some plug-ins."""


def choose_device(name: str = AUTO, local_rank: int = 0) -> torch.device:
    """The device of a worker, and make it the current one.

    `auto`: this PyTorch's accelerator where one is visible, else the CPU; otherwise a kind of device, as torch names
    it: `cuda` (ROCm too), `xpu`, `mps`, `npu`, `hpu`. Workers of a node take its devices in turn by `local_rank`.

    Raises ConfigError for a name that this PyTorch does not know, EnvironmentProblem when no such device is visible.
    """
    if name == CPU:
        return torch.device(CPU)
    kind = _accelerator() if name == AUTO else _known(name)
    if kind is None:
        return torch.device(CPU)
    count = _count(kind)
    if count == 0 and name == AUTO:
        return torch.device(CPU)
    if count == 0:
        raise EnvironmentProblem(
            f"--accelerator {name}: PyTorch {torch.__version__} sees no {name} device: look at its driver and its "
            "*_VISIBLE_DEVICES, or give --accelerator cpu"
        )
    device = torch.device(kind, local_rank % count)
    set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """The collective backend for a device, as torch registers it: gloo, nccl, xccl, hccl, …

    Raises ConfigError when there is none.
    """
    table = {
        kind: name for kind, name in dist.Backend.default_device_backend_map.items() if name != PRETENDED
    }
    backend = table.get(device.type)
    if backend is None:
        known = ", ".join(f"{kind}: {name}" for kind, name in table.items())
        raise ConfigError(
            f"PyTorch {torch.__version__} has no collective backend for {device.type} (it has {known}): import the "
            "package that brings one, or give --accelerator cpu"
        )
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f"this PyTorch ({torch.__version__}) is built without {backend}, the backend for {device.type}: install "
            "one that has it, or give --accelerator cpu"
        )
    return backend


def ddp_device_ids(device: torch.device) -> list[int] | None:
    """`device_ids` for torch's DistributedDataParallel."""
    return None if device.index is None or device.type in (CPU, "mps") else [device.index]


def set_device(device: torch.device) -> None:
    """Make a device the current one of this process."""
    select = getattr(_module(device), "set_device", None)
    if device.index is not None and select is not None:
        select(device.index)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    wait = getattr(_module(device), "synchronize", None)
    if device.type != CPU and wait is not None:
        wait()


def device_rng_states(device: torch.device) -> list[torch.Tensor]:
    """States of the random generators of all visible devices of this kind; none for the CPU, which has torch's own."""
    module = _module(device)
    if device.type == CPU:
        return []
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()] if hasattr(module, "get_rng_state") else []


def restore_rng_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Put back what `device_rng_states` gave."""
    module = _module(device)
    if not states:
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states[0])


# -- memory ----------------------------------------------------------------------------------------------------


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that was in use since `reset_peak_memory`; 0 where the device does not say."""
    if device.type == CPU:
        return _status_bytes("VmHWM")
    return _ask(device, "max_memory_allocated") or memory_in_use_bytes(device)


def memory_in_use_bytes(device: torch.device) -> int:
    """Memory in use now by this process; 0 where the device does not say."""
    if device.type == CPU:
        return _status_bytes("VmRSS")
    return _ask(device, "memory_allocated") or _ask(device, "current_allocated_memory")


def reset_peak_memory(device: torch.device) -> None:
    """Count `peak_memory_bytes` from now on. Does nothing where the device cannot."""
    if device.type == CPU:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return
    reset = getattr(_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset()


def memory_limit_bytes(device: torch.device) -> int:
    """All the memory that there is: of the device, or of the machine or container for the CPU; 0: not known.

    Workers that share it must divide it among themselves.
    """
    if device.type == CPU:
        return _machine_memory_bytes()
    info = getattr(_module(device), "mem_get_info", None)
    if info is not None:
        _, total = info()
        return int(total)
    return _ask(device, "recommended_max_memory")


def empty_cache(device: torch.device) -> None:
    """Give back what the device's allocator holds for later."""
    empty = getattr(_module(device), "empty_cache", None)
    if device.type != CPU and empty is not None:
        empty()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of the device or the host, is used up."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


# -- helpers ---------------------------------------------------------------------------------------------------


def _accelerator() -> str | None:
    """The kind of accelerator that this PyTorch is built for; there is one at most."""
    if not hasattr(torch, "accelerator"):  # before PyTorch 2.6
        return "cuda" if torch.cuda.is_available() else None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else None


def _known(name: str) -> str:
    """A kind of device by its name. Raises ConfigError."""
    if not _NAME.match(name):
        raise ConfigError(
            f"--accelerator {name!r}: give auto, cpu or a kind of device such as cuda, xpu, mps, npu, hpu, without a "
            "number: which one of them a worker takes follows from its local rank"
        )
    try:
        kind = torch.device(name).type
        torch.get_device_module(kind)
    except RuntimeError:
        has = _accelerator() or "no accelerator"
        raise ConfigError(
            f"--accelerator {name}: this PyTorch ({torch.__version__}) has no such device (it has {has}): install the "
            "build or plug-in for it, or give auto or cpu"
        ) from None
    return kind


def _count(kind: str) -> int:
    module = torch.get_device_module(kind)
    is_available = getattr(module, "is_available", None)
    return int(module.device_count()) if is_available is not None and is_available() else 0


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _ask(device: torch.device, function: str) -> int:
    known = getattr(_module(device), function, None)
    return int(known()) if known is not None else 0


def _status_bytes(field: str) -> int:
    """A memory figure of this process as the kernel has it; 0 where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def _machine_memory_bytes() -> int:
    """The machine's memory, or the least limit of the control groups that this process is in."""
    limits = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/")
                limits += [n for n in map(_limit_in, [folder, *folder.parents]) if n]
    return min(limits, default=0)


def _limit_in(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "memory.max").read_text())
    return 0
