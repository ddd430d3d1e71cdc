"""Making room: what leaves when a newcomer does not fit, and what is written anew instead.

A segment leaves as a whole; what of it was used since it was written is written anew first, as long as that takes no
more than a share of the time. Of large objects single blocks leave. Which of the two it is says the recency of what was
drawn from each by chance. As long as that finds blocks with copies elsewhere, where the policy asks for them, it is
those that leave, and last copies are written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from stoker._native import Piece
from stoker.base.rng import Rng
from stoker.cache.evict import (
    REPLICA_AWARE,
    SAMPLE_SIZE,
    UNIFORM,
    Candidate,
    Choice,
    sifted_s,
    staleness_s,
    stalest,
)
from stoker.cache.room import Need
from stoker.cache.segments import Piece as Sifted
from stoker.cache.store.aging import Aging
from stoker.cache.store.departures import FORESEEN, LIMIT, LOST, ROOM, Departures
from stoker.cache.store.foreseen import ANY, Foreseen, Newcomer
from stoker.cache.store.foreseen import Choice as Foreseeing
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.large_files import LargeFiles
from stoker.cache.store.lot_files import LotFiles
from stoker.cache.store.rewriting import Rewriting

DRAWS_MAX = 8
"""So often pieces are drawn by chance where few of them may leave."""
LOOK_SHARE = 0.01
"""The part of the time that may go into looking for such, where there is none."""
LOOK_EVERY_S_MAX = 60.0
BREAK_EVERY_S = 1.0
"""So often a file is given up that others have open, where nothing else can be."""
TRIES_MAX = 3
"""So many segments with copies are looked at for one from which no last copy need be lost."""


class _Drawn(NamedTuple):
    """What was chosen of some pieces, and the containers of those with copies elsewhere, the stalest first."""

    piece: Piece
    choice: Choice
    with_copies: tuple[int, ...]


class _Leaving(NamedTuple):
    """A segment that may leave, what of it is written anew first, and what not."""

    number: int
    kept: list[Piece]
    lost: list[Piece]
    last_copies_bytes: int


class Clearing:
    """Lives on the store's event loop. `copies_of` tells how many copies of a piece the fleet has; threads ask it."""

    def __init__(self, held: Holdings, large: LargeFiles, rng: Rng) -> None:
        self._held = held
        self._large = large
        self._rng = rng
        self._lock = asyncio.Lock()
        self._look_from = 0.0
        self._break_from = 0.0
        self._loads: list[tuple[str, int]] = []
        self.foreseen = Foreseen(held, large, rng)
        self._lot_files = LotFiles(held, large, rng)
        self._rewriting = Rewriting(held, self.foreseen)
        self.departures = Departures()
        self._aging = Aging(held, large, self._rewriting, self._lock, self.departures)
        self.copies_of: Callable[[Piece], int] = lambda piece: 1
        self.evicted_bytes = 0

    @property
    def rewritten_bytes(self) -> int:
        """What was written anew since the start."""
        return self._rewriting.rewritten_bytes

    @contextlib.contextmanager
    def loading(self, bucket: str, since_s: int) -> Iterator[None]:
        """While a load of a bucket is under way that began then, in the index's seconds: nothing that was written or
        used since leaves for what is loaded, so that a load never pushes out what it has brought itself."""
        self._loads.append((bucket, since_s))
        try:
            yield
        finally:
            self._loads.remove((bucket, since_s))

    async def make_room(
        self,
        lot: int,
        size_bytes: Callable[[], int],
        *,
        is_loading: bool = False,
        newcomer: Newcomer | None = None,
    ) -> bool:
        """Give up what must leave so that so much fits into a lot; when it returns True, it fits now. `newcomer`: what
        is known of it, where its bucket's coming reads are."""
        if self._held.room.lot(lot).is_pinned:
            newcomer = None
        is_unforeseen = newcomer is not None and newcomer.due_s == math.inf
        never_replaces = is_unforeseen and self._held.room.lot(lot).policy == UNIFORM
        before_s: int | None = None
        while True:
            if is_loading:
                before_s = self._load_began_s(lot, before_s)
            need = self._ask(lot, size_bytes(), is_loading=is_loading)
            if need.fits or need.is_refused or never_replaces:
                return need.fits
            async with self._lock:
                need = self._ask(lot, size_bytes(), is_loading=is_loading)
                if need.fits or need.is_refused:
                    continue
                if is_loading and before_s is None:
                    return False  # whoever loaded it has left before it was stored: nothing leaves for it
                if not await self._give_up_one(need, before_s, newcomer):
                    return False

    async def shrink(self) -> None:
        """Keep to the limit where it is lower than what is here from before."""
        async with self._lock:
            room = self._held.room
            while room.over().missing_bytes > 0:
                # What is pinned leaves only where all else is not enough.
                if not await self._give_up_one(room.over(), why=LIMIT) and not await self._give_up_one(
                    room.over(with_pinned=True), why=LIMIT
                ):
                    return

    def lose(self, piece: Piece, why: str = LOST) -> None:
        """Give up a piece, as one that is not what it should be. Packed, its bytes stay until the segment is written
        anew."""
        held = self._held
        self._count(why, [piece])
        if not held.files.is_there(piece.container):
            self._lose_all(piece)
        elif piece.block is None:
            held.index.lose(piece)
        else:
            self._large.lose(piece, held.lot_of_piece(piece))

    def _lose_all(self, piece: Piece) -> None:
        """The file is gone, by no doing of ours: with it all that was in it."""
        held = self._held
        if piece.block is not None:
            self._large.lose_file(piece.container, held.lot_of_piece(piece))
            return
        held.index.lose_container(piece.container)
        held.files.finish(piece.container)
        held.segments.seal_segment(piece.container)

    async def rewrite_sparse(self) -> bool:
        """Write the sparsest segment anew, if there is one and it is time to; whether it was."""
        held = self._held
        if held.now() < max(self._rewriting.next_at, self._look_from):
            return False
        async with self._lock:
            began = held.now()
            live = await held.run(self._live_bytes, held.segments.at_rest())
            number = held.segments.sparsest(lambda n: live.get(n, held.segments.bytes_of(n)))
            if number is None:
                now = held.now()
                self._look_from = now + min(LOOK_EVERY_S_MAX, (now - began) * (1 / LOOK_SHARE - 1))
                return False
            return await self._rewriting.leave(number, await self._pieces(number), is_whole=True)

    def _live_bytes(self, segments: Sequence[int]) -> dict[int, int]:
        """In a thread: what of each segment is still held. Of large objects' files there may be many more."""
        found = {number: self._held.index.container(number) for number in segments}
        return {number: 0 if one is None else one.size_bytes for number, one in found.items()}

    async def give_up_old(self) -> None:
        """What a bucket keeps for a time only leaves once that is over; it may be a little later, for all that is held
        is looked at."""
        await self._aging.give_up_old()

    def _load_began_s(self, lot: int, before_s: int | None) -> int | None:
        """When the first of the loads of the lot's bucket began; where all have ended since, when they had."""
        name = self._held.room.lot(lot).bucket
        return min((since_s for bucket, since_s in self._loads if bucket == name), default=before_s)

    # -- one step -----------------------------------------------------------------------------------------------

    def _ask(self, lot: int, size_bytes: int, *, is_loading: bool = False) -> Need:
        leaving_bytes = self._held.files.sending.leaving_bytes()
        return self._held.room.ask(lot, size_bytes, leaving_bytes, is_loading=is_loading)

    async def _give_up_one(
        self,
        need: Need,
        before_s: int | None = None,
        newcomer: Newcomer | None = None,
        why: str = ROOM,
    ) -> bool:
        """A segment, or a block; where `before_s` is said, only what was neither written nor used since. False if
        nothing of these lots can leave."""
        held = self._held
        self._large.mend()
        foreseen = self.foreseen.lots(need.lots) if before_s is None else frozenset()
        latest = await self.foreseen.choose(foreseen, newcomer or ANY) if foreseen else None
        if foreseen:
            need = need._replace(lots=need.lots - foreseen)
            if not need.lots and latest is not None:
                return await self._give_up_latest(latest)
        block = await self._stalest_block(need, before_s)
        packed, _ = self._draw(need, before_s, is_large=False)
        number = self._oldest(need, before_s)
        # As long as something was not used, so long it may be until it is.
        unused_s = max((drawn.choice.staleness_s for drawn in (block, packed) if drawn), default=0.0)
        if latest is not None and latest.due_s >= unused_s:
            return await self._give_up_latest(latest)
        if block is not None and (
            number is None or packed is None or block.choice.rank >= packed.choice.rank
        ):
            self.evicted_bytes += block.piece.size_bytes
            self._count(why, [block.piece])
            self._large.lose(block.piece, held.lot_of_piece(block.piece))
            return True
        if number is None:
            return False
        leaving = await self._choose_segment(number, packed if before_s is None else None)
        self.evicted_bytes += sum(piece.size_bytes for piece in leaving.lost)
        self._count(why, leaving.lost)
        await self._rewriting.leave(leaving.number, leaving.kept)
        return True

    async def _give_up_latest(self, latest: Foreseeing) -> bool:
        held = self._held
        self.evicted_bytes += sum(piece.size_bytes for piece in latest.lost)
        self._count(FORESEEN, latest.lost)
        if latest.block is not None:
            self._large.lose(latest.block, held.lot_of_piece(latest.block))
            return True
        held.segments.seal_segment(latest.segment)
        if not held.segments.is_at_rest(latest.segment):
            return True  # something is written to it by now: another is chosen
        held.files.finish(latest.segment)
        if held.now() >= self._rewriting.next_at:
            await self._rewriting.leave(latest.segment, latest.kept, latest.kinds)
        else:
            await self._rewriting.leave(latest.segment, latest.pinned)
        return True

    def _count(self, why: str, pieces: Sequence[Piece]) -> None:
        self.departures.left(why, pieces, self._held.now_s())

    def _oldest(self, need: Need, before_s: int | None) -> int | None:
        """The segment that is to leave next; sealed, if it was not."""
        held = self._held
        if before_s is None:
            number = held.segments.oldest(need.lots)
            number = held.segments.largest_open(need.lots) if number is None else number
        else:
            number = next(iter(held.segments.written_before(need.lots, before_s)), None)
        if number is not None and held.segments.is_open(number):
            held.segments.seal_segment(number)
            held.files.finish(number)
        return number

    async def _choose_segment(self, oldest: int, packed: _Drawn | None) -> _Leaving:
        """The oldest; but as long as there are copies to give up, one with some, and no more last copies than can be
        written anew if chance finds such a one."""
        held = self._held
        tries = [] if packed is None else [n for n in packed.with_copies if held.segments.is_at_rest(n)]
        has_time = held.now() >= self._rewriting.next_at
        best: _Leaving | None = None
        for number in tries[:TRIES_MAX] or [oldest]:
            pieces = await self._pieces(number)
            leaving = await held.run(self._sift, number, pieces, bool(tries), has_time)
            if best is None or leaving.last_copies_bytes < best.last_copies_bytes:
                best = leaving
            if not best.last_copies_bytes:
                break
        assert best is not None
        return best

    def _sift(self, number: int, pieces: Sequence[Piece], are_copies_left: bool, has_time: bool) -> _Leaving:
        """What of a segment is to be written anew. In a thread: counting the copies of so many takes a while."""
        now_s = self._held.now_s()
        candidates = [Candidate(piece.used_s, self._copies(piece)) for piece in pieces]
        used_s = [sifted_s(candidate, now_s, are_copies_left=are_copies_left) for candidate in candidates]
        sifted = [Sifted(piece.size_bytes, used) for piece, used in zip(pieces, used_s, strict=True)]
        kept = set(self._held.segments.sift(number, sifted, has_time=has_time).kept)
        kept |= {i for i, piece in enumerate(pieces) if self._held.is_pinned(piece)}
        lost = [i for i in range(len(pieces)) if i not in kept]
        last_copies_bytes = sum(pieces[i].size_bytes for i in lost if candidates[i].copies == 1)
        return _Leaving(
            number, [pieces[i] for i in sorted(kept)], [pieces[i] for i in lost], last_copies_bytes
        )

    async def _stalest_block(self, need: Need, before_s: int | None) -> _Drawn | None:
        """Of some blocks of large objects that were drawn by chance, the one that was used longest ago."""
        block, count = self._draw(need, before_s, is_large=True)
        if block is None and count < SAMPLE_SIZE and self._hold_large(need.lots):
            drawn = await self._lot_files.draw(need.lots, SAMPLE_SIZE)
            own = [piece for piece in drawn if self._held.lot_of_piece(piece) in need.lots]
            block = self._stalest(own, before_s, is_large=True)
        if block is None and self._large.readers.are_any and self._held.now() >= self._break_from:
            # Who has a file open may only keep it at hand, and lets go once it is given up.
            block, _ = self._draw(need, before_s, is_large=True, with_open=True)
            if block is not None:
                self._break_from = self._held.now() + BREAK_EVERY_S
        return block

    def _draw(
        self, need: Need, before_s: int | None, *, is_large: bool, with_open: bool = False
    ) -> tuple[_Drawn | None, int]:
        """The stalest of some that were drawn by chance, and how many of them were of these lots."""
        held = self._held
        buckets = held.lots.buckets_of(need.lots)
        count = 0
        for _ in range(DRAWS_MAX if is_large or before_s is not None else 1):
            drawn = held.index.sample(SAMPLE_SIZE, buckets, is_large, self._rng.next64()) if buckets else []
            if not drawn:
                break
            own = [piece for piece in drawn if held.lot_of_piece(piece) in need.lots]
            count += len(own)
            stalest_own = self._stalest(own, before_s, is_large=is_large, with_open=with_open)
            if stalest_own is not None:
                return stalest_own, count
        return None, count

    def _stalest(
        self, drawn: Sequence[Piece], before_s: int | None, *, is_large: bool, with_open: bool = False
    ) -> _Drawn | None:
        """Of these pieces that may leave the one that was used longest ago; `with_open`: also of files that others have
        open, who were handed all of them."""
        now_s = self._held.now_s()
        free = [
            piece
            for piece in drawn
            if not (is_large and self._large.is_busy(piece.container))
            and (with_open or not is_large or not self._large.is_read_elsewhere(piece.container))
            and (before_s is None or piece.used_s < before_s)
        ]
        candidates = [Candidate(piece.used_s, self._copies(piece)) for piece in free]
        choice = stalest(candidates, now_s)
        if choice is None:
            return None
        with_copies = [i for i, candidate in enumerate(candidates) if candidate.copies > 1]
        with_copies.sort(key=lambda i: -staleness_s(candidates[i], now_s))
        containers = tuple(dict.fromkeys(free[i].container for i in with_copies))
        return _Drawn(free[choice.position], choice, containers)

    def _hold_large(self, lots: Collection[int]) -> bool:
        """Whether anything but segments is counted in these lots."""
        segments = self._held.segments
        packed_bytes = sum(segments.bytes_of(number) for number in segments.of_lots(lots))
        return sum(self._held.room.used_by(lot) for lot in lots) > packed_bytes

    def _copies(self, piece: Piece) -> int:
        policy = self._held.lots[piece.bucket].lots[0].policy
        return self.copies_of(piece) if policy == REPLICA_AWARE else 1

    async def _pieces(self, number: int) -> list[Piece]:
        return [piece for piece, _ in await self._held.run(self._held.index.pieces, number)]
