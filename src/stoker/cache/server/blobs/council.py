"""One server's part in what the servers of a fleet know of blobs, so that none of them serves one that was overwritten.
How it is decided is in `cache/blobs/`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.base.clock import Clock
from stoker.cache.blobs.clock import BLOB, HybridClock, Version, parse_version
from stoker.cache.blobs.standing import LEASE_S, RENEW_EVERY_S, Standing, view_of
from stoker.cache.blobs.votes import REMEMBERED_S, Said, Verdict, judge, too_many_silent
from stoker.cache.maglev import Member, block_owner_name
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.blobs.flushing import Flushing
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.blobs.messages import Asking, Promised, Question, Told, Vote, Voted
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.written import read_file, write_file
from stoker.cache.store.known import Known
from stoker.errors import CacheUnavailable, EnvironmentProblem, ObjectNotFound, StokerError

T = TypeVar("T")
log = logging.getLogger("stoker.cache")
ANSWER_S = 1.0
"""Longer nobody is waited for."""
WITNESSES = 2
SEEN_FILE = "blob-servers.json"
SEEN_EVERY_S = 600.0
"""So often it is written down who is in the fleet."""
_ALONE = (
    "there is none any more. Start another one, or, if this one is to be alone from now on, start it without a fleet; "
    "to have it go on alone in this one, stop it and remove {path}"
)


class Council:
    """One server's part. `clock` is a `BootClock`. `on_lead` is called with the time until which what is held need not
    be asked about, by the clock, and since when it must have been, seconds since 1970."""

    def __init__(
        self,
        fleet: Fleet,
        holding: Holding,
        versions: HybridClock,
        clock: Clock,
        folder: Path,
        buckets: Mapping[str, BlobBucket],
        flushing: Flushing,
        now_s: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._me = fleet.me.name
        self._holding = holding
        self._versions = versions
        self._clock = clock
        self._path = folder / SEEN_FILE
        self._buckets = buckets
        self._now_s = now_s
        self._flushing = flushing
        self._standing = Standing(self._me, clock.now(), LEASE_S + fleet.lag_s)
        self._term = -1
        self._viewed: tuple[tuple[Member, ...], str] = ((), "")
        self._seen_s: dict[str, float] = {}
        self._seen_written_s = -math.inf
        self._renewing: asyncio.Task[None] | None = None
        self._trusted_from_s = 0
        self.on_lead: Callable[[float, int], None] = lambda until, from_s: None

    def start(self, notes: list[str]) -> None:
        """Ask for promises from now on."""
        if self._fleet.is_single:
            self.on_lead(math.inf, 0)
            return
        seen = read_file(self._path, dict[str, float], notes, "who was in the fleet before is not known")
        # They may have been there for a while after that was written.
        self._seen_s = {name: min(at + SEEN_EVERY_S, self._clock.wall()) for name, at in (seen or {}).items()}
        self._look()
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def stop(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    @property
    def leads(self) -> bool:
        """Whether nobody else writes what is this server's now."""
        if self._fleet.is_single:
            return True
        return self._is_in and self._clock.now() < self._standing.leads_until()

    @property
    def _is_in(self) -> bool:
        """Whether this server is in its fleet: who the others are it knows from then on."""
        return self._renewing is not None and any(m.name == self._me for m in self._fleet.view.members)

    def is_trusted(self, known: Known) -> bool:
        """Whether a version that is held is the newest for sure."""
        return self._fleet.is_single or (self.leads and known.checked_s >= max(1, self._trusted_from_s))

    # -- writing ------------------------------------------------------------------------------------------------

    async def begin(self, bucket: BlobBucket, key: str, kind: str = BLOB) -> tuple[Version, int]:
        """A version for what is written next, newer than all that were acknowledged, and the term that it is written
        in. Raises CacheUnavailable if nothing must be written here now."""
        if not self._fleet.is_single:
            self._check_own(bucket, key)
            self._check_witnesses(bucket, key)
            known = self._holding.known(bucket, key)
            if known is None or not self.is_trusted(known):
                said, objecting = await self._hear_of(bucket, key, self._me)
                now_s = self._clock.wall()
                consenting = said.keys() - objecting.keys()
                silent = too_many_silent(
                    consenting, self._others(), self._seen_s, now_s, is_confirmed=self._is_confirmed
                )
                if silent:
                    why = "; ".join([f"{silent} may know of a newer one", *sorted(objecting.values())])
                    raise CacheUnavailable(f"{key!r} cannot be written now: {why}")
            self._check_own(bucket, key)
        known = self._holding.known(bucket, key)
        if known is not None:
            self._versions.observe(parse_version(known.version))
        return self._versions.next(self._clock.wall(), kind), self._standing.term

    async def tell(self, bucket: BlobBucket, key: str, version: Version, size_bytes: int) -> None:
        """Have it known by two servers, also after power is lost. Raises CacheUnavailable, NoRoom if it is not: it must
        not be acknowledged."""
        if self._fleet.is_single:
            await self._flushing.flush()
            return
        self._check_own(bucket, key)
        witnesses = self._check_witnesses(bucket, key)
        vote = Vote(self._me, self._standing.view, bucket.name, key, str(version), size_bytes)
        _, said = await asyncio.gather(self._flushing.flush(), self._ask(witnesses, "vote", vote, Voted))
        for voted in said.values():
            if voted.newest:
                self._holding.hear(bucket, key, parse_version(voted.newest), voted.newest_bytes)
        self._check_own(bucket, key)
        objections = sorted({voted.objection for voted in said.values() if voted.objection})
        if objections:
            raise CacheUnavailable(f"{key!r} cannot be written now: {'; '.join(objections)}")
        problems = [voted.problem for voted in said.values()]
        if witnesses and all(problems):
            why = "; ".join(problems) or "none answers"
            raise CacheUnavailable(f"no other server has heard of this version: {why}")

    def _check_witnesses(self, bucket: BlobBucket, key: str) -> list[str]:
        """Who else is to know of a new version; nobody, if nobody was ever with this server. Raises CacheUnavailable if
        nobody can be told."""
        placed = self._fleet.view.placement().owners(block_owner_name(bucket.name, key, 0), WITNESSES + 1)
        witnesses = [member.name for member in placed if member.name != self._me][:WITNESSES]
        down = self._fleet.view.down()
        if not all(name in down for name in witnesses) or not (witnesses or self._seen_s):
            return witnesses
        why = f"{' and '.join(witnesses)} cannot be reached" if witnesses else _ALONE.format(path=self._path)
        raise CacheUnavailable(f"{key!r} cannot be written now, for no other server would know of it: {why}")

    def trust(self, bucket: BlobBucket, known: Known, term: int) -> None:
        """It was the newest in that term; if that goes on, nobody need be asked before it is served."""
        self._look()
        owner = self._fleet.view.assigned(block_owner_name(bucket.name, known.key, 0))
        if self._fleet.is_single or (term == self._standing.term and self.leads and owner == self._me):
            self._holding.trust(known)

    def _check_own(self, bucket: BlobBucket, key: str) -> None:
        self._look()
        objection = self._objection(self._me, bucket.name, key)
        if not self._is_in:
            objection = f"{self._me} is not in its fleet yet"
        if objection is not None:
            raise CacheUnavailable(f"{key!r} cannot be written now: {objection}")

    def _objection(self, writer: str, bucket: str, key: str) -> str | None:
        owner = self._fleet.view.assigned(block_owner_name(bucket, key, 0))
        return self._standing.objection(writer, owner, self._clock.now())

    # -- reading ------------------------------------------------------------------------------------------------

    async def newest(self, bucket: BlobBucket, key: str) -> tuple[Verdict, int]:
        """Who holds the newest version of a key, and the term that it was asked in."""
        self._look()
        term = self._standing.term
        said, _ = await self._hear_of(bucket, key)
        mine = self._holding.said(bucket, key)
        verdict = judge(
            mine, said, self._others(), self._seen_s, self._clock.wall(), is_confirmed=self._is_confirmed
        )
        return verdict, term

    async def _hear_of(
        self, bucket: BlobBucket, key: str, writer: str = ""
    ) -> tuple[dict[str, Said], dict[str, str]]:
        """What the others know of a key, the newest of which is known here then; and who objects to its writing."""
        question = Question(bucket.name, key, writer, self._standing.view)
        told = await self._ask(sorted(self._others()), "newest", question, Told)
        said, objecting = {}, {}
        for name, one in told.items():
            if one.objection:
                objecting[name] = one.objection
            said[name] = Said(one.version, one.is_held, one.size_bytes)
            if one.version:
                self._holding.hear(bucket, key, parse_version(one.version), one.size_bytes)
            for seen, at in one.seen_s.items():
                if seen != self._me:
                    self._seen_s[seen] = max(at, self._seen_s.get(seen, 0.0))
        return said, objecting

    # -- what others ask ----------------------------------------------------------------------------------------

    async def answer(self, route: str, body: bytes) -> msgspec.Struct:
        """Raises ObjectNotFound, EnvironmentProblem, msgspec.DecodeError, ValueError: who asked has no answer then."""
        self._look()
        decode = msgspec.msgpack.decode
        if route == "promise":
            asking = decode(body, type=Asking)
            return Promised(self._standing.promise(asking.holder, asking.view, self._clock.now()))
        if route == "vote":
            return await self._vote(decode(body, type=Vote))
        if route == "newest":
            question = decode(body, type=Question)
            said = self._holding.said(self._bucket(question.bucket), question.key)
            objection = ""
            if question.writer:
                objection = self._objection_to(question.writer, question.view, question.bucket, question.key)
            return Told(said.version, said.is_held, said.size_bytes, self._seen_s, objection)
        raise ObjectNotFound(f"there is no /-/blobs/{route}")

    def _bucket(self, name: str) -> BlobBucket:
        if name not in self._buckets:
            raise ObjectNotFound(f"{self._me} has no blob bucket {name!r}, as all servers of a fleet have to")
        return self._buckets[name]

    async def _vote(self, vote: Vote) -> Voted:
        bucket = self._bucket(vote.bucket)
        objection = self._objection_to(vote.writer, vote.view, vote.bucket, vote.key)
        if objection:
            return Voted(objection)
        try:
            self._holding.hear(bucket, vote.key, parse_version(vote.version), vote.size_bytes)
            newest = self._holding.said(bucket, vote.key)
            await self._flushing.flush()
        except EnvironmentProblem as error:
            return Voted(problem=f"{self._me} cannot write it down: {error}")
        objection = f"{self._me} knows of a newer one" if newest.version > vote.version else ""
        return Voted(objection, newest.version, newest.size_bytes)

    def _objection_to(self, writer: str, view: str, bucket: str, key: str) -> str:
        if view != self._standing.view:
            return f"{self._me} sees another fleet"
        return self._objection(writer, bucket, key) or ""

    # -- who is there -------------------------------------------------------------------------------------------

    @property
    def _is_confirmed(self) -> bool:
        return self._is_in and self._standing.is_confirmed(self._clock.now())

    def _others(self) -> frozenset[str]:
        return frozenset(member.name for member in self._fleet.view.members if member.name != self._me)

    def _view(self) -> str:
        members = self._fleet.view.members
        if members is not self._viewed[0]:
            self._viewed = members, view_of(members)
        return self._viewed[1]

    def _look(self) -> None:
        """See who is in the fleet now."""
        if self._fleet.is_single:
            return
        others = self._others()
        now = self._clock.now()
        self._standing.see(self._view(), others, now)
        self._standing.confirm(self._fleet.confirmed_until, now)
        self._notice_term()
        wall_s = self._clock.wall()
        is_new = not others <= self._seen_s.keys()
        self._seen_s |= dict.fromkeys(others, wall_s)
        if not is_new and wall_s - self._seen_written_s < SEEN_EVERY_S:
            return
        self._seen_s = {name: at for name, at in self._seen_s.items() if at >= wall_s - REMEMBERED_S}
        self._seen_written_s = wall_s
        try:
            write_file(self._path, self._seen_s)
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error.strerror)

    def _notice_term(self) -> None:
        if self._term != self._standing.term:
            self._term = self._standing.term
            # Clocks can be set back.
            self._trusted_from_s = max(self._now_s(), self._trusted_from_s) + 1
            self.on_lead(0.0, self._trusted_from_s)

    async def _renew(self) -> None:
        while True:
            try:
                await self._renew_once()
            except Exception:
                # A defect here must not end it: every blob would be asked about for ever.
                log.exception("asking for promises failed")
            await asyncio.sleep(RENEW_EVERY_S)

    async def _renew_once(self) -> None:
        self._look()
        view, asked_at = self._standing.view, self._clock.now()
        said = await self._ask(sorted(self._others()), "promise", Asking(self._me, view), Promised)
        for name, promised in said.items():
            if promised.is_promised:
                self._standing.promised(name, view, asked_at, self._clock.now())
        self._look()
        self.on_lead(self._standing.leads_until() if self._is_in else 0.0, self._trusted_from_s)

    async def _ask(self, names: list[str], route: str, question: object, kind: type[T]) -> dict[str, T]:
        """What those say who answer soon."""
        said: dict[str, T] = {}

        async def ask(name: str) -> None:
            url = self._fleet.url(name)
            if url is None or name in self._fleet.view.down():
                return
            try:
                async with asyncio.timeout(ANSWER_S):
                    said[name] = await self._fleet.peers.ask_about_blobs(url, route, question, kind)
            except TimeoutError:
                log.info("%s is slow to say what it knows of blobs", name)
            except CacheUnavailable as error:
                self._fleet.lost(name, error)
            except StokerError as error:
                log.info("%s cannot say what it knows of blobs: %s", name, error)

        await asyncio.gather(*(ask(name) for name in names))
        return said
