"""What auto-tune begins with: the loader it may change, how far it may go, where it tells what it does."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch

from stoker.data.session import Session
from stoker.train.accelerator import CPU, memory_limit_bytes
from stoker.train.tuner import Bounds, Decision, Setting, Tuner
from stoker.train.tuning import TunedLoader, Tuning

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class NoLoader:
    """Stands for the loader of a script that has none of Stoker's: there are no loader workers to tune."""

    num_workers = 0

    def retune(self, *, num_workers: int) -> None:
        """Does nothing."""


def start_tuning(live: Session, device: torch.device, bounds: Bounds) -> Tuning:
    """Tuning that begins with what the script asks for and tells its decisions on standard error."""
    loader = loader_to_tune(live)
    return Tuning(Tuner(Setting(loader.num_workers), bounds), loader, device, say=tell)


def loader_to_tune(live: Session) -> TunedLoader:
    """The loader that training reads: the first that shuffles, else the first that the script made."""
    loaders = [loader for loader in live.loaders() if isinstance(loader, TunedLoader)]
    shuffling = [loader for loader in loaders if getattr(loader, "shuffle", False)]
    return next(iter([*shuffling, *loaders]), NoLoader())


def bounds_of(device: torch.device, local_world_size: int) -> Bounds:
    """Each rank's part of its node: cores, and memory where the device is the node's own. A device has one rank."""
    memory_bytes = memory_limit_bytes(device)
    if device.type == CPU:
        memory_bytes //= local_world_size
    return Bounds(max_workers=max(1, cores() // local_world_size), memory_bytes=memory_bytes)


def cores() -> int:
    """Cores that this process may use, by its affinity and its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, _, period = CPU_QUOTA.read_text().partition(" ")
        return min(allowed, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return allowed


def tell(decision: Decision) -> None:
    """A line for people. Not by logging: what a script has set up for that might hide it."""
    sys.stderr.write(f"stoker: auto-tune: {decision.why}\n")
    sys.stderr.flush()
