"""What the other servers of the fleet hold, so that a block of which there are copies leaves before a last copy does.

Each server makes a summary (`cache/summary.py`) of what it holds of the buckets whose policy asks for copies, and gets
those of the others. Nobody waits for it: until a summary has come, and always where one is missing, a block counts as
the only copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from stoker._native import FileProblem, Name, Piece
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.evict import REPLICA_AWARE
from stoker.cache.layout import block_count
from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.cache.server.engine import Engine
from stoker.cache.store.known import is_held
from stoker.cache.summary import Summary, block_hash, copies, membership, object_hash
from stoker.errors import CacheUnavailable, ObjectNotFound, StokerError
from stoker.wire.cache_api import SummaryStatus

log = logging.getLogger("stoker.cache")
EVERY_S = 60.0
AFTER_S = 5.0
"""So long after the fleet has changed others may still hear of it."""
RETRY_S = 5.0
RETRIES_MAX = 10
"""Who has no summary yet is asked again so often before the next round."""
ROUNDS_KEPT = 3
"""A summary counts until its maker should have made so many newer ones."""
WORK_SHARE = 0.25
"""The part of the time that making a summary takes while it is made."""
_PAUSE_MIN_S = 0.001


@dataclass(frozen=True)
class _View:
    """The fleet and the buckets, by their numbers in the index, that a summary is about."""

    members: tuple[Member, ...]
    membership: bytes
    placement: Placement
    buckets: Mapping[int, str]


class Summaries:
    """Runs now and then, and some seconds after each change of the fleet. What was made or heard among other members
    counts no more from the moment on that this server knows of the change: see `cache/summary.py` for why."""

    def __init__(
        self, engine: Engine, clock: Clock, rng: Rng, every_s: float = EVERY_S, after_s: float = AFTER_S
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._every_s = every_s
        self._after_s = min(after_s, every_s)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._view: _View | None = None
        self._own: Summary | None = None
        self._heard: dict[str, Summary] = {}
        self._instances: dict[str, str] = {}
        self._next_at = 0.0
        self._retries = 0

    def start(self) -> None:
        fleet, before = self._engine.fleet, self._engine.fleet.on_change

        def changed() -> None:
            before()
            self._changed.set()

        fleet.on_change = changed
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def met(self, name: str, instance: str) -> None:
        """A member has said who it is. What one told that has started anew since may be gone with its disk."""
        before, self._instances[name] = self._instances.get(name), instance
        if before not in (None, instance):
            self._forget(name)

    def copies(self, piece: Piece) -> int:
        """How many copies of a piece that is held here may be counted, this one included. From any thread."""
        view, heard, fleet = self._view, self._heard, self._engine.fleet
        if view is None or not heard or fleet.view.members is not view.members:
            return 1
        name, index = view.buckets.get(piece.bucket), self._engine.store.index
        if name is None:
            return 1
        try:
            key = index.key_of(piece)
            found = index.find(piece.bucket, key) if key else None
        except FileProblem:
            return 1
        if found is None or found.container != piece.container:
            return 1  # it left meanwhile, or has another version
        number = piece.block or 0
        block = block_hash(object_hash(name, key, found.version), number)
        holders = [peer for peer, summary in heard.items() if summary.holds(block)]
        if not holders:
            return 1
        owner = view.placement.owner(block_owner_name(name, key, number))
        down = fleet.view.down()
        up = [peer for peer in holders if peer not in down]
        return copies(block, fleet.me.name, up, None if owner is None else owner.name)

    def encoded(self) -> bytes:
        """This server's own, for the others. Raises ObjectNotFound where there is none (yet)."""
        view = self._view
        if self._own is None or view is None or self._engine.fleet.view.members is not view.members:
            raise ObjectNotFound("this server has no summary of what it holds, or none yet")
        return self._own.encode(self._clock.now())

    def status(self) -> list[SummaryStatus]:
        """What counts now: this server's own summary, and those that it has of others."""
        view, now = self._view, self._clock.now()
        if view is None or self._engine.fleet.view.members is not view.members:
            return []
        known = {**({} if self._own is None else {self._engine.fleet.me.name: self._own}), **self._heard}
        return [
            SummaryStatus(name, summary.blocks, summary.size_bytes, round(max(0.0, now - summary.made_at), 3))
            for name, summary in sorted(known.items())
        ]

    async def round(self) -> float:
        """Make this server's summary where it is time to, and get the others'; seconds until the next round."""
        view = self._look()
        if view is None:
            return self._jittered(self._every_s)
        if self._own is None or self._clock.now() >= self._next_at:
            self._own = await self._make(view)
            self._retries = 0
            self._next_at = self._clock.now() + self._jittered(self._every_s)
        is_complete = await self._ask_all(view)
        left_s = max(0.0, self._next_at - self._clock.now())
        if is_complete or self._retries >= RETRIES_MAX:
            return left_s
        self._retries += 1
        return min(left_s, self._jittered(RETRY_S))

    async def _run(self) -> None:
        wait_s = self._jittered(self._after_s)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
                self._changed.clear()
                await asyncio.sleep(self._jittered(self._after_s))
            try:
                wait_s = await self.round()
            except (StokerError, FileProblem) as error:
                log.warning("what is held cannot be summed up now: %s", error)
                wait_s = self._jittered(self._every_s)
            except Exception:
                # A defect here must not end it: the next round may not meet it.
                log.exception("summing up what is held failed")
                wait_s = self._jittered(self._every_s)

    def _jittered(self, about_s: float) -> float:
        return about_s * self._rng.uniform(0.8, 1.2)

    def _look(self) -> _View | None:
        """The fleet and its buckets now; None where copies count nowhere."""
        engine, before = self._engine, self._view
        members = engine.fleet.view.members
        buckets = {
            bucket.number: bucket.name
            for bucket in engine.buckets.values()
            if bucket.spec.policy == REPLICA_AWARE and bucket.spec.max_replicas != 1
        }
        if before is None or before.members is not members:
            # In this order: a thread that sees the new view must not count by what was heard in the old one.
            self._heard, self._own, self._view = {}, None, None
            known = self._instances.items()
            self._instances = {name: one for name, one in known if engine.fleet.url(name) is not None}
        if engine.fleet.is_alone or not buckets:
            self._heard, self._own, self._view = {}, None, None
        elif self._view is None:
            stands_for = membership(members, engine.block_size_bytes)
            self._view = _View(members, stands_for, Placement(members), buckets)
        elif self._view.buckets != buckets:
            self._view = _View(members, self._view.membership, self._view.placement, buckets)
        return self._view

    # -- this server's own --------------------------------------------------------------------------------------

    async def _make(self, view: _View) -> Summary | None:
        """None where the fleet changed meanwhile: what left before the change must not be told of after it."""
        store, began = self._engine.store, self._clock.now()
        figures = store.index.figures()
        blocks = sum(figures[number].pieces for number in view.buckets if number in figures)
        summary = Summary.sized_for(blocks, view.membership, began, self._every_s)
        for number, name in view.buckets.items():
            async with aclosing(store.names(number, "")) as pages:
                at = self._clock.now()
                async for names in pages:
                    await store.holdings.run(self._add, summary, number, name, names)
                    worked_s = self._clock.now() - at
                    await asyncio.sleep(max(_PAUSE_MIN_S, worked_s * (1 / WORK_SHARE - 1)))
                    at = self._clock.now()
        if self._engine.fleet.view.members is not view.members:
            return None
        summary.period_s = self._every_s + self._clock.now() - began
        return summary

    def _add(self, summary: Summary, number: int, bucket: str, names: Sequence[Name]) -> None:
        """In a thread: what is held of these objects."""
        held = self._engine.store.holdings
        for name in names:
            if not name.container:
                continue
            whole = object_hash(bucket, name.key, name.version)
            if name.size_bytes <= held.packed_bytes_max:
                summary.add(block_hash(whole, 0))
                continue
            found = held.index.find(number, name.key, True)
            if found is None or found.version != name.version:
                continue
            for block in range(block_count(name.size_bytes, held.block_size_bytes)):
                if is_held(found, block):
                    summary.add(block_hash(whole, block))

    # -- the others' --------------------------------------------------------------------------------------------

    def _forget(self, name: str) -> None:
        """By a new dict: threads read the one before."""
        self._heard = {peer: one for peer, one in self._heard.items() if peer != name}

    async def _ask_all(self, view: _View) -> bool:
        """Get the others' summaries, one after the other; False if one that can be reached has none yet."""
        fleet, now = self._engine.fleet, self._clock.now()
        self._heard = {
            name: summary
            for name, summary in self._heard.items()
            if now - summary.made_at <= ROUNDS_KEPT * summary.period_s
        }
        down = fleet.view.down()
        # One of weight 0 is leaving: what it holds is no copy to count on.
        names = [m.name for m in view.members if m.weight and m.name != fleet.me.name and m.name not in down]
        self._rng.shuffle(names)
        said = [await self._ask(view, name) for name in names]
        return all(said)

    async def _ask(self, view: _View, name: str) -> bool:
        fleet, store = self._engine.fleet, self._engine.store
        url = fleet.url(name)
        if url is None:
            return True
        try:
            data = await fleet.peers.summary(url)
            summary = await store.holdings.run(Summary.decode, data, self._clock.now())
        except CacheUnavailable as error:
            fleet.lost(name, error)
            return True
        except ObjectNotFound:
            self._forget(name)
            return False
        except StokerError as error:
            log.info("%s does not say what it holds: %s", name, error)
            return True
        if fleet.view.members is not view.members:
            return True
        if summary.members != view.membership:
            return False  # it knows other members as yet
        self._heard = {**self._heard, name: summary}
        return True
