"""What workers print: kept in files, shown with the rank in front."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from stoker.agent.writers import Outlet, WriterThread
from stoker.errors import ConfigError

log = logging.getLogger("stoker.agent")
STREAMS = {"stdout": 1, "stderr": 2}
TAIL_BYTES = 16 * 1024
LINE_BYTES = 64 * 1024
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
BAR_INTERVAL_S = 10.0
"""Seconds between two looks at a line that is written over again and again, as progress bars are."""


class StreamChoice:
    """torchrun's `--tee` and `--redirects` value: `0`-`3` for all workers, or `0:3,1:2` per local rank.

    1 is standard output, 2 standard error, 3 both.
    """

    def __init__(self, flag: str, text: str) -> None:
        self._default = 0
        self._by_slot: dict[int, int] = {}
        try:
            if ":" not in text:
                self._default = int(text)
            else:
                pairs = (item.split(":", 1) for item in text.split(","))
                self._by_slot = {int(slot): int(value) for slot, value in pairs}
        except ValueError:
            raise ConfigError(f"{flag} {text!r}: give 0, 1, 2 or 3, or local ranks like 0:3,1:1") from None
        if any(value not in range(4) for value in (self._default, *self._by_slot.values())):
            raise ConfigError(f"{flag} {text!r}: 0 is nothing, 1 standard output, 2 standard error, 3 both")

    def has(self, slot: int, stream: str) -> bool:
        return bool(self._by_slot.get(slot, self._default) & STREAMS[stream])


class Pipes(Protocol):
    """Where a worker's output is read from."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class WorkerOutput:
    """Files of one worker, the end of its standard error, and its lines on the console.

    Nothing here waits for a disk or a console. When they are behind, the worker's pipes are not read, so that it is the
    worker who waits.
    """

    def __init__(
        self,
        folder: Path,
        files: WriterThread,
        show: Callable[[str, list[bytes]], None] | None,
        shown: Sequence[Outlet] = (),
    ) -> None:
        """`show(stream, lines)` gets whole lines without their ends, for the outlets `shown`; None: none is shown."""
        self.folder = folder
        self._show = show
        self._is_lost = False
        self._is_missing = False
        self._partial = dict.fromkeys(STREAMS, b"")
        self._bar_shown_at = dict.fromkeys(STREAMS, -math.inf)
        self._tail = b""
        self._files = {name: self._open(files, folder / f"{name}.log") for name in STREAMS}
        self._outlets = (*self._files.values(), *shown)
        self._pipes: Pipes | None = None
        self._is_held = False
        self._is_closed = False

    def reads_from(self, pipes: Pipes) -> None:
        """Say what is to be held while files or console are behind."""
        self._pipes = pipes

    def feed(self, stream: str, data: bytes) -> None:
        """Take what the worker wrote. A full disk costs the file, never the run.

        After `close` it is dropped: a process that cannot be killed may go on writing.
        """
        if self._is_closed:
            return
        if stream == "stderr":
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._files[stream].put(data)
        if self._show is not None:
            lines = self._lines(stream, data)
            if lines:
                self._show(stream, lines)
        if not self._is_held:
            self._hold()

    def _lines(self, stream: str, data: bytes) -> list[bytes]:
        """What this adds to the console: whole lines, and now and then how far a progress bar has come."""
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        if b"\r" in data:
            lines = [_visible(line) for line in lines]
        if b"\r" in rest:
            bar, now = _visible(rest), time.monotonic()
            if now - self._bar_shown_at[stream] >= BAR_INTERVAL_S:
                self._bar_shown_at[stream] = now
                lines.append(bar)
            # What comes next writes over it, or ends it.
            rest = b"\r" + bar + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[stream] = rest
        return lines

    def close(self) -> None:
        """The worker has ended: nothing more comes."""
        self._pipes, self._is_closed = None, True
        for stream, rest in self._partial.items():
            if rest and self._show is not None:
                self._show(stream, [_visible(rest)])
        for file in self._files.values():
            file.end()

    def tail(self) -> str:
        """The end of standard error."""
        return self._tail.decode("utf-8", "replace")

    def stuck_s(self) -> float:
        """Seconds since its files have taken anything, while the worker waits for them; 0: it does not."""
        full = [file.moved_at for file in self._files.values() if file.is_full]
        return time.monotonic() - min(full) if full else 0.0

    def _hold(self) -> None:
        """Stop reading while anything is behind, then go on."""
        if self._pipes is None:
            return
        behind = next((outlet for outlet in self._outlets if outlet.is_full), None)
        if behind is not None:
            behind.when_room(self._hold)
            if not self._is_held:
                self._pipes.pause_reading()
        elif self._is_held:
            self._pipes.resume_reading()
        self._is_held = behind is not None

    def _open(self, files: WriterThread, path: Path) -> Outlet:
        file = LogFile(path, lambda error: files.tell(lambda: self._miss(error)))
        outlet = files.outlet(file.write, close=file.close, on_error=self._lose)
        outlet.put(b"")  # it is there even if nothing is printed
        return outlet

    def _miss(self, error: OSError) -> None:
        if not self._is_missing:
            self._is_missing = True
            log.warning(
                "worker output is not kept while the disk is full: %s in %s", error.strerror, self.folder
            )

    def _lose(self, error: OSError) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.warning("worker output is not kept: %s", error)


class LogFile:
    """A file that is made with the first write, its folder too.

    A full disk costs what does not fit, and where that would have been the file says so. `on_full` is called once, by
    the thread that writes.
    """

    def __init__(self, path: Path, on_full: Callable[[OSError], None] = lambda _: None) -> None:
        self.path = path
        self._on_full = on_full
        self._descriptor = -1
        self._missing_bytes = 0
        self._was_full = False

    def write(self, data: bytes) -> None:
        """Append. Raises OSError, but not for a full disk."""
        end_bytes = 0
        try:
            if self._descriptor < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(
                    self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
            end_bytes = os.fstat(self._descriptor).st_size
            write_all(self._descriptor, self._about_missing() + data)
            self._missing_bytes = 0
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            self._missing_bytes += len(data) - self._kept_bytes(end_bytes)
            if not self._was_full:
                self._was_full = True
                self._on_full(error)

    def close(self) -> None:
        """Close it; an error of an earlier write may show only now. Raises OSError."""
        if self._descriptor >= 0:
            if self._missing_bytes:
                self.write(b"")
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _about_missing(self) -> bytes:
        if not self._missing_bytes:
            return b""
        return f"\n[stoker: {self._missing_bytes} bytes are missing here, the disk was full]\n".encode()

    def _kept_bytes(self, end_bytes: int) -> int:
        """How much of a piece is in the file that ended there; of one with a note before it nothing is kept."""
        if self._descriptor < 0:
            return 0
        if self._missing_bytes:
            with contextlib.suppress(OSError):  # it is no plain file
                os.ftruncate(self._descriptor, end_bytes)
            return 0
        return os.fstat(self._descriptor).st_size - end_bytes


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, however long that takes. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # whoever shares this descriptor has made it so
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()


def _visible(line: bytes) -> bytes:
    """What a line looks like whose beginning was written over, as progress bars do."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
