"""What bits depend on beside the computation itself, and what cannot be exact."""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Iterable
from typing import Any

import torch

from stoker.errors import ConfigError, EnvironmentProblem
from stoker.settings import have_cublas_repeat_itself
from stoker.train.dtensors import is_dtensor

log = logging.getLogger("stoker.train")


def fix(threads: int) -> None:
    """Compute the same way each time: so many threads for an operation, no algorithm whose result depends on timing.

    An operation that has no other raises RuntimeError, by PyTorch's own words.
    """
    torch.set_num_threads(threads)
    have_cublas_repeat_itself()
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - no attribute, says mypy
    torch.backends.cudnn.benchmark = False


def signature(device: torch.device) -> dict[str, Any]:
    """What must be the same wherever the same bits are to come out."""
    own = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()} {_processor()}".strip(),
        "device": device.type,
    }
    if device.type == "cuda":
        own["name"] = torch.cuda.get_device_name(device)
    return own


def _processor() -> str:
    """Its model: libraries choose their kernels by more than its capability."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return platform.processor()
    known = {name.strip(): value.strip() for name, _, value in found}
    return " ".join(
        known[name] for name in ("vendor_id", "cpu family", "model", "model name") if name in known
    )


def check_same(theirs: dict[str, Any], mine: dict[str, Any], *, is_peer: bool) -> None:
    """Raises EnvironmentProblem where a peer's bits would be others; of a checkpoint it is only said."""
    other = [
        f"{name} {theirs.get(name)!r} there, {mine[name]!r} here"
        for name in mine
        if theirs.get(name) != mine[name]
    ]
    if not other:
        return
    words = f"the same bits cannot come out of both: {'; '.join(other)}"
    if is_peer:
        raise EnvironmentProblem(
            f"this worker cannot take part in a run of exact mode, {words}: use nodes that are alike"
        )
    log.warning("the checkpoint was made elsewhere, %s; the run goes on from its state", words)


def refuse(modules: Iterable[torch.nn.Module], objects: Iterable[Any], *, auto_tune: bool) -> None:
    """Raises ConfigError for what cannot be exact, with the reason."""
    if auto_tune:
        raise ConfigError(
            "--auto-tune changes how steps are computed, exact mode forbids that: leave one out"
        )
    for module in modules:
        for part in module.modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                raise ConfigError(
                    "SyncBatchNorm takes its statistics over the world, whose size may change: with virtual_ranks each "
                    "micro-batch has its own, use BatchNorm"
                )
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            raise ConfigError("exact mode takes whole parameters on every rank, not sharded ones (FSDP)")
    for held in objects:
        if isinstance(held, torch.amp.GradScaler) and held.is_enabled():
            raise ConfigError(
                "a GradScaler looks at the gradients of each micro-batch by itself: in exact mode use bfloat16"
            )
