"""A fleet that meets in a shared folder: each member writes a file of its own, again and again.

Nobody compares clocks: who reads counts on its own clock how long a file has stayed the same. A member whose file does
not change for LEASE_S is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from stoker.base.clock import BootClock
from stoker.cache.fleet.reach import Reach
from stoker.errors import EnvironmentProblem
from stoker.wire.cache_api import FleetMember

T = TypeVar("T")
log = logging.getLogger("stoker.cache")
BEAT_S = 1.0
LEASE_S = 6.0
MARGIN_S = 0.5
_SUFFIX = ".member"


class _Written(msgspec.Struct, frozen=True):
    member: FleetMember
    beat: int


class _Seen(NamedTuple):
    """What a file said, and since when."""

    said: bytes
    since: float


class FolderMembership:
    """`folder` is the same for all members, on any file system on which a rename is seen by the others."""

    def __init__(self, folder: Path, beat_s: float = BEAT_S, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._beat_s = beat_s
        self._lease_s = lease_s
        self._me: FleetMember | None = None
        self._beat = int(time.time())
        self._thread = ThreadPoolExecutor(1, "stoker-cache-members")
        self._beating: asyncio.Task[None] | None = None
        self._seen: dict[str, _Seen] = {}
        self._is_told_anew = False
        self._written: bytes | None = None
        self._foreign: bytes | None = None  # what somebody else has put into this server's file
        self._reach = Reach()
        self._clock = BootClock()
        self._written_at = -math.inf
        self._read_at = -math.inf

    @property
    def problem(self) -> str | None:
        return self._reach.problem

    @property
    def confirmed_until(self) -> float:
        """As far as the others see soon what is renamed."""
        return min(self._written_at, self._read_at) + self._lease_s - MARGIN_S

    @property
    def lag_s(self) -> float:
        return self._lease_s

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        known: list[FleetMember] | None = None
        while True:
            asked_at = self._clock.now()
            try:
                if known is None:  # later it is only looked at: one that is gone may be a mount that is
                    await self._run(self._make)
                found = await self._run(self._read)
            except OSError as error:
                why = f"the fleet's folder {self._folder} cannot be read: {error.strerror}"
                self._reach.failed("reading", why)
            else:
                self._reach.worked("reading")
                if found != known or self._is_told_anew:
                    self._is_told_anew = False
                    known = found
                    yield found
                self._read_at = asked_at
            await asyncio.sleep(self._beat_s)

    async def announce(self, me: FleetMember) -> None:
        self._me = me
        try:
            await self._run(self._make)
        except OSError as error:
            raise EnvironmentProblem(self._unwritten(error)) from error
        await self._beat_once()
        self._is_told_anew = True  # what is found from now on is no longer left from before
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating())

    async def leave(self) -> None:
        self._written_at = -math.inf
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        if self._me is not None:
            name = self._me.name
            with contextlib.suppress(OSError):
                await self._run(lambda: os.unlink(self._path(name)))
            self._me = None

    async def _run(self, work: Callable[[], T]) -> T:
        """In a thread of its own: an origin that takes all others must not make this server fall silent."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            with contextlib.suppress(EnvironmentProblem):
                await self._beat_once()

    async def _beat_once(self) -> None:
        """Raises EnvironmentProblem."""
        asked_at = self._clock.now()
        try:
            await self._run(self._write)
        except OSError as error:
            raise EnvironmentProblem(self._unwritten(error)) from error
        self._written_at = asked_at
        self._reach.worked("writing")

    def _unwritten(self, error: OSError) -> str:
        why = f"cannot write to the fleet's folder {self._folder}: {error.strerror}"
        self._reach.failed("writing", why)
        return why

    def _make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _write(self) -> None:
        assert self._me is not None
        self._beat += 1
        path = self._path(self._me.name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            found = path.read_bytes()
            self._foreign = found if self._written not in (None, found) else self._foreign
        written = msgspec.json.encode(_Written(self._me, self._beat))
        temporary.write_bytes(written)
        temporary.replace(path)
        self._written = written

    def _read(self) -> list[FleetMember]:
        now = time.monotonic()
        found = []
        names = {name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)}
        for name in sorted(names):
            before = self._seen.get(name)
            said = None if before is None else before.said
            with contextlib.suppress(OSError):  # what cannot be read now is what it was, until its lease ends
                said = (self._folder / name).read_bytes()
            if self._me is not None and name == self._path(self._me.name).name:
                # It is told, though it is overwritten by now.
                said, self._foreign = self._foreign or said, None
            if said is None:
                continue
            if before is None or before.said != said:
                before = self._seen[name] = _Seen(said, now)
            if now - before.since > self._lease_s:
                continue
            try:
                found.append(msgspec.json.decode(said, type=_Written).member)
            except ValueError as error:  # it need not even be text
                log.debug("%s is no member: %s", name, error)
        for name in self._seen.keys() - names:
            del self._seen[name]
        return found
