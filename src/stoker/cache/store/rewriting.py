"""Writing anew what is to stay of a segment that leaves. It takes no more than a share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from stoker._native import FileProblem, Piece, crc32c
from stoker.cache.evict import REPLICA_AWARE
from stoker.cache.segments import Placement
from stoker.cache.store.foreseen import Foreseen
from stoker.cache.store.holdings import Holdings
from stoker.errors import CorruptBlock, EnvironmentProblem

RETRY_S = 5.0
REWRITE_SHARE = 0.25
"""The part of the time that may go into writing segments anew."""


AT_ONCE_OBJECTS = 8192
"""In an index of so many, a segment is forgotten sooner than a thread has its turn."""


class _Left(NamedTuple):
    """What was written anew, how long that took, and whether the index knows nothing of the segment any more."""

    copied_bytes: int
    copying_s: float
    is_gone: bool


class Rewriting:
    """Lives on the store's event loop; one segment leaves at a time. `next_at`: when there is time for another."""

    def __init__(self, held: Holdings, foreseen: Foreseen) -> None:
        self._held = held
        self._foreseen = foreseen
        self.next_at = 0.0
        self.rewritten_bytes = 0

    async def leave(
        self,
        number: int,
        kept: Sequence[Piece],
        kinds: Sequence[int] | None = None,
        *,
        is_whole: bool = False,
    ) -> bool:
        """Give up a segment after these pieces of it were written anew, as far as there is room for them; where it
        `is_whole`, only if all were. Whether it left. `kinds`: see Foreseen.kinds_of; None: they are looked up."""
        held = self._held
        moves = self._place(kept, await self._foreseen.kinds_of(kept) if kinds is None else kinds)
        left = _Left(0, 0.0, False)
        try:
            if not is_whole or len(moves) == len(kept):
                is_quick = not moves and len(held.index) <= AT_ONCE_OBJECTS
                work = partial(self._leave, number, moves, is_whole)
                left = work() if is_quick else await held.run(work)
        finally:
            for _, placement in moves:
                held.segments.settle(placement.segment)
                if placement.sealed is not None:
                    held.files.finish(placement.sealed)
        self.rewritten_bytes += left.copied_bytes
        now = held.now()
        if moves:
            self.next_at = now + left.copying_s * (1 / REWRITE_SHARE - 1)
        if not left.is_gone:
            self.next_at = max(self.next_at, now + RETRY_S)
            return False
        if number in held.segments:
            held.drop_segment(number)
        return True

    def _leave(self, number: int, moves: Sequence[tuple[Piece, Placement]], is_whole: bool) -> _Left:
        """In a thread, but where there is next to nothing to do."""
        held, began = self._held, self._held.now()
        copied_bytes = self._copy(number, moves)
        copying_s = held.now() - began
        if is_whole and held.index.container(number) is not None:
            return _Left(copied_bytes, copying_s, False)
        held.index.lose_container(number)
        return _Left(copied_bytes, copying_s, True)

    def _place(self, pieces: Sequence[Piece], kinds: Sequence[int]) -> list[tuple[Piece, Placement]]:
        """Take room for pieces that are to be written anew; those for which there is none are left out. `kinds`: what
        is of one lies together."""
        held = self._held
        leaving_bytes = held.files.sending.leaving_bytes()
        moves: list[tuple[Piece, Placement]] = []
        for piece, kind in zip(pieces, kinds, strict=True):
            lot = held.lot_of_piece(piece)
            # Last copies lie apart from newcomers: else each segment that leaves for its copies is half last copies.
            apart = -1 if held.room.lot(lot).policy == REPLICA_AWARE else kind
            growth_bytes = held.segments.growth_bytes(lot, piece.size_bytes, apart=apart)
            if not held.room.ask(lot, growth_bytes, leaving_bytes, is_moving=True).fits:
                continue
            held.room.take(lot, growth_bytes)
            placement = held.segments.place(lot, piece.size_bytes, held.now_s(), apart=apart)
            moves.append((piece, placement))
            if placement.is_new and not self._create(placement.segment):
                break
        return moves

    def _create(self, number: int) -> bool:
        try:
            self._held.files.create(number)
        except EnvironmentProblem:
            self._held.segments.seal_segment(number)
            return False
        return True

    def _copy(self, number: int, moves: Sequence[tuple[Piece, Placement]]) -> int:
        """In a thread. What cannot be read or written now is left out, and leaves with its segment; what is not what it
        was is given up, or it would keep its segment for ever."""
        held, copied = self._held, 0
        for piece, placement in moves:
            try:
                data = self._read(number, piece)
                if data is None:
                    held.index.lose(piece)
                    continue
                held.files.write(placement.segment, placement.offset, data)
                held.index.move(piece, placement.segment, placement.offset)
            except (EnvironmentProblem, FileProblem):
                continue
            copied += len(data)
        return copied

    def _read(self, number: int, piece: Piece) -> bytes | None:
        """In a thread. None: it is not what was written. Raises EnvironmentProblem."""
        try:
            data = self._held.files.read(number, piece.offset, piece.size_bytes)
        except CorruptBlock:
            return None
        return data if crc32c(data) == piece.crc else None
