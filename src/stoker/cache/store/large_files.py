"""The files of large objects, one sparse file for each version: single blocks leave as holes, or the file as a whole.

A hole is made only while nobody sends from the file, and never in one of which a descriptor was handed out: a reader
must not see zeros where its block was. The index forgets a block first, so that nobody begins to send it; what is still
being sent makes the hole wait. Lives on one event loop, and nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from stoker._native import Piece
from stoker.cache.segments import PAGE_BYTES, pages_bytes
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.readers import Readers


class _Hole(NamedTuple):
    """Bytes of a block that the index knows no more, and that still take room."""

    lot: int
    container: int
    offset: int
    size_bytes: int

    @property
    def charge_bytes(self) -> int:
        return pages_bytes(self.size_bytes)


class LargeFiles:
    """What is being written into them, and what is to leave."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._writes: Counter[int] = Counter()
        self._handed_out: set[int] = set()
        self._holes: list[_Hole] = []
        self._doomed: dict[int, Counter[int]] = {}
        """What is still counted for them, by lot: their bucket may have been divided anew meanwhile."""
        self.readers = Readers(held.files)
        self.of_lots: dict[int, set[int]] = {}
        """All files of some lots; see LotFiles."""

    def begin_write(self, lot: int, container: int, offset: int) -> None:
        """A block whose room is taken is being written; the file stays meanwhile."""
        self._writes[container] += 1
        if lot in self.of_lots:
            self.of_lots[lot].add(container)
        for hole in [hole for hole in self._holes if (hole.container, hole.offset) == (container, offset)]:
            self._holes.remove(hole)  # the same bytes again
            self._held.room.give(hole.lot, hole.charge_bytes)

    def end_write(self, lot: int, container: int, offset: int, size_bytes: int, *, is_held: bool) -> None:
        """The block is written and held; or it is not, and what may be there of it is given back."""
        self._writes[container] -= 1
        if not self._writes[container]:
            del self._writes[container]
        if not is_held:
            self._give_back(_Hole(lot, container, offset, size_bytes))
        if container in self._doomed and not self.is_written(container):
            self._drop(container, lot, 0)

    def forget_lot(self, container: int) -> None:
        """It is in none of the lots of which all files are known."""
        for files in self.of_lots.values():
            files.discard(container)

    def is_written(self, container: int) -> bool:
        """Whether a block is being written into it now."""
        return container in self._writes

    def is_busy(self, container: int) -> bool:
        """Whether it is written to or sent from now."""
        return self.is_written(container) or self._held.files.sending.is_used(container)

    def is_doomed(self, container: int) -> bool:
        """Whether it leaves as soon as nothing is written to it: nothing new may be."""
        return container in self._doomed

    def hand_out(self, container: int, *, is_whole: bool = False) -> None:
        """Descriptors of it are somewhere else from now on. `is_whole`: for all of it to be read, for long perhaps."""
        self._handed_out.add(container)
        if is_whole:
            self.readers.add(container)

    def is_read_elsewhere(self, container: int) -> bool:
        """Whether somebody who was handed all of it has it open: to give it up would make no room."""
        return self.readers.has(container, self._held.now())

    def lose(self, piece: Piece, lot: int) -> None:
        """Give up one block; where no hole can be made, all of its file."""
        held = self._held
        if piece.container in self._handed_out:
            self.lose_file(piece.container, lot)
        elif held.index.lose(piece):
            self._give_back(_Hole(lot, piece.container, piece.offset, piece.size_bytes))

    def lose_file(self, container: int, lot: int) -> None:
        """Give up all that is held in a file."""
        held = self._held
        pieces = [piece for piece, _ in held.index.pieces(container)]
        self.release(lot, container, sum(pages_bytes(p.size_bytes) for p in pieces if held.index.lose(p)))

    def release(self, lot: int, container: int, charge_bytes: int) -> None:
        """The index knows nothing of the file's blocks any more, which took so much."""
        if self.is_written(container):
            self._doomed.setdefault(container, Counter())[lot] += charge_bytes
        else:
            self._drop(container, lot, charge_bytes)

    def mend(self) -> None:
        """Make the holes that had to wait, and see which files that were given up nobody has open any more."""
        self.readers.mend()
        self._held.room.kept_bytes = self.readers.kept_bytes
        holes, self._holes = self._holes, []
        for hole in holes:
            self._give_back(hole)

    def _give_back(self, hole: _Hole) -> None:
        held = self._held
        if held.index.container(hole.container) is None:
            if self.is_written(hole.container):
                self._holes.append(hole)  # what is being written keeps the file, or ends it
            else:
                self._drop(hole.container, hole.lot, hole.charge_bytes)
        elif hole.container in self._handed_out or held.files.sending.is_used(hole.container):
            self._holes.append(hole)
        elif held.files.punch(hole.container, hole.offset, self._length_bytes(hole)):
            held.room.give(hole.lot, hole.charge_bytes)
        else:
            # A file system without holes: the file leaves, and this with it.
            self._holes.append(hole)
            piece, _ = held.index.pieces(hole.container)[0]
            self.lose_file(hole.container, held.lot_of_piece(piece))

    def _length_bytes(self, hole: _Hole) -> int:
        """To the end of its last page, where no other block begins in that."""
        is_aligned = self._held.block_size_bytes % PAGE_BYTES == 0
        return hole.charge_bytes if is_aligned else hole.size_bytes

    def _drop(self, container: int, lot: int, charge_bytes: int) -> None:
        charges = self._doomed.pop(container, Counter())
        charges[lot] += charge_bytes
        for hole in [hole for hole in self._holes if hole.container == container]:
            self._holes.remove(hole)
            charges[hole.lot] += hole.charge_bytes
        self._handed_out.discard(container)
        self.forget_lot(container)
        self.readers.leave(container, sum(charges.values()))
        self._held.drop_file(container, charges)
        self._held.room.kept_bytes = self.readers.kept_bytes
