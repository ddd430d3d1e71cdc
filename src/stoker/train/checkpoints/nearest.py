"""Find the newest snapshot that lies in this node's own memory, whoever took it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import WireError
from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.layout import COMPLETE, WRITING, Header, image_in, run_digest
from stoker.train.checkpoints.slots import all_slots, header_of, mapped, reading

log = logging.getLogger("stoker.checkpoint")


@contextlib.contextmanager
def nearest_in_memory(folder: Path, run_id: str) -> Iterator[Image | None]:
    """The snapshot of this run with the most commits of which every checksum holds, as it lies in memory.

    Nobody writes over it within the context; keep copies of what is needed longer. Any worker's will do: replicated
    state is the same on all. Those that are torn or damaged are skipped, with a message; None: there is none.
    """
    run = run_digest(run_id)
    found = [(header, path) for path in all_slots(folder) if (header := _whole(path, run)) is not None]
    for header, path in sorted(found, key=lambda one: (one[0].commits, one[0].sequence), reverse=True):
        with contextlib.ExitStack() as held:
            if (image := _open(path, run, held)) is not None:
                whole, image = [image], None
                yield whole.pop()  # this frame holds on to none of its tensors
                return
        log.debug("the snapshot of commit %d in %s is no more", header.commits, path)
    yield None


def _whole(path: Path, run: bytes) -> Header | None:
    """What a slot holds, if that is a whole snapshot of this run."""
    with reading(path) as descriptor:
        if descriptor is None:
            return None
        try:
            header = header_of(descriptor)
        except (WireError, OSError) as error:
            log.warning("skipping the snapshot %s: %s", path, error)
            return None
    if header.run == run and header.state == WRITING:
        log.warning(
            "skipping the snapshot %s of commit %d: its writer, process %d, ended in the middle of it",
            path,
            header.commits,
            header.pid,
        )
    return header if header.run == run and header.state == COMPLETE else None


def _open(path: Path, run: bytes, held: contextlib.ExitStack) -> Image | None:
    """Once more from the beginning: there may be another by now."""
    descriptor = held.enter_context(reading(path))
    if descriptor is None:
        return None
    try:
        header = header_of(descriptor)
        if header.run != run or header.state != COMPLETE:
            return None
        return image_in(held.enter_context(mapped(descriptor)), header)
    except (WireError, OSError) as error:
        log.warning("skipping the snapshot %s: %s", path, error)
        return None
