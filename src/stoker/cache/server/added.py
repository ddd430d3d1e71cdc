"""Buckets that were added while servers run: at this one, or at another of its fleet.

They are written down in the cache's folder. Members tell each other of theirs whenever one of them has asked who the
other is, so that who joins, or was away, has them as well. A bucket of the configuration is never changed by that.

Those that S3 clients made can be removed as well. What is known of a name is then whether it was made or removed last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from stoker.cache.server.buckets import check_bucket, is_known
from stoker.cache.server.engine import Engine
from stoker.cache.server.written import read_file, write_file
from stoker.errors import CacheUnavailable, ConfigError, StokerError
from stoker.wire.cache_api import BucketAdded, BucketRemoved, BucketSpec, FleetMember, FleetStatus

log = logging.getLogger("stoker.cache")
BUCKETS_FILE = "buckets.json"
REMOVED_FILE = "removed-buckets.json"
REMOVED_MAX = 10_000
DIFFERING_MAX = 1000


class AddedBuckets:
    """For one engine. `on_added` hears of new buckets."""

    def __init__(self, engine: Engine, folder: Path, on_added: Callable[[], None]) -> None:
        self._engine = engine
        self._path = folder / BUCKETS_FILE
        self._removed_path = folder / REMOVED_FILE
        self._on_added = on_added
        self._problem: str | None = None
        self._differing: dict[tuple[str, str], str] = {}
        self.specs: dict[str, BucketSpec] = {}
        self.removed: dict[str, int] = {}
        """When buckets were removed last, in milliseconds since 1970."""

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
        why = "buckets that were removed may come again from servers that were away"
        self.removed = read_file(self._removed_path, dict[str, int], notes, why) or {}
        specs = read_file(self._path, dict[str, BucketSpec], notes, "buckets that were added are not there")
        for name, spec in (specs or {}).items():
            if 0 < spec.made_ms <= self.removed.get(name, 0):
                continue  # the power went before it was written down that it is not there any more
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
        """Add a bucket here; False if the very same is there, or it was removed since it was made. Raises ConfigError,
        EnvironmentProblem."""
        if 0 < spec.made_ms <= self.removed.get(name, 0):
            return False
        if not self._engine.add_bucket(name, check_bucket(name, spec)):
            self._made_again(name, spec)
            return False
        self.specs[name] = spec
        self._write()
        self._on_added()
        return True

    def _made_again(self, name: str, spec: BucketSpec) -> None:
        """Two servers made it at the same time: it was made last when the later one did."""
        known = self.specs.get(name)
        if known is not None and 0 < known.made_ms < spec.made_ms:
            self.specs[name] = spec
            self._write()

    def remove(self, name: str, at_ms: int) -> None:
        """Have a bucket no more that an S3 client made, and remember it. Raises EnvironmentProblem."""
        spec = self.specs[name]
        self._forget(name, max(at_ms, spec.made_ms))

    def removed_elsewhere(self, name: str, at_ms: int) -> None:
        """Another server says that a bucket was removed then. Raises EnvironmentProblem."""
        spec = self.specs.get(name)
        is_of_earlier = spec is None or 0 < spec.made_ms <= at_ms
        if is_of_earlier and at_ms > self.removed.get(name, 0):
            self._forget(name, at_ms)

    def _forget(self, name: str, at_ms: int) -> None:
        bucket = self._engine.buckets.get(name)
        if name in self.specs and bucket is not None:
            self._engine.remove_bucket(bucket)  # where the disk refuses, all stays as it is
        self.specs.pop(name, None)
        self.removed[name] = at_ms
        while len(self.removed) > REMOVED_MAX:
            del self.removed[min(self.removed, key=lambda name: self.removed[name])]
        self._write()
        self._on_added()

    async def remove_everywhere(self, name: str, at_ms: int) -> BucketRemoved:
        """Have it no more here, and at all other servers. Raises EnvironmentProblem."""
        self.remove(name, at_ms)
        at_ms = self.removed[name]
        fleet = self._engine.fleet
        _, missed = await fleet.ask_all(lambda url: fleet.peers.remove_bucket(url, name, at_ms))
        return BucketRemoved(missed)

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
        for name, at_ms in said.removed.items():
            with suppress(StokerError):
                self.removed_elsewhere(name, at_ms)
        self._learn(member.name, said.added)
        try:
            for name, at_ms in list(self.removed.items()):
                if at_ms > said.removed.get(name, 0):
                    await self._engine.fleet.peers.remove_bucket(member.url, name, at_ms)
        except CacheUnavailable as error:
            self._engine.fleet.vetting.lost(member.name, str(error))  # it may be none yet
            return
        except StokerError as error:
            log.warning("%s does not remove what was removed: %s", member.name, error)
        for name in self.specs.keys() - said.added.keys():
            spec = self.specs.get(name)
            if spec is None:
                continue  # it was removed while others were told of
            try:
                await self._tell(member.name, member.url, name, spec)
            except CacheUnavailable as error:
                self._engine.fleet.vetting.lost(member.name, str(error))
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
            # Removals first: see `restore`.
            if self.removed:
                write_file(self._removed_path, self.removed)
            write_file(self._path, self.specs)
        except OSError as error:
            self._problem = (
                f"added buckets are not there after a restart: cannot write {self._path}: {error.strerror}"
            )
            log.warning("%s", self._problem)
        else:
            self._problem = None
