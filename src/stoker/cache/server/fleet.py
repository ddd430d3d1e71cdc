"""This server's part in its fleet: who the others are, which of them to ask, and what they say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import TypeVar

from msgspec.structs import replace

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.fleet.port import Membership
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.maglev import Member
from stoker.cache.route import PEERS_MAX, FleetView, Route
from stoker.cache.server.attending import Attending
from stoker.cache.server.dues import Dues
from stoker.cache.server.peers import Peers
from stoker.cache.server.vetting import Vetting
from stoker.errors import CacheUnavailable, StokerError
from stoker.wire.cache_api import HOPS_MAX, FleetMember, FleetStatus

log = logging.getLogger("stoker.cache")
T = TypeVar("T")
JOIN_S = 3.0
"""After so long a server begins to serve alone, and goes on trying to be in its fleet."""
PROBE_EVERY_S = 0.5


class Fleet:
    """Lives on one event loop. Without `membership` this server is alone."""

    def __init__(
        self,
        me: FleetMember,
        membership: Membership | None,
        peers: Peers,
        clock: Clock,
        rng: Rng,
        block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES,
    ) -> None:
        self.view = FleetView(me.name)
        self._block_size_bytes = block_size_bytes
        self.vetting = Vetting(self.view, peers, clock, rng.fork(1), block_size_bytes)
        self.me = me = replace(me, instance=self.vetting.instance)
        self.dues = Dues(peers, self.lost)
        self.changed_at = -1e9
        self.lag_s = 0.0 if membership is None else membership.lag_s
        self._attending = (
            None if membership is None else Attending(me, membership, self.vetting, clock, rng.fork(2))
        )
        self.peers = peers
        self._clock = clock
        self._rng = rng
        self._urls: dict[str, str] = {}
        self._refreshed: set[str] = set()
        self._members: tuple[FleetMember, ...] = (me,)
        self._joining: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_late_join: Callable[[], None] = lambda: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    @property
    def is_single(self) -> bool:
        """Whether this server is in no fleet."""
        return self._attending is None

    @property
    def has_joined(self) -> bool:
        """Whether it is in its fleet, and knows who else is."""
        return self._watching is not None

    @property
    def confirmed_until(self) -> float:
        """Until then, by `BootClock`, the fleet is sure to be as `view` has it; see `Membership`."""
        return 0.0 if self._watching is None or self._attending is None else self._attending.confirmed_until

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else."""
        return len(self._members) < 2

    @property
    def notes(self) -> list[str]:
        """What operators should know."""
        if self._attending is None:
            return []
        problem, notes = self._attending.problem, [*self._attending.notes, *self.peers.marks.notes]
        if self._watching is None:
            why = problem or "there is no answer yet"
            return [f"this server is not in its fleet yet, goes on trying, and serves alone: {why}", *notes]
        if problem is None:
            return notes
        known = "those who were known last stay its members"
        return [f"the fleet's membership cannot be reached, {known}: {problem}", *notes]

    async def start(self) -> None:
        """Be in the fleet, and know it; where its membership cannot be reached within JOIN_S, as soon as it can be:
        `on_late_join` is called then, or `on_failure` with what is raised here else. Raises ConfigError."""
        if self._attending is None:
            return
        self._joining = asyncio.get_running_loop().create_task(self._join(self._attending))
        await asyncio.wait((self._joining,), timeout=JOIN_S)
        if self._joining.done():
            self._joining.result()
        else:
            self._joining.add_done_callback(self._has_joined_late)

    async def retire(self) -> None:
        """Own nothing any more: others are asked in this server's place, while it still answers and hands on what it
        holds. Returns once they can know."""
        if self._attending is not None and not self.is_alone:
            await self._attending.retire()

    async def leave(self) -> None:
        """Be a member no more."""
        tasks = [task for task in (self._joining, self._watching, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.dues.close()
        if self._attending is not None:
            await self._attending.leave()

    async def close(self) -> None:
        await self.peers.close()

    def status(self, *, is_trusting: bool = True) -> FleetStatus:
        """The fleet as this server sees it, for one who may do everything or may not."""
        return FleetStatus(
            name=self.me.name,
            members=list(self._members),
            down=sorted(self.view.down()),
            block_size_bytes=self._block_size_bytes,
            troubles=self.vetting.troubles(),
            instance=self.vetting.instance,
            is_trusting=is_trusting,
        )

    def route(self, name: str, max_replicas: int, hops: int) -> Route:
        """Where what is placed by that name comes from."""
        return self.view.route(name, max_replicas, hops, HOPS_MAX, self._rng)

    def hops(self, name: str, max_replicas: int, hops: int) -> int:
        """How often a request counts as handed on: HOPS_MAX where it will not be again."""
        return min(hops, HOPS_MAX) if self.route(name, max_replicas, hops).peers else HOPS_MAX

    def url(self, name: str) -> str | None:
        """Where a member is."""
        return self._urls.get(name)

    async def ask(
        self, name: str, max_replicas: int, hops: int, question: Callable[[str], Awaitable[T]]
    ) -> T | None:
        """The answer of whoever has what is placed by that name; None: that is this server, or they cannot answer. One
        that does not know the bucket cannot."""
        for peer, url in self.candidates(name, max_replicas, hops):
            try:
                return await question(url)
            except CacheUnavailable as error:
                self.lost(peer, error)
            except StokerError as error:
                log.debug("%s could not answer: %s", peer, error)
        return None

    def candidates(self, name: str, max_replicas: int, hops: int) -> Iterator[tuple[str, str]]:
        """Whom to ask for what is placed by that name, one after the other, with their URLs. Each is looked up after
        the one before has failed: who owns what may be another by then, perhaps this server."""
        tried: set[str] = set()
        while len(tried) < PEERS_MAX:
            left = [peer for peer in self.route(name, max_replicas, hops).peers if peer not in tried]
            if not left:
                return
            tried.add(left[0])
            url = self._urls.get(left[0])
            if url is not None:
                yield left[0], url

    def lost(self, name: str, error: CacheUnavailable) -> None:
        """A member could not be reached, or refuses this server; one that has left since it was asked is none."""
        if name in self._urls:
            self.vetting.lost(name, str(error))

    async def ask_all(self, question: Callable[[str], Awaitable[T]]) -> tuple[list[T], list[str]]:
        """What every other member says, and the names of those that said nothing."""
        others = [member for member in self._members if member.name != self.me.name]
        said = await asyncio.gather(*(question(member.url) for member in others), return_exceptions=True)
        answers: list[T] = []
        missed = []
        for member, answer in zip(others, said, strict=True):
            if isinstance(answer, CacheUnavailable):
                self.lost(member.name, answer)
            if isinstance(answer, BaseException):
                missed.append(member.name)
            else:
                answers.append(answer)
        return answers, missed

    async def refresh_all(self, bucket: str, prefix: str) -> list[str]:
        """Have every other member drop what it knows under a prefix; the names of those that could not be told, and
        will be as soon as they can be."""
        self._refreshed.add(bucket)
        names = ({member.name for member in self._members} | self.dues.gone) - {self.me.name}
        number = self.dues.owe(names, bucket, prefix)
        known = [name for name in names if name in self._urls]
        await asyncio.gather(*(self.dues.pay(name, self._urls[name]) for name in known))
        return self.dues.missed(bucket, prefix, number)

    def _take(self, members: list[FleetMember]) -> None:
        self._members = tuple(sorted(members, key=lambda member: member.name))
        before, self._urls = self._urls, {member.name: member.url for member in members}
        self.dues.keep(self._urls, before)
        self.peers.keep(self._urls.values())
        self.vetting.keep(self._urls)
        self._tell_new(self._urls.keys() - before.keys() - {self.me.name})
        if self.view.set_members(Member(m.name, m.weight, m.zone) for m in members):
            self.changed_at = self._clock.now()
            names = ", ".join(m.name for m in self._members)
            log.info("the fleet: %s", names)
            self.on_change()

    def _tell_new(self, names: Iterable[str]) -> None:
        """Who comes may have asked before a write and be known here only after it, so that it was not told: it is to
        ask again."""
        for bucket in self._refreshed:
            self.dues.owe(names, bucket, "")
        for name in names if self._refreshed else ():
            self.dues.begin(name, self._urls[name])

    async def _probe(self) -> None:
        """Ask those who could not be reached whether they are back, so that no reader has to find out."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                due = self.view.due(self._clock.now())
                away = [member for member in self._members if member.name in due]
                await asyncio.gather(*(self.vetting.vet(member) for member in away))
                self.vetting.forget({member.name for member in away} - self._urls.keys())
                down = self.view.down()
                for name in self.dues.names:
                    if name in self._urls and name not in down:
                        self.dues.begin(name, self._urls[name])
            except Exception:
                # A defect here must not end it: nobody who is down would ever be asked again.
                log.exception("looking after the fleet failed")

    async def _join(self, attending: Attending) -> None:
        async def join() -> None:
            others = await attending.join()
            self._take(others)  # who owned what until this server came
            self._take([*others, self.me])

        await attending.steadily(join)
        self._watching = asyncio.get_running_loop().create_task(self._watch(attending))
        self._watching.add_done_callback(self._has_ended)
        self._probing = asyncio.get_running_loop().create_task(self._probe())

    def _has_joined_late(self, joining: asyncio.Task[None]) -> None:
        if not self._has_ended(joining):
            log.info("this server is in its fleet now")
            self.on_late_join()

    def _has_ended(self, task: asyncio.Task[None]) -> bool:
        """Whether it was ended by something, which is said where it was not on purpose."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StokerError):
            self.on_failure(error)
        elif error is not None:
            log.error("looking after the fleet ended by a defect", exc_info=error)
        return task.cancelled() or error is not None

    async def _watch(self, attending: Attending) -> None:
        async def watch() -> None:
            async with aclosing(attending.changes()) as changes:
                async for members in changes:
                    self._take(members)

        await attending.steadily(watch)
