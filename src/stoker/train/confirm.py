"""Whether what a step's collectives have brought can be believed, on devices where nobody says so.

Gloo raises where a peer is gone. NCCL and its kin only queue kernels: an aborted one ends like any other, the host
hears nothing of it, and the gradients hold anything. An optimizer's step queued behind it would make that the state of
a worker which calls itself clean and, with the most commits, is the source of all others'. So before parameters change,
and before a commit counts, the host waits for the device and then asks whether the group has been broken off.

It costs what the host could have queued ahead. By reading PyTorch 2.13; it could not be run on such a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from stoker.train.accelerator import synchronize
from stoker.train.tuning import Exchange


class Breakable(Protocol):
    """What is asked of the world's process group."""

    @property
    def has_peers(self) -> bool: ...

    @property
    def is_broken(self) -> bool:
        """It has been broken off since it was opened; said before anything that was queued is ended."""
        ...


class Confirmation:
    """Of the collectives that this process has issued."""

    def __init__(self, group: Breakable, device: torch.device, wait: Callable[[], None]) -> None:
        """`wait` returns once the device has done all that the training thread has queued."""
        self._group = group
        self._device = device
        self._wait = wait
        self._confirmed: Sequence[tuple[str, int]] | None = None

    def begin(self) -> None:
        """A group has been opened, which counts its collectives from its beginning, as those before did."""
        self._confirmed = None

    def check(self) -> None:
        """Wait for what was issued. Raises RuntimeError (DistBackendError) where it cannot be believed."""
        if not self._group.has_peers:
            return
        issued = issued_collectives()
        self._wait()
        why = "the group was broken off" if self._group.is_broken else "; ".join(failed_groups(self._device))
        if why:
            raise dist.DistBackendError(f"what the collectives of this step have brought is void: {why}")
        self._confirmed = issued

    def check_news(self) -> None:
        """As `check`, where anything was issued since; a group that broke after all had arrived does no harm."""
        issued = issued_collectives()
        if issued is None or issued != self._confirmed:
            self.check()

    def before_optimizer(self, *_: Any) -> None:
        """A hook: an optimizer is about to change parameters, which is not undone."""
        self.check()


class ConfirmedExchange:
    """How ranks agree over a group whose collectives must be asked about."""

    def __init__(self, exchange: Exchange, check: Callable[[], None]) -> None:
        self._exchange = exchange
        self._check = check

    @property
    def rank(self) -> int:
        return self._exchange.rank

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        gathered = self._exchange.gather(values)
        self._check()
        return gathered

    def broadcast(self, values: Sequence[int]) -> list[int]:
        said = self._exchange.broadcast(values)
        self._check()
        return said


def issued_collectives() -> Sequence[tuple[str, int]] | None:
    """How many collectives each group of this process has been given; None where one does not count them.

    Sends and receives between two ranks are not among them.
    """
    groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    try:
        return [(name, group._get_sequence_number_for_group()) for group, name in groups]
    except RuntimeError:
        return None


def failed_groups(device: torch.device) -> list[str]:
    """Groups whose backend has met an error by itself, as NCCL's watchdog does, and which."""
    found = []
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # no such backend, or it does not say
            get_error = getattr(group._get_backend(device), "get_error", None)
            error = get_error().name if get_error is not None else "SUCCESS"
            if error != "SUCCESS":
                found.append(f"group {name} has met {error}")
    return found


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has done all that was queued for it in the current stream, where it has streams."""
    current_stream = getattr(torch.get_device_module(device), "current_stream", None)
    wait = getattr(current_stream(device), "synchronize", None) if current_stream is not None else None
    if wait is not None:
        wait()
    else:
        synchronize(device)
