"""Buckets that were added while servers run: at this one, or at another of its fleet.

They are written down in the cache's folder. Members tell each other of theirs whenever one of them has asked who the
other is, so that who joins, or was away, has them as well. A bucket of the configuration is never changed by that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.cache.server.buckets import check_bucket, is_known
from stoker.cache.server.engine import Engine
from stoker.cache.server.written import read_file, write_file
from stoker.errors import CacheUnavailable, ConfigError, StokerError
from stoker.wire.cache_api import BucketAdded, BucketSpec, FleetMember, FleetStatus

log = logging.getLogger("stoker.cache")
BUCKETS_FILE = "buckets.json"
DIFFERING_MAX = 1000


class AddedBuckets:
    """For one engine. `on_added` hears of new buckets."""

    def __init__(self, engine: Engine, folder: Path, on_added: Callable[[], None]) -> None:
        self._engine = engine
        self._path = folder / BUCKETS_FILE
        self._on_added = on_added
        self._problem: str | None = None
        self._differing: dict[tuple[str, str], str] = {}
        self.specs: dict[str, BucketSpec] = {}

    @property
    def notes(self) -> list[str]:
        """What operators should know."""
        members = self._members()
        differing = [
            f"bucket {bucket!r} is not the same at {member}: {why}"
            for (member, bucket), why in sorted(self._differing.items())
            if member in members
        ]
        return [*([] if self._problem is None else [self._problem]), *differing]

    def restore(self) -> None:
        """Add what was added before this start. What cannot be is said."""
        notes = self._engine.store.notes
        specs = read_file(self._path, dict[str, BucketSpec], notes, "buckets that were added are not there")
        for name, spec in (specs or {}).items():
            self.specs[name] = spec
            configured = self._engine.buckets.get(name)
            if configured is not None:
                if configured.spec != spec:
                    notes.append(f"bucket {name!r} was added with other settings: the configuration's count")
                del self.specs[name]
                continue
            try:
                self._engine.add_bucket(name, check_bucket(name, spec))
            except StokerError as error:
                notes.append(f"bucket {name!r}, which was added before, cannot be opened: {error}")

    def add(self, name: str, spec: BucketSpec) -> bool:
        """Add a bucket here; False if the very same is there. Raises ConfigError, EnvironmentProblem."""
        if not self._engine.add_bucket(name, check_bucket(name, spec)):
            return False
        self.specs[name] = spec
        self._write()
        self._on_added()
        return True

    def check(self, name: str, spec: BucketSpec) -> None:
        """Raises ConfigError if it cannot be added, because another of that name is here."""
        is_known(self._engine.buckets, name, check_bucket(name, spec))

    async def add_everywhere(self, name: str, spec: BucketSpec) -> tuple[bool, BucketAdded]:
        """Add a bucket here, whether it is new, and at all other servers; nowhere, if it is another one somewhere, for
        bytes of one would come for the other. Raises ConfigError, EnvironmentProblem."""
        self.check(name, spec)
        fleet = self._engine.fleet
        names = {member.url: member.name for member in fleet.status().members}
        refused: dict[str, str] = {}

        async def check(url: str) -> None:
            try:
                await fleet.peers.add_bucket(url, name, spec, is_check=True)
            except ConfigError as error:
                refused[names.get(url, url)] = str(error)

        await fleet.ask_all(check)
        if refused:
            said = "; ".join(f"{member}: {why}" for member, why in sorted(refused.items()))
            raise ConfigError(f"{name!r} is added nowhere, for it is refused by {said}")
        is_new = self.add(name, spec)

        async def tell(url: str) -> None:
            why = await self._tell(names.get(url, url), url, name, spec)
            if why:
                refused[names.get(url, url)] = why

        _, missed = await fleet.ask_all(tell)
        return is_new, BucketAdded(spec, missed, refused)

    async def meet(self, member: FleetMember, said: FleetStatus) -> None:
        """Take over what another server has, and tell it what it has not."""
        self._learn(member.name, said.added)
        for name in self.specs.keys() - said.added.keys():
            try:
                await self._tell(member.name, member.url, name, self.specs[name])
            except CacheUnavailable as error:
                self._engine.fleet.lost(member.name, error)
                return

    def _learn(self, member: str, specs: Mapping[str, BucketSpec]) -> None:
        for name, spec in specs.items():
            try:
                self.add(name, spec)
            except StokerError as error:
                self._differs(member, name, str(error))
            else:
                self._differing.pop((member, name), None)

    async def _tell(self, member: str, url: str, name: str, spec: BucketSpec) -> str:
        """Why it refuses the bucket; empty if it does not. Raises CacheUnavailable."""
        try:
            await self._engine.fleet.peers.add_bucket(url, name, spec)
        except CacheUnavailable:
            raise
        except StokerError as error:
            self._differs(member, name, str(error))
            return str(error)
        self._differing.pop((member, name), None)
        return ""

    def _differs(self, member: str, name: str, why: str) -> None:
        if self._differing.get((member, name)) != why:
            log.warning("bucket %r cannot be shared with %s: %s", name, member, why)
        self._differing[member, name] = why
        if len(self._differing) > DIFFERING_MAX:
            members = {*self._members(), member}  # who is only now met is no member yet
            self._differing = {which: why for which, why in self._differing.items() if which[0] in members}

    def _members(self) -> set[str]:
        return {member.name for member in self._engine.fleet.status().members}

    def _write(self) -> None:
        try:
            write_file(self._path, self.specs)
        except OSError as error:
            self._problem = (
                f"added buckets are not there after a restart: cannot write {self._path}: {error.strerror}"
            )
            log.warning("%s", self._problem)
        else:
            self._problem = None
