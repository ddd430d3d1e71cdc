"""The port: start a process, learn how it ended, end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Process(Protocol):
    """A running worker."""

    @property
    def pid(self) -> int: ...

    def signal(self, signal_number: int) -> None:
        """Send a signal to the worker and everything it started. Does nothing once it has ended."""
        ...

    def pause_reading(self) -> None:
        """Call `on_output` no more for now: a worker that goes on printing waits. What is in the pipes at its end comes
        all the same."""
        ...

    def resume_reading(self) -> None:
        """Go on after `pause_reading`."""
        ...


class Platform(Protocol):
    """Starts worker processes."""

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_output: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None], None],
        before_exec: Callable[[], None] = lambda: None,
    ) -> Process:
        """Start a process.

        `on_output(stream, data)` gets what it prints, with stream `"stdout"` or `"stderr"`; `on_exit(code,
        signal)` comes once, after the last output; `before_exec` runs in the new process before the program does.
        Raises EnvironmentProblem if it cannot be started.
        """
        ...
