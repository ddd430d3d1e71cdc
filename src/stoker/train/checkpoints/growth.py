"""Has others see that a writer is at work where a file is not there before it is whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.places import Place

GROWTH = "growth"
"""Beside the files that are being written; it becomes longer."""
SHOW_EVERY_S = 5.0


@contextlib.contextmanager
def shown_to_grow(
    place: Place, directory: str, wrote: Callable[[int], None]
) -> Iterator[Callable[[int], None]]:
    """To be called in place of `wrote`, within the context."""
    shown_at, lines = float("-inf"), 0

    def growing(size_bytes: int) -> None:
        nonlocal shown_at, lines
        wrote(size_bytes)
        if time.monotonic() - shown_at >= SHOW_EVERY_S:
            shown_at, lines = time.monotonic(), lines + 1
            # What hinders this hinders the checkpoint as well, which says so.
            with contextlib.suppress(EnvironmentProblem), place.create(directory, GROWTH) as sink:
                sink.write(b"\n" * lines)

    growing(0)
    yield growing
    place.drop(directory, GROWTH)
