"""How far a load has come: a bar at a terminal, a line now and then anywhere else. On stderr."""

from __future__ import annotations

import sys
import time

from rich import progress as bars
from rich.console import Console

from stoker.base.units import format_bytes, format_duration
from stoker.cache.client.loading import LoadCounts

LINE_EVERY_S = 10.0


class Progress:
    """Of one pass over objects; `objects` 0: their number is not known yet, they are counted."""

    def __init__(self, what: str, objects: int = 0, size_bytes: int = 0) -> None:
        self._what = what
        self._objects = objects
        self._size_bytes = size_bytes
        self._began_at = self._said_at = time.monotonic()
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    @property
    def took_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_at

    def __enter__(self) -> Progress:
        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        if console.is_terminal:
            columns = [
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(),
                bars.TextColumn("{task.fields[said]}", markup=False),
            ]
            self._bar = bars.Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._what, total=self._objects or None, said="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def counted(self, objects: int, size_bytes: int) -> None:
        """So many objects were found so far."""
        self.say(f"{objects} objects, {format_bytes(size_bytes)}", objects)

    def loaded(self, counts: LoadCounts) -> None:
        """So much is done."""
        rate = counts.loaded_bytes / max(self.took_s, 1e-3)
        parts = [
            f"{counts.objects} of {self._objects} objects",
            f"{format_bytes(counts.size_bytes)} of {format_bytes(self._size_bytes)}",
            f"{format_bytes(rate)}/s",
        ]
        if left_s := self._left_s(counts):
            parts.append(f"{format_duration(left_s)} left")
        missing = counts.passed + len(counts.failures)
        if missing:
            parts.append(f"{missing} missing")
        self.say(", ".join(parts), counts.objects)

    def _left_s(self, counts: LoadCounts) -> float:
        """Seconds, as far as can be told: by bytes, where sizes are known. 0: it cannot be told."""
        if self._size_bytes:
            share = counts.size_bytes / self._size_bytes
        else:
            share = counts.objects / max(1, self._objects)
        return self.took_s * (1 - share) / share if 0 < share < 1 else 0.0

    def say(self, text: str, done: int) -> None:
        """So many objects are done; `text` says all else."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, said=text)
            return
        now = time.monotonic()
        if now - self._said_at >= LINE_EVERY_S:
            self._said_at = now
            print(f"{self._what}: {text}", file=sys.stderr, flush=True)
