"""A run's snapshots in shared memory, as a saver reads them: where they lie, without a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from stoker.train.checkpoints.image import Image
from stoker.train.checkpoints.layout import COMPLETE, Header, image_in, run_digest
from stoker.train.checkpoints.slots import Slot, all_slots, header_of, mapped, reading


class SlotSnapshots:
    """The slots in a node's folder, of the run of that id."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run = run_digest(run_id)

    def newest_commits(self) -> int | None:
        """By the headers alone."""
        found = self._found()
        return found[0][0].commits if found else None

    @contextlib.contextmanager
    def newest(self) -> Iterator[Image | None]:
        """The slot is locked meanwhile: who takes snapshots uses the other one. Raises WireError."""
        for _, path in self._found():
            with reading(path) as descriptor:
                header = None if descriptor is None else header_of(descriptor)
                if descriptor is None or header is None or not self._is_whole(header):
                    continue  # there is another snapshot in it by now, or there will be
                with mapped(descriptor) as whole:
                    yield image_in(whole, header)
                return
        yield None

    def _found(self) -> list[tuple[Header, Path]]:
        """Whole ones, newest first."""
        peeked = [(Slot(path).peek(), path) for path in all_slots(self._folder)]
        whole = [(header, path) for header, path in peeked if header is not None and self._is_whole(header)]
        return sorted(whole, key=lambda one: (one[0].commits, one[0].sequence), reverse=True)

    def _is_whole(self, header: Header) -> bool:
        return header.run == self._run and header.state == COMPLETE
