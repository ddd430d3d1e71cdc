"""A seeded world around the shipping cores of blobs: versions, promises, votes and verdicts.

Servers crash, stall, are cut off from each other and from where the fleet meets, are joined by new ones, and come back
with what they held; messages are late and are lost; clocks differ. Whoever asks may ask any server. After an
acknowledged overwrite nobody gets older bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from stoker.base.rng import Rng
from stoker.cache.blobs.clock import HybridClock, parse_version
from stoker.cache.blobs.standing import LEASE_S, RENEW_EVERY_S, Standing, view_of
from stoker.cache.blobs.votes import Said, Which, judge, too_many_silent
from stoker.cache.maglev import Member

HORIZON_S = 60.0
ANSWER_S = 1.0
EPOCH_S = 1e9
WITNESSES = 2
LAG_S, MEMBER_LEASE_S, READ_EVERY_S, MARGIN_S = 6.0, 5.0, 2.0, 0.5
"""Of the place where the fleet meets."""


@dataclass
class Write:
    """One PUT, as who asked for it saw it."""

    number: int
    began_at: float
    ended_at: float = float("inf")
    is_acknowledged: bool = False


@dataclass
class Entry:
    """What a server's disk has of a key. `trusted`: the term of its run that it was confirmed in."""

    version: str
    write: int | None = None
    trusted: tuple[int, int] = (-1, -1)


Wait = Generator["Round", dict[str, object], None]


@dataclass
class Round:
    """A question to some servers, all of whose answers count that come in time."""

    names: list[str]
    route: str
    question: object


@dataclass
class Server:
    """Durable: `disk`, `seen`. All else is new with each run."""

    name: str
    skew_s: float
    disk: dict[str, Entry] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    members: frozenset[str] = frozenset()
    confirmed_until: float = 0.0
    meets_again_at: float = 0.0
    run: int = 0
    is_up: bool = False
    stalled_until: float = 0.0
    standing: Standing = field(default_factory=lambda: Standing("", 0.0))
    versions: HybridClock = field(default_factory=lambda: HybridClock(""))

    @property
    def others(self) -> frozenset[str]:
        return self.members - {self.name}


class BlobWorld:
    """Some servers, some keys, and those who put and get them."""

    def __init__(self, seed: int) -> None:
        self.rng = Rng(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.story: list[str] = []
        self.horizon_s = HORIZON_S
        count = 2 + self.rng.below(4)
        skew_s = self.rng.choice([0.0, 0.1, 5.0, 20.0])
        names = [f"s{n}" for n in range(count)]
        self.servers = {name: Server(name, self.between(-skew_s, skew_s)) for name in names}
        self.is_static = self.rng.below(2) == 0
        self.delays_s = self.rng.choice([[0.01], [0.01, 0.1, 0.1], [0.01, 0.1, 1.5]])
        self.loss = self.rng.choice([0.0, 0.01, 0.1])
        self.keys = ["k0", "k1"][: 1 + self.rng.below(2)]
        self.orders = {key: self.shuffled(names) for key in self.keys}
        self.cut: set[frozenset[str]] = set()
        self.writes: dict[str, list[Write]] = {key: [] for key in self.keys}
        self.acknowledged = self.served = self.missed = self.refused = 0
        self.leases: dict[str, float] = {}
        self.fleet: frozenset[str] = frozenset(names) if self.is_static else frozenset()
        for name in names:
            self.boot(self.servers[name])
        self.plan()

    # -- chance and time ----------------------------------------------------------------------------------------

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.below(10_000) / 10_000

    def shuffled(self, names: Iterable[str]) -> list[str]:
        left, order = list(names), []
        while left:
            order.append(left.pop(self.rng.below(len(left))))
        return order

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now:7.3f} {text}")

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay_s, self.sequence, action))

    def plan(self) -> None:
        if self.rng.below(2):
            # One thing after the other: what follows from it is seen.
            first_s, step_s, lasts_s = self.rng.choice([(12, 16, 16.0), (12, 4, 85.0)])
            self.horizon_s = HORIZON_S if lasts_s < HORIZON_S else 2 * HORIZON_S
            scenes = [lambda: self.islands(lasts_s), self.crash, self.come]
            for number in range(3):
                self.after(self.between(first_s, first_s + step_s) + step_s * number, self.rng.choice(scenes))
        else:
            faults = [self.crash, self.stall, self.cut_off, self.heal, self.leave, self.come]
            for _ in range(6 + self.rng.below(30)):
                self.after(self.between(5, HORIZON_S), self.rng.choice(faults))
        for _ in range(40 + self.rng.below(200)):
            self.after(self.between(0, HORIZON_S), self.client)

    def run(self) -> str:
        while self.events and self.events[0][0] < self.horizon_s:
            self.now, _, action = heapq.heappop(self.events)
            action()
        size = len(self.servers)
        return (
            f"well: {size} servers after {self.acknowledged} acknowledged, {self.refused} refused, "
            f"{self.served} served, {self.missed} missed"
        )

    # -- faults -------------------------------------------------------------------------------------------------

    def boot(self, server: Server) -> None:
        server.run += 1
        server.is_up = True
        lag_s = 0.0 if self.is_static else LAG_S
        server.standing = Standing(server.name, self.now, LEASE_S + lag_s)
        server.versions = HybridClock(server.name)
        server.members, server.confirmed_until = frozenset({server.name}), 0.0
        self.act(server, lambda: self.attend(server))
        self.act(server, lambda: self.renew(server))
        self.tell(f"{server.name} starts")

    def attend(self, server: Server) -> None:
        """Be a member, and hear who else is: both by one message to where the fleet meets, and one back."""
        asked_at = self.now

        def meet() -> None:
            if self.is_static:
                answer(self.fleet, float("inf"))
            elif self.now >= server.meets_again_at:
                self.leases[server.name] = self.now + MEMBER_LEASE_S
                self.expire()
                fleet = self.fleet
                until = asked_at + MEMBER_LEASE_S - MARGIN_S
                self.after(
                    self.between(0, self.rng.choice([0.01, 1.0])),
                    lambda: self.act_in(server, run, lambda: answer(fleet, until)),
                )

        def answer(fleet: frozenset[str], until: float) -> None:
            server.members = fleet | {server.name}
            self.look(server)
            server.confirmed_until = max(until, server.confirmed_until)
            self.look(server)

        run = server.run
        self.after(self.between(0, 0.01), meet)
        self.after(READ_EVERY_S, lambda: self.act_in(server, run, lambda: self.attend(server)))

    def expire(self) -> None:
        fleet = frozenset(name for name, until in self.leases.items() if until > self.now)
        if fleet != self.fleet:
            self.fleet = fleet
            self.tell(f"the fleet is {sorted(fleet)}")

    def one(self) -> Server:
        return self.servers[self.rng.choice(sorted(self.servers))]

    def crash(self) -> None:
        server = self.one()
        if server.is_up:
            server.is_up = False
            self.tell(f"{server.name} is killed")
            self.after(self.between(0.1, 20), lambda: self.boot(server))

    def stall(self) -> None:
        server = self.one()
        server.stalled_until = self.now + self.between(0.1, 12)
        self.tell(f"{server.name} stands still until {server.stalled_until:.3f}")

    def cut_off(self) -> None:
        some = set(self.shuffled(self.servers)[: 1 + self.rng.below(len(self.servers))])
        pairs = {frozenset((a, b)) for a in some for b in self.servers if b not in some}
        self.cut |= pairs
        self.tell(f"{sorted(some)} are cut off")
        self.after(self.between(0.5, 15), lambda: self.cut.difference_update(pairs))

    def islands(self, most_s: float) -> None:
        """Some are cut off from all others, and perhaps from where the fleet meets, or from nobody but that, and asked
        on as the others are."""
        key, lasts_s = self.rng.choice(self.keys), self.between(most_s / 5, most_s)
        order = self.shuffled(self.servers)
        if self.rng.below(3):
            owner = next((name for name in self.orders[key] if self.servers[name].is_up), order[0])
            order = [owner, *(name for name in order if name != owner)]
        some = order[: 1 + self.rng.below(max(1, len(order) // 2))]
        others = [name for name in order if name not in some]
        self.put_at(key, some[0])
        self.after(3.0, lambda: self.cut_out(some, others, key, lasts_s))

    def cut_out(self, some: list[str], others: list[str], key: str, lasts_s: float) -> None:
        which = self.rng.below(3)
        pairs = {frozenset((a, b)) for a in some for b in others} if which else set()
        self.cut |= pairs
        self.after(lasts_s, lambda: self.cut.difference_update(pairs))
        for name in some if which < 2 else ():
            self.servers[name].meets_again_at = max(self.servers[name].meets_again_at, self.now + lasts_s)
        self.tell(f"{sorted(some)} are an island ({which}) for {lasts_s:.3f} s")
        for _ in range(4 + int(lasts_s / 10)):
            self.after(self.between(0, lasts_s), lambda: self.put_at(key, self.rng.choice(others or some)))
            self.after(self.between(0, lasts_s + 4), lambda: self.get_at(key, self.rng.choice(some)))

    def heal(self) -> None:
        self.cut.clear()

    def leave(self) -> None:
        """Some hear nothing of where the fleet meets for a while, which loses them, and run on."""
        lost = self.shuffled(self.servers)[: 1 + self.rng.below(len(self.servers))]
        until = self.now + self.between(0.5, 15)
        for name in lost:
            self.servers[name].meets_again_at = until
        self.tell(f"{sorted(lost)} do not meet until {until:.3f}")

    def come(self) -> None:
        """A new one comes."""
        if not self.is_static and len(self.servers) < 7:
            name = f"s{len(self.servers)}"
            server = self.servers[name] = Server(name, 0.0)
            for order in self.orders.values():
                order.insert(self.rng.below(len(order) + 1), name)
            self.boot(server)

    # -- servers ------------------------------------------------------------------------------------------------

    def act(self, server: Server, action: Callable[[], None]) -> None:
        """As soon as it runs; never if that run is over."""
        run = server.run
        if server.stalled_until > self.now:
            self.after(
                server.stalled_until - self.now + self.between(0, 0.01),
                lambda: self.act_in(server, run, action),
            )
        else:
            self.act_in(server, run, action)

    def act_in(self, server: Server, run: int, action: Callable[[], None]) -> None:
        if server.is_up and server.run == run:
            if server.stalled_until > self.now:
                self.act(server, action)
            else:
                action()

    def look(self, server: Server) -> None:
        server.standing.see(view_of(Member(name) for name in server.members), server.others, self.now)
        server.standing.confirm(server.confirmed_until, self.now)
        server.seen |= dict.fromkeys(server.others, self.wall(server))

    def wall(self, server: Server) -> float:
        return EPOCH_S + self.now + server.skew_s

    def owner(self, server: Server, key: str) -> str:
        return next(name for name in self.orders[key] if name in server.members)

    def said(self, server: Server, key: str) -> Said:
        entry = server.disk.get(key)
        return Said("", False) if entry is None else Said(entry.version, entry.write is not None)

    def hear(self, server: Server, key: str, version: str) -> str:
        server.versions.observe(parse_version(version))
        known = self.said(server, key).version
        if known >= version:
            return known
        server.disk[key] = Entry(version)
        return version

    def leads(self, server: Server) -> bool:
        return self.now < server.standing.leads_until()

    def is_confirmed(self, server: Server) -> bool:
        return server.standing.is_confirmed(self.now)

    def is_trusted(self, server: Server, key: str) -> bool:
        entry = server.disk.get(key)
        return (
            entry is not None and self.leads(server) and entry.trusted == (server.run, server.standing.term)
        )

    def trust(self, server: Server, key: str, version: str, term: int) -> None:
        self.look(server)
        entry = server.disk[key]
        is_ours = self.leads(server) and self.owner(server, key) == server.name
        if entry.version == version and term == server.standing.term and is_ours:
            entry.trusted = server.run, term

    def objection(self, server: Server, writer: str, key: str) -> str | None:
        return server.standing.objection(writer, self.owner(server, key), self.now)

    def renew(self, server: Server) -> None:
        self.look(server)
        view, asked_at = server.standing.view, self.now

        def talk() -> Wait:
            said = yield Round(sorted(server.others), "promise", (server.name, view))
            for name, promised in said.items():
                if promised:
                    server.standing.promised(name, view, asked_at, self.now)

        self.converse(server, talk())
        self.after(
            RENEW_EVERY_S, lambda: self.act(server, lambda: self.renew(server)) if server.is_up else None
        )

    def answer(self, server: Server, route: str, question: object) -> object:
        self.look(server)
        if route == "promise":
            holder, view = question  # type: ignore[misc]
            return server.standing.promise(holder, view, self.now)
        if route == "vote":
            writer, view, key, version = question  # type: ignore[misc]
            if view != server.standing.view or self.objection(server, writer, key) is not None:
                return (False, "")
            return (True, self.hear(server, key, version))
        if route == "newest":
            key, writer, view = question  # type: ignore[misc]
            is_against = bool(writer) and (
                view != server.standing.view or self.objection(server, writer, key) is not None
            )
            return self.said(server, key), dict(server.seen), is_against
        key, version = question  # type: ignore[misc]
        entry = server.disk.get(key)
        return entry.write if entry is not None and entry.version == version else None

    # -- talk ---------------------------------------------------------------------------------------------------

    def converse(self, server: Server, talk: Wait) -> None:
        self.go_on(server, talk, None)

    def go_on(self, server: Server, talk: Wait, said: dict[str, object] | None) -> None:
        try:
            wanted = next(talk) if said is None else talk.send(said)
        except StopIteration:
            return
        answers: dict[str, object] = {}
        is_done: list[bool] = []

        def end() -> None:
            if not is_done:
                is_done.append(True)
                self.go_on(server, talk, answers)

        def take(name: str, answer: object) -> None:
            if not is_done:
                answers[name] = answer
                if len(answers) == len(wanted.names):
                    end()

        for name in wanted.names:
            self.send(server, self.servers[name], wanted, take)
        self.after(ANSWER_S if wanted.names else 0.0, lambda run=server.run: self.act_in(server, run, end))

    def send(self, server: Server, peer: Server, wanted: Round, take: Callable[[str, object], None]) -> None:
        def arrive(target: Server, action: Callable[[], None]) -> None:
            is_lost = (
                frozenset((server.name, peer.name)) in self.cut or self.rng.below(1000) < self.loss * 1000
            )
            if not is_lost:
                delay_s = self.between(0.0, self.rng.choice(self.delays_s))
                self.after(delay_s, lambda: self.act(target, action))

        run = server.run

        def reply() -> None:
            answer = self.answer(peer, wanted.route, wanted.question)
            arrive(server, lambda: take(peer.name, answer) if server.run == run else None)

        arrive(peer, reply)

    # -- those who put and get ------------------------------------------------------------------------------------

    def get_at(self, key: str, name: str) -> None:
        server = self.servers[name]
        self.act(server, lambda began_at=self.now: self.converse(server, self.get(server, key, began_at)))

    def put_at(self, key: str, name: str) -> None:
        server, write = self.servers[name], Write(len(self.writes[key]), self.now)
        self.writes[key].append(write)
        self.act(server, lambda: self.converse(server, self.put(server, key, write)))

    def client(self) -> None:
        key = self.rng.choice(self.keys)
        sees = self.one()
        up = [name for name in self.orders[key] if name in sees.members and self.servers[name].is_up]
        server = self.servers[up[0]] if up and self.rng.below(4) else self.one()
        if self.rng.below(3):
            self.get_at(key, server.name)
        else:
            self.put_at(key, server.name)

    def asked(self, server: Server, answers: dict[str, object], key: str) -> dict[str, Said]:
        said = {}
        for name, (one, seen, _) in answers.items():  # type: ignore[misc]
            said[name] = one
            if one.version:
                self.hear(server, key, one.version)
            for other, at in seen.items():
                if other != server.name:
                    server.seen[other] = max(at, server.seen.get(other, 0.0))
        return said

    def put(self, server: Server, key: str, write: Write) -> Wait:
        version = yield from self.put_or_why(server, key, write)  # type: ignore[misc]
        write.ended_at = self.now
        if version and version[0] == "!":
            self.refused += 1
            self.tell(f"{server.name} refuses write {write.number} of {key}: {version[1:]}")
            entry = server.disk.get(key)
            if entry is not None and entry.write == write.number:
                server.disk[key] = Entry(str(server.versions.next(self.wall(server), "x")))
        else:
            self.acknowledged += 1
            write.is_acknowledged = True
            self.tell(f"{server.name} acknowledges write {write.number} of {key}: {version}")

    def put_or_why(self, server: Server, key: str, write: Write):  # type: ignore[no-untyped-def]
        self.look(server)
        if (why := self.objection(server, server.name, key)) is not None:
            return f"!{why}"
        if not self.is_trusted(server, key):
            answers = yield Round(sorted(server.others), "newest", (key, server.name, server.standing.view))
            self.look(server)
            self.asked(server, answers, key)
            consenting = [name for name, (_, _, is_against) in answers.items() if not is_against]
            silent = too_many_silent(
                consenting,
                server.others,
                server.seen,
                self.wall(server),
                is_confirmed=self.is_confirmed(server),
            )
            if silent:
                return f"!{silent} are silent"
        if (why := self.objection(server, server.name, key)) is not None:
            return f"!{why}"
        if key in server.disk:
            server.versions.observe(parse_version(server.disk[key].version))
        version, term = str(server.versions.next(self.wall(server))), server.standing.term
        server.disk[key] = Entry(version, write.number)
        self.look(server)
        order = [name for name in self.orders[key] if name in server.others]
        question = server.name, server.standing.view, key, version
        votes = yield Round(order[:WITNESSES], "vote", question)
        if (why := self.objection(server, server.name, key)) is not None:
            return f"!{why}"
        for _, newest in votes.values():
            if newest:
                self.hear(server, key, newest)
        if not votes or not all(is_for and newest == version for is_for, newest in votes.values()):
            return "!nobody has heard of it, or somebody objects"
        if server.disk[key].version == version:
            self.trust(server, key, version, term)
        return version

    def get(self, server: Server, key: str, began_at: float) -> Wait:
        self.look(server)
        if self.is_trusted(server, key):
            self.serve(server, key, server.disk[key].write, began_at)
            return
        term = server.standing.term
        answers = yield Round(sorted(server.others), "newest", (key, "", ""))
        self.look(server)
        said = self.asked(server, answers, key)
        mine = self.said(server, key)
        is_confirmed = self.is_confirmed(server)
        verdict = judge(mine, said, server.others, server.seen, self.wall(server), is_confirmed=is_confirmed)
        if verdict.which is Which.NOBODYS:
            self.missed += 1
            return
        version = verdict.newest.version
        if verdict.which is Which.THEIRS:
            brought = yield Round([verdict.holder], "bytes", (key, version))
            write = brought.get(verdict.holder)
            if write is None or server.disk[key].version != version:
                self.missed += 1
                return
            server.disk[key].write = write  # type: ignore[assignment]
        self.trust(server, key, version, term)
        self.serve(server, key, server.disk[key].write, began_at)

    def serve(self, server: Server, key: str, number: int | None, began_at: float) -> None:
        if number is None:
            self.missed += 1
            return
        self.served += 1
        self.tell(f"{server.name} serves write {number} of {key}, asked at {began_at:.3f}")
        given = self.writes[key][number]
        for write in self.writes[key]:
            is_older = given.ended_at < write.began_at
            if write.is_acknowledged and write.ended_at < began_at and is_older:
                story = "\n  ".join(self.story[-40:])
                raise AssertionError(
                    f"{server.name} gives write {number} of {key}, and {write.number} was acknowledged; the last "
                    f"events:\n  {story}"
                )


def run_world(seed: int) -> str:
    """A verdict in words. Raises AssertionError with the story if an invariant is violated."""
    try:
        return BlobWorld(seed).run()
    except AssertionError as error:
        raise AssertionError(f"blob world {seed}: {error}") from None
