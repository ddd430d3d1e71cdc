"""A fleet that meets in a shared folder: each member writes a file of its own, again and again.

Nobody compares clocks: who reads counts on its own clock how long a file has stayed the same. A member whose file does
not change for LEASE_S is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from stoker.errors import EnvironmentProblem
from stoker.wire.cache_api import FleetMember

log = logging.getLogger("stoker.cache")
BEAT_S = 1.0
LEASE_S = 6.0
_SUFFIX = ".member"


class _Written(msgspec.Struct, frozen=True):
    member: FleetMember
    beat: int


class FolderMembership:
    """`folder` is the same for all members, on any file system on which a rename is seen by the others."""

    def __init__(self, folder: Path, beat_s: float = BEAT_S, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._beat_s = beat_s
        self._lease_s = lease_s
        self._me: FleetMember | None = None
        self._beat = int(time.time())
        self._beating: asyncio.Task[None] | None = None
        self._seen: dict[str, tuple[bytes, float]] = {}

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        known: list[FleetMember] | None = None
        while True:
            try:
                found = await asyncio.to_thread(self._read)
            except OSError as error:
                log.warning("the fleet's folder %s cannot be read: %s", self._folder, error.strerror)
            else:
                if found != known:
                    known = found
                    yield found
            await asyncio.sleep(self._beat_s)

    async def announce(self, me: FleetMember) -> None:
        self._me = me
        try:
            await asyncio.to_thread(self._write)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write to the fleet's folder {self._folder}: {error.strerror}"
            ) from error
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating())

    async def leave(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        if self._me is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(os.unlink, self._path(self._me.name))
            self._me = None

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await asyncio.to_thread(self._write)
            except OSError as error:
                log.warning("cannot write to the fleet's folder %s: %s", self._folder, error.strerror)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _write(self) -> None:
        assert self._me is not None
        self._beat += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self._me.name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(_Written(self._me, self._beat)))
        temporary.replace(path)

    def _read(self) -> list[FleetMember]:
        now = time.monotonic()
        found = []
        names = set()
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                said = path.read_bytes()
                written = msgspec.json.decode(said, type=_Written)
            except (OSError, msgspec.DecodeError) as error:
                log.debug("%s is no member: %s", path, error)
                continue
            names.add(path.name)
            before = self._seen.get(path.name)
            if before is None or before[0] != said:
                self._seen[path.name] = said, now
            elif now - before[1] > self._lease_s:
                continue
            found.append(written.member)
        for name in self._seen.keys() - names:
            del self._seen[name]
        return found
