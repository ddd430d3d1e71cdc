"""A run's snapshots in shared memory, as a saver reads them: where they lie, without a copy."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from stoker.train.checkpoints.image import Image, Piece
from stoker.train.checkpoints.layout import (
    COMPLETE,
    HEADER_BYTES,
    Header,
    check_piece,
    piece_in,
    read_description,
    run_digest,
)
from stoker.train.checkpoints.slots import Slot, all_slots, header_of, reader, reading


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
                with _mapped(descriptor, header) as image:
                    yield image
                return
        yield None

    def _found(self) -> list[tuple[Header, Path]]:
        """Whole ones, newest first."""
        peeked = [(Slot(path).peek(), path) for path in all_slots(self._folder)]
        whole = [(header, path) for header, path in peeked if header is not None and self._is_whole(header)]
        return sorted(whole, key=lambda one: (one[0].commits, one[0].sequence), reverse=True)

    def _is_whole(self, header: Header) -> bool:
        return header.run == self._run and header.state == COMPLETE


@contextlib.contextmanager
def _mapped(descriptor: int, header: Header) -> Iterator[Image]:
    """Its pieces lie in the file itself. Raises WireError where a checksum does not hold."""
    plain, places = read_description(reader(descriptor), header)
    # Private and writable, as torch wants memory to be; nothing writes there.
    size_bytes = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    whole = memoryview(memory)
    for place in places:
        begin = HEADER_BYTES + place.position
        check_piece(place, whole[begin : begin + place.size_bytes])
    # The memory goes with the last of its tensors.
    yield Image(
        header.commits, plain, [Piece(p.name, p.shape, p.offsets, piece_in(memory, p)) for p in places]
    )
