"""What this worker read and committed, written down for the audit: one file of JSON lines per worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from stoker.data.audit import Committed, Entered, Entry, Read
from stoker.data.session import HandedOut, Session
from stoker.errors import EnvironmentProblem
from stoker.wire.job import WorldView

log = logging.getLogger("stoker.audit")


class Ledger:
    """Appends entries; each line goes to the kernel at once, so that a kill loses none."""

    def __init__(self, folder: str, worker: str) -> None:
        self._path = Path(folder) / f"{worker}.jsonl"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("ab", buffering=0)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write the audit to {self._path}: {error}") from None
        self._encode = msgspec.json.Encoder().encode

    def read(self, live: Session, step: int, batch: HandedOut) -> None:
        self._write(
            Read(
                generation=live.generation,
                step=step,
                epoch=batch.epoch,
                rank=live.rank,
                world_size=live.world_size,
                records=batch.records,
                wall_s=time.time(),
                dataset=batch.loader,
                cursor=batch.cursor,
                total=batch.total,
            )
        )

    def committed(self, generation: int, step: int, rank: int) -> None:
        self._write(Committed(generation=generation, step=step, rank=rank, wall_s=time.time()))

    def entered(self, world: WorldView, rank: int, *, copied: bool) -> None:
        self._write(
            Entered(
                generation=world.generation,
                rank=rank,
                world_size=world.size,
                source=world.source,
                commits=world.commits,
                copied=copied,
                wall_s=time.time(),
            )
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: Entry) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(self._encode(entry) + b"\n")
        except OSError as error:
            log.error("the audit ends here, the run goes on: cannot write %s: %s", self._path, error)
            self._file.close()


def read_ledgers(folder: Path) -> Iterator[Entry]:
    """Every entry of every worker; a line that a kill cut off is passed over."""
    decode = msgspec.json.Decoder(Entry).decode
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                if line:
                    yield decode(line)
            except msgspec.MsgspecError:
                continue
