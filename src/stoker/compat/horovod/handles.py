"""Collectives that are under way, and `poll` and `synchronize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from stoker.compat.horovod.agreement import told_as_horovod
from stoker.compat.horovod.basics import HorovodWorld
from stoker.compat.horovod.exceptions import HorovodInternalError


class Handle:
    """One collective under way."""

    def __init__(
        self, world: HorovodWorld, works: Sequence[dist.Work | None], finish: Callable[[], Any]
    ) -> None:
        """`finish` makes the result of what has come."""
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._is_void = False
        world.hold(self)

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """The result. Raises HorovodInternalError."""
        if self._is_void:
            raise HorovodInternalError("this collective belongs to a world that is over")
        with told_as_horovod():
            for work in self._works:
                work.wait()
        self._works.clear()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def forget(self) -> None:
        """The group goes away."""
        if self._works:
            self._works.clear()
            self._finish, self._is_void = None, True


class Several(Handle):
    """Collectives that were begun one after the other; the result is the list of theirs."""

    def __init__(self, inner: Sequence[Handle]) -> None:
        self._inner = inner

    def is_done(self) -> bool:
        return all(one.is_done() for one in self._inner)

    def wait(self) -> Any:
        return [one.wait() for one in self._inner]


def part(name: str | None, number: int) -> str | None:
    """How one of several collectives is called."""
    return f"{name}.{number}" if name is not None else None


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.is_done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective and return its result. Raises HorovodInternalError."""
    return handle.wait()
