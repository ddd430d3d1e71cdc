"""What people see while a job runs: lines of workers and the command's own words, on standard output and error.

A reader that is slow slows the workers that print, as with any command. One that does not read at all (Ctrl-S, a pager,
a stalled collector of logs) stops nobody: after `PATIENCE_S` the lines of workers that do not fit are dropped, and
their number is told as soon as anything moves. The files of the log folder have them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from stoker.agent.output import STREAMS, write_all
from stoker.agent.writers import HURRY_S, QUEUE_BYTES, Outlet, WriterThread

log = logging.getLogger("stoker.agent")
PATIENCE_S = 2.0
"""Seconds in which a console that has enough to show must take something, or it does not read."""
OWN_BYTES_MAX = 4 * QUEUE_BYTES
"""With so much on its way even the command's own words are dropped."""


class Console:
    """Shows lines without ever waiting. To be made, used and closed in a running event loop."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: after so many seconds without taking anything a console is one that nobody reads."""
        self._patience_s = patience_s
        self._threads = {name: WriterThread(f"stoker-console-{name}") for name in STREAMS}
        self._dropped = dict.fromkeys(STREAMS, 0)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._by_name = {name: self._outlet(name, getattr(sys, name)) for name in STREAMS}

    @property
    def outlets(self) -> tuple[Outlet, ...]:
        """Where the lines go; who prints much waits while one is full."""
        return tuple(self._by_name.values())

    def show(self, rank: int, stream: str, lines: Sequence[bytes]) -> None:
        """Lines of a worker, with its rank in front."""
        self.show_from(f"rank {rank}", stream, lines)

    def show_from(self, who: str, stream: str, lines: Sequence[bytes]) -> None:
        """Lines with a name in front."""
        outlet = self._by_name[stream]
        if outlet.is_stalled:
            self._dropped[stream] += len(lines)
            return
        self._tell_dropped(stream)
        prefix = f"[{who}] ".encode()
        outlet.put(prefix + (b"\n" + prefix).join(lines) + b"\n")

    def say(self, text: str) -> None:
        """The command's own words, on standard error. May be called in any thread."""
        if threading.get_ident() == self._loop_thread:
            self._say(text.encode("utf-8", "replace"))
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed by now
                self._loop.call_soon_threadsafe(self._say, text.encode("utf-8", "replace"))

    def take_logs(self) -> None:
        """Have what is logged to standard error go through here from now on, until `close`."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(_Stream(self))
                self._handlers.append(handler)

    async def close(self, within_s: float, hurry: asyncio.Event) -> None:
        """Wait until all is shown, at most `within_s` seconds, or a little once `hurry` is set."""
        for stream in STREAMS:
            self._tell_dropped(stream)
        flushes = [thread.flush(within_s, hurry) for thread in self._threads.values()]
        if not all(await asyncio.gather(*flushes)):
            log.warning(
                "the end of what workers wrote is not shown, as nobody read it: it is in the log folder"
            )
            await self._threads["stderr"].flush(min(within_s, HURRY_S), hurry)
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        for thread in self._threads.values():
            thread.close()

    def _say(self, data: bytes) -> None:
        outlet = self._by_name["stderr"]
        if outlet.waiting_bytes <= OWN_BYTES_MAX:
            outlet.put(data)

    def _outlet(self, stream: str, file: TextIO | None) -> Outlet:
        try:
            if file is not None:
                file.flush()
            descriptor = file.fileno() if file is not None else -1
        except (OSError, ValueError):  # not a real one, but one that collects
            descriptor = -1

        def write(data: bytes) -> None:
            if descriptor >= 0:
                write_all(descriptor, data)
            elif file is not None:
                file.write(data.decode("utf-8", "replace"))

        def lose(error: OSError) -> None:
            log.warning("what workers write to %s is not shown any more: %s", stream, error)

        return self._threads[stream].outlet(write, on_error=lose, patience_s=self._patience_s)

    def _tell_dropped(self, stream: str) -> None:
        dropped, self._dropped[stream] = self._dropped[stream], 0
        if dropped:
            log.warning(
                "%d lines that workers wrote to %s are not shown, as nobody read them: they are in the log folder",
                dropped,
                stream,
            )


class _Stream:
    """What a log handler writes to."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.say(text)
        return len(text)

    def flush(self) -> None:
        pass
