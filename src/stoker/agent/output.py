"""What workers print: kept in files, shown with the rank in front."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

from stoker.errors import ConfigError

STREAMS = {"stdout": 1, "stderr": 2}
TAIL_BYTES = 16 * 1024
LINE_BYTES = 64 * 1024
_TRACEBACK = re.compile(rb"^(?:\[rank\d+\]: )?Traceback \(most recent call last\):", re.MULTILINE)


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


class WorkerOutput:
    """Files of one worker, the end of its standard error, and its lines on the console."""

    def __init__(self, folder: Path, slot: int, show: Callable[[str, bytes], None] | None) -> None:
        """`show(stream, line)` gets whole lines without their end; None: nothing is shown."""
        self.folder = folder
        self.slot = slot
        self._show = show
        self._files: dict[str, IO[bytes]] = {}
        self._partial = {"stdout": b"", "stderr": b""}
        self._tail = b""
        self.lost: str = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: (folder / f"{name}.log").open("ab", buffering=0) for name in STREAMS}
        except OSError as error:
            self.lost = f"worker output is not kept: {error}"

    def feed(self, stream: str, data: bytes) -> None:
        """Take what the worker wrote. A full disk costs the file, never the run."""
        if stream == "stderr":
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        file = self._files.get(stream)
        if file is not None:
            try:
                file.write(data)
            except OSError as error:
                self.lost = f"worker output is not kept: {error}"
                self._files.pop(stream).close()
        if self._show is None:
            return
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        if len(rest) > LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[stream] = rest
        for line in lines:
            self._say(stream, line.rsplit(b"\r", 1)[-1] if not line.endswith(b"\r") else line[:-1])

    def close(self) -> None:
        for stream, rest in self._partial.items():
            if rest:
                self._say(stream, rest)
        for file in self._files.values():
            file.close()
        self._files = {}

    def _say(self, stream: str, line: bytes) -> None:
        """Show a line; a console that is gone (`stoker run … | head`) costs the lines, never the run."""
        if self._show is None:
            return
        try:
            self._show(stream, line)
        except OSError as error:
            self.lost = f"worker output is not shown any more: {error}"
            self._show = None

    def last_traceback(self) -> str:
        """The last traceback on standard error; empty if there is none."""
        starts = [match.start() for match in _TRACEBACK.finditer(self._tail)]
        return self._tail[starts[-1] :].decode("utf-8", "replace").strip() if starts else ""

    def last_lines(self) -> str:
        """The last lines on standard error."""
        return b"\n".join(self._tail.split(b"\n")[-20:]).decode("utf-8", "replace").strip()
