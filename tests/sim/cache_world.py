"""A seeded world around the shipping flight, room and evict cores.

Readers come, cancel and crash; origins are slow, fail and send short bodies; the disk fills up; blocks are
evicted; the server restarts. After every event the invariants are checked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from stoker.base.rng import Rng
from stoker.cache.evict import LRU, REPLICA_AWARE, SAMPLE_SIZE, UNIFORM, Candidate, stalest
from stoker.cache.flight import Abort, Cancelled, Decision, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.cache.room import Lot, Room

_HORIZON = 100.0


class BlockId(NamedTuple):
    """The identity of a block: one fixed-size piece of one version of one object."""

    bucket: str
    key: str
    version: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class CacheWorld:
    """One server, one origin, some objects of one block each, and readers."""

    def __init__(self, seed: int) -> None:
        self.rng = Rng(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.story: list[str] = []
        count = 2 + self.rng.below(6)
        policies = self.rng.choice([(LRU, LRU), (LRU, UNIFORM), (UNIFORM, UNIFORM), (REPLICA_AWARE, LRU)])
        self.blocks = [BlockId(f"b{n % 2}", f"k{n}", "v", 0) for n in range(count)]
        self.policy = {f"b{n}": policies[n] for n in range(2)}
        self.sizes = {block: 1 + self.rng.below(10) for block in self.blocks}
        self.limit = 1 + self.rng.below(sum(self.sizes.values()) + 4)
        self.quota = self.rng.choice([0, 0, 1 + self.rng.below(self.limit)])
        self.pinned = self.rng.choice([None, None, "b0", "b1"])
        self.fail_chance = self.rng.choice([0.0, 0.1, 0.5, 0.9])
        self.short_chance = self.rng.choice([0.0, 0.1])
        self.full_chance = self.rng.choice([0.0, 0.2, 1.0])
        self.cancel_chance = self.rng.choice([0.0, 0.2, 0.6])
        self.restarts = self.rng.below(3)
        self.next_reader = 0
        self.served = self.failed = self.cancelled = self.fetched = self.evicted = 0
        self.boot(())

    def boot(self, survivors: tuple[BlockId, ...]) -> None:
        """A server starts with what its disk holds."""
        self.flights: FlightTable[BlockId] = FlightTable(attempts_max=3)
        self.room = Room(self.limit)
        for number, (bucket, policy) in enumerate(self.policy.items()):
            self.room.set_lot(Lot(number, bucket, "", policy, is_pinned=bucket == self.pinned))
        self.room.set_quota("b1", self.quota)
        self.disk: dict[BlockId, str] = {}
        self.used: dict[BlockId, float] = {}
        self.writing: set[BlockId] = set()
        self.waiting: dict[int, BlockId] = {}
        self.running: dict[int, BlockId] = {}
        self.pins: dict[BlockId, int] = {}
        for block in survivors:
            self.room.take(lot_of(block), self.sizes[block])
            self.disk[block] = content(block)
            self.used[block] = self.now

    def tell(self, what: str) -> str:
        return f"{what} at t={self.now:.2f}; the last events:\n  " + "\n  ".join(self.story[-30:])

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, action))

    def run(self) -> None:
        for _ in range(10 + self.rng.below(50)):
            self.after(self.rng.uniform(0.0, 20.0), self.reader_comes)
        for _ in range(self.restarts):
            self.after(self.rng.uniform(0.0, 20.0), self.restart)
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            assert self.now < _HORIZON, self.tell("the world does not end")
            action()
            self.check()
        assert not self.waiting, self.tell(f"readers {sorted(self.waiting)} wait for ever")
        assert len(self.flights) == 0, self.tell("a flight is left over")
        assert self.room.used_bytes == sum(self.sizes[b] for b in self.disk), self.tell("room is left over")

    def check(self) -> None:
        total = self.room.used_bytes
        assert total <= self.limit, self.tell(f"{total} bytes of {self.limit}")
        taken = sum(self.sizes[b] for b in (*self.disk, *self.writing))
        assert total == taken, self.tell(f"{total} bytes are counted and {taken} are used")
        assert not self.quota or self.room.used_by_bucket("b1") <= self.quota, self.tell("over the quota")
        leading = list(self.running.values())
        assert len(leading) == len(set(leading)), self.tell("two leaders for a block")
        for block, pins in self.pins.items():
            assert pins == 0 or block in self.disk, self.tell(f"pinned {block.key} was evicted")

    def reader_comes(self) -> None:
        self.next_reader += 1
        reader, block = self.next_reader, self.rng.choice(self.blocks)
        if block in self.disk:
            self.used[block] = self.now
            self.serve_held(block)
            return
        self.story.append(f"{self.now:.2f} reader {reader} wants {block.key}")
        self.waiting[reader] = block
        self.carry_out(self.flights.step(Want(block, reader)))
        if self.rng.chance(self.cancel_chance):
            flights = self.flights
            self.after(self.rng.uniform(0.0, 3.0), lambda: self.reader_leaves(flights, reader, block))

    def serve_held(self, block: BlockId) -> None:
        assert self.disk[block] == content(block), self.tell(f"wrong bytes of {block.key} served from disk")
        self.served += 1
        pins = self.pins
        pins[block] = pins.get(block, 0) + 1

        def done() -> None:
            pins[block] -= 1

        self.after(self.rng.uniform(0.0, 2.0), done)

    def reader_leaves(self, flights: FlightTable[BlockId], reader: int, block: BlockId) -> None:
        if flights is self.flights and self.waiting.pop(reader, None) is not None:
            self.story.append(f"{self.now:.2f} reader {reader} leaves")
            self.cancelled += 1
            self.carry_out(self.flights.step(Cancelled(block, reader)))

    def carry_out(self, decision: Decision[BlockId]) -> None:
        for effect in decision.effects:
            if isinstance(effect, Start):
                self.start(effect)
            elif isinstance(effect, Deliver):
                self.deliver(effect)
            elif isinstance(effect, Abort):
                assert self.running.pop(effect.fetch, None) is not None, self.tell("abort of no fetch")
                self.story.append(f"{self.now:.2f} fetch {effect.fetch} aborted")

    def start(self, effect: Start[BlockId]) -> None:
        block, fetch, flights = effect.key, effect.fetch, self.flights
        assert block not in self.running.values(), self.tell(f"two leaders for {block.key}")
        self.running[fetch] = block
        if block in self.disk:
            # A fetch that was aborted had already handed its bytes to the disk; the server looks there first.
            self.story.append(f"{self.now:.2f} {block.key} is here meanwhile")
            self.after(0.0, lambda: self.found(flights, fetch, block))
            return
        self.story.append(f"{self.now:.2f} fetch {fetch} of {block.key} led by {effect.leader}")
        slow = self.rng.chance(0.1)
        self.after(
            self.rng.uniform(0.0, 20.0 if slow else 2.0), lambda: self.origin_answers(flights, fetch, block)
        )

    def found(self, flights: FlightTable[BlockId], fetch: int, block: BlockId) -> None:
        if flights is self.flights and fetch in self.running:
            self.finish(fetch, Fetched(block, fetch))

    def origin_answers(self, flights: FlightTable[BlockId], fetch: int, block: BlockId) -> None:
        if flights is not self.flights:
            return
        late = fetch not in self.running
        if self.rng.chance(self.fail_chance):
            self.finish(fetch, Failed(block, fetch, final=self.rng.chance(0.3)))
            return
        body = content(block)[:-1] if self.rng.chance(self.short_chance) else content(block)
        if len(body) != len(content(block)):
            self.finish(fetch, Failed(block, fetch, final=False))
        elif late or not self.reserve(block):
            self.finish(fetch, Fetched(block, fetch))
        else:
            writing = self.rng.uniform(0.0, 1.0)
            self.after(writing, lambda: self.written(flights, fetch, block, body))

    def reserve(self, block: BlockId) -> bool:
        """Room for the block, made as the policy says; False if it is served without being stored."""
        if block in self.disk or block in self.writing:
            return False
        size, lot = self.sizes[block], lot_of(block)
        while not (need := self.room.ask(lot, size)).fits:
            if need.is_refused:
                return False
            idle = [b for b in self.disk if lot_of(b) in need.lots and not self.pins.get(b)]
            self.rng.shuffle(idle)
            drawn = [Candidate(int(self.used[b] * 10), self.copies_of(b)) for b in idle[:SAMPLE_SIZE]]
            choice = stalest(drawn, int(self.now * 10))
            if choice is None:
                return False
            self.evict(idle[choice.position], choice.why)
        self.room.take(lot, size)
        self.writing.add(block)
        return True

    def copies_of(self, block: BlockId) -> int:
        return 1 + self.rng.below(3) if self.policy[block.bucket] == REPLICA_AWARE else 1

    def evict(self, victim: BlockId, why: str) -> None:
        assert self.policy[victim.bucket] != UNIFORM, self.tell("uniform replaced a block")
        assert victim.bucket != self.pinned, self.tell("what is pinned was replaced")
        self.story.append(f"{self.now:.2f} {victim.key} evicted: {why}")
        self.room.give(lot_of(victim), self.sizes[victim])
        del self.disk[victim], self.used[victim]
        self.evicted += 1

    def written(self, flights: FlightTable[BlockId], fetch: int, block: BlockId, body: str) -> None:
        if flights is not self.flights:
            return
        self.writing.discard(block)
        if self.rng.chance(self.full_chance):
            self.story.append(f"{self.now:.2f} the disk is full")
            self.room.give(lot_of(block), self.sizes[block])
        else:
            self.disk[block] = body
            self.used[block] = self.now
        self.finish(fetch, Fetched(block, fetch))

    def finish(self, fetch: int, event: Fetched[BlockId] | Failed[BlockId]) -> None:
        self.running.pop(fetch, None)
        self.fetched += isinstance(event, Fetched)
        decision = self.flights.step(event)
        self.story.append(f"{self.now:.2f} {type(event).__name__} {fetch}: {decision.why}")
        self.carry_out(decision)

    def deliver(self, effect: Deliver[BlockId]) -> None:
        for reader in effect.readers:
            block = self.waiting.pop(reader, None)
            assert block is not None, self.tell(f"reader {reader} is answered twice or never asked")
            assert block == effect.key, self.tell(
                f"reader {reader} gets {effect.key.key}, wanted {block.key}"
            )
            if effect.failed:
                self.failed += 1
            else:
                self.served += 1

    def restart(self) -> None:
        """kill -9: whoever waits loses the connection; whole files survive, half ones do not."""
        self.story.append(f"{self.now:.2f} the server is killed and starts again")
        self.failed += len(self.waiting)
        self.boot(tuple(self.disk))


def lot_of(block: BlockId) -> int:
    """The number of the lot that a block is counted in."""
    return int(block.bucket[1:])


def content(block: BlockId) -> str:
    """What the origin has under a key."""
    return f"bytes of {block.key}"


def run_world(seed: int) -> str:
    """Run one world; returns a line about it. Raises AssertionError with its story if an invariant breaks."""
    world = CacheWorld(seed)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"cache world {seed}: {error}") from error
    return (
        f"cache world {seed}: {world.served} served, {world.failed} failed, {world.cancelled} cancelled, "
        f"{world.fetched} fetched, {world.evicted} evicted"
    )
