"""A node's saver, a child of its agent: `python -m stoker.train.checkpoints.saver` writes snapshots to a storage.

It reads commands as lines of JSON on stdin and says what became of them on stdout (`stoker.wire.saving`). It runs
behind the training: at low priority, with one thread. Signals that end a run go to all its processes; this one lives
until its agent says so, or hangs up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stoker.base.rng import Rng
from stoker.cache.origin.open import without_query
from stoker.errors import StokerError, WireError
from stoker.platform.local import die_with
from stoker.train.checkpoints.patience import Patience
from stoker.train.checkpoints.saving import Saver, SnapshotSource
from stoker.train.checkpoints.snapshots import SlotSnapshots
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.saving import Command, Result, decode_command, encode_line

log = logging.getLogger("stoker.saver")
NICE = 10
LOOK_EVERY_S = 0.5
"""Seconds between two looks for a newer snapshot; each reads a few bytes of shared memory."""

OpenSource = Callable[[Path, str], SnapshotSource]
"""Opens the snapshots in a folder, of the run of that id."""


class Service:
    """Carries out commands, one after the other, and looks for snapshots in between."""

    def __init__(
        self,
        open_source: OpenSource,
        say: Callable[[Result], None],
        rng: Rng,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_source = open_source
        self._now = now
        self._patience = Patience(now)
        self._say = say
        self._rng = rng
        self._saver: Saver | None = None

    def serve(self, commands: queue.SimpleQueue[bytes]) -> None:
        """Until the command to finish."""
        while True:
            try:
                line = commands.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                if self._saver is not None:
                    self._saver.look()
                continue
            try:
                if not self._obey(decode_command(line)):
                    return
            except StokerError as error:
                self._say(Result(failed=str(error)))

    def look_after(self) -> None:
        """In a thread beside the one that serves, which a storage may keep: tell of what hangs there."""
        hanging = self._patience.overdue()
        if hanging is not None:
            self._say(Result(failed=f"no checkpoint is written: {hanging.text}", commits=hanging.commits))

    def _obey(self, command: Command) -> bool:
        """False: that was the last one. Raises WireError, ConfigError."""
        if command.watch:
            if not command.url:
                raise WireError("a command to watch names no storage")
            source = self._open_source(Path(command.watch), command.run_id)
            self._patience = Patience(self._now, command.hangs_after_s)
            with self._patience.asking(f"opening {without_query(command.url)}"):
                storage = CheckpointStorage(command.url, command.keep)
            self._saver = Saver(
                source,
                storage,
                say=self._say,
                now=self._now,
                rng=self._rng,
                every_s=command.every_s,
                patience=self._patience,
            )
            self._say(Result(ready=True))
        if self._saver is not None and command.beside_others:
            self._saver.beside_others = True
        if self._saver is not None and (command.save is not None or command.finish):
            self._saver.save()
        return not command.finish


def read_lines(descriptor: int, commands: queue.SimpleQueue[bytes], on_end: Callable[[], None]) -> None:
    """In a thread of its own: a save takes long, and the end of the agent is to be noticed meanwhile."""
    with os.fdopen(descriptor, "rb", closefd=False) as lines:
        for line in lines:
            commands.put(line)
    on_end()


def look_after(service: Service) -> None:
    """In a thread of its own, as long as the process lives."""
    while True:
        time.sleep(LOOK_EVERY_S)
        service.look_after()


def main(open_source: OpenSource) -> int:
    """Serve this process's agent."""
    die_with(os.getppid())
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="stoker: %(message)s", stream=sys.stderr)
    # What libraries print must not get between the results.
    results = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    saying = threading.Lock()

    def say(result: Result) -> None:
        try:
            with saying:
                os.write(results, encode_line(result))
        except OSError:
            os._exit(0)  # nobody is there to hear it

    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reading = threading.Thread(
        target=read_lines, args=(sys.stdin.fileno(), commands, lambda: os._exit(0)), daemon=True
    )
    reading.start()
    service = Service(open_source, say, Rng(os.getpid()))
    looking = threading.Thread(target=look_after, args=(service,), daemon=True)
    looking.start()
    service.serve(commands)
    return 0


if __name__ == "__main__":
    sys.exit(main(SlotSnapshots))
