"""Cut a batch into micro-batches whose gradients add up to the batch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import ConfigError


def micro_batches(
    batch: Any, records: int, *wrapped: DistributedDataParallel | None, at_least: int = 1
) -> Iterator[tuple[Any, float]]:
    """The pieces of a collated batch, of at most so many records each (0: the whole), and the weight of each.

    `(loss(model(piece)) * weight).backward()` over all pieces leaves the gradient of the whole batch, the loss being a
    mean over its records. The gradients of `wrapped` modules are reduced in the last piece only. Where these are fewer
    than `at_least`, more follow, of one record at weight 0.

    Raises ConfigError for a batch whose parts are of different lengths, or that cannot be cut.
    """
    total = _length(batch)
    size = min(records, total) if records > 0 else total
    pieces = [(at, min(at + size, total)) for at in range(0, total, size)] if size else [(0, total)]
    real = len(pieces)
    pieces += [(max(0, total - 1), total)] * (at_least - real)
    for number, (start, stop) in enumerate(pieces, 1):
        is_last = number == len(pieces)
        with contextlib.ExitStack() as unreduced:
            for module in wrapped:
                if module is not None and not is_last:
                    # Not the wrapper's own, which looks out for what goes on into another batch.
                    unreduced.enter_context(DistributedDataParallel.no_sync(module))
            weight = (stop - start) / total if number <= real and total else float(number <= real)
            yield (batch if len(pieces) == 1 else _cut(batch, start, stop), weight)


def _length(batch: Any) -> int:
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        told = "no tensor in it" if not lengths else f"parts of {sorted(lengths)} records"
        raise ConfigError(
            f"this batch cannot be cut into micro-batches: it has {told}; let collate_fn give every part one row for "
            "each record"
        )
    return lengths.pop()


def _lengths(part: Any) -> Iterator[int]:
    if isinstance(part, (torch.Tensor, np.ndarray)):
        yield int(part.shape[0]) if part.ndim else 0
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _lengths(value)
    elif _is_row_of_parts(part):
        for value in part:
            yield from _lengths(value)
    elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        yield len(part)
    else:
        raise ConfigError(
            f"this batch cannot be cut into micro-batches: it holds a {type(part).__name__}; let collate_fn give "
            "tensors, arrays, and lists, tuples or mappings of them"
        )


def _cut(part: Any, start: int, stop: int) -> Any:
    if isinstance(part, Mapping):
        return {key: _cut(value, start, stop) for key, value in part.items()}
    if _is_row_of_parts(part):
        cut = [_cut(value, start, stop) for value in part]
        return type(part)(*cut) if hasattr(part, "_fields") else type(part)(cut)
    return part[start:stop]


def _is_row_of_parts(part: Any) -> bool:
    """Whether a list or tuple is of parts of the batch, as `(x, y)` is, and not itself one value for each record."""
    return isinstance(part, (list, tuple)) and any(
        isinstance(value, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for value in part
    )
