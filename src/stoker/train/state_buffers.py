"""Copies of the buffers of some modules, by which a broken step is undone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch


class _Buffers(NamedTuple):
    """Those of one module."""

    copies: Mapping[str, torch.Tensor | None]
    transient: Collection[str]
    """Registered with `persistent=False`."""


_NONE = _Buffers({}, ())


class BufferCopies:
    """What the buffers were at the last `renew`: as many, and of such shapes and types, as there were then."""

    def __init__(self) -> None:
        self._kept: dict[torch.nn.Module, _Buffers] = {}

    def renew(self, modules: Iterable[torch.nn.Module]) -> None:
        """Copy every buffer; into its last copy where shape, type and device are still the same."""
        work = _Copying()
        kept = {
            module: self._renewed(module, work) if module._buffers else _NONE
            for top in modules
            for module in top.modules()
        }
        work.finish()
        self._kept = kept

    def _renewed(self, module: torch.nn.Module, work: _Copying) -> _Buffers:
        before = self._kept.get(module, _NONE).copies
        copies = {
            name: work.copy(buffer, before.get(name)) if buffer is not None else None
            for name, buffer in module._buffers.items()
        }
        transient = module._non_persistent_buffers_set
        return _Buffers(copies, tuple(transient) if transient else ())

    def put_back(self) -> None:
        """Make the buffers what they were.

        One that is no part of `state_dict()` is a module's own cache: where it has been made since, or made anew in
        another shape, it is left alone, for what the module remembers beside it (such as the length that it is good
        for) is not undone either.
        """
        with torch.no_grad():
            for module, kept in self._kept.items():
                for name in [*module._buffers.keys()]:
                    if name not in kept.copies and name not in module._non_persistent_buffers_set:
                        delattr(module, name)
                for name, copy in kept.copies.items():
                    _put_back(module, name, copy, is_transient=name in kept.transient)


class _Copying:
    """One round of copying: each buffer once, though modules may share it, and all that can be together at once."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}
        """Copies by their buffers."""
        self._taken: set[int] = set()
        self._from: list[torch.Tensor] = []
        self._into: list[torch.Tensor] = []

    def copy(self, buffer: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        made = self._made.get(id(buffer))
        if made is not None:
            return made
        if last is not None and id(last) not in self._taken and _is_alike(last, buffer):
            self._from.append(buffer)
            self._into.append(last)
        else:
            last = buffer.detach().clone()
        self._made[id(buffer)] = last
        self._taken.add(id(last))
        return last

    def finish(self) -> None:
        if self._from:
            with torch.no_grad():
                torch._foreach_copy_(self._into, self._from)


def _put_back(module: torch.nn.Module, name: str, copy: torch.Tensor | None, *, is_transient: bool) -> None:
    buffers = module._buffers  # of a scripted module it is no dict
    now = buffers[name] if name in buffers else None  # noqa: SIM401
    if now is not None and copy is not None and _is_alike(copy, now) and _is_writable(now):
        now.copy_(copy)
    elif not is_transient:
        if name in buffers:
            delattr(module, name)
        module.register_buffer(name, copy.clone() if copy is not None else None)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _is_writable(buffer: torch.Tensor) -> bool:
    """Whether it can be changed in place: not where it was made in inference mode or its elements share memory."""
    shares = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not buffer.is_inference() and not shares
