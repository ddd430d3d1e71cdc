"""Uploads in parts that clients have begun here as users of the origin, for whoever gives them up after a while.

It is written down in the cache's folder; of uploads that ended meanwhile it may still say that they were begun.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from stoker.base.clock import Clock
from stoker.cache.auth.principals import Principal
from stoker.cache.server.written import read_file, write_file
from stoker.errors import EnvironmentProblem

BEGUN_FILE = "begun-uploads.json"
BEGUN_MAX = 1000
"""What was begun before is not known any more."""


class BegunUpload(msgspec.Struct, frozen=True):
    """`principal`: the name of who has begun it; `begun_s` in seconds since 1970."""

    bucket: str
    key: str
    principal: str
    begun_s: float


class BegunUploads:
    """By their ids, in the order in which they were begun. `notes`: for what operators should know."""

    def __init__(self, folder: Path, clock: Clock, notes: list[str]) -> None:
        self._path = folder / BEGUN_FILE
        self._clock = clock
        self._turn = asyncio.Lock()
        why = "uploads that nobody ends are given up with the server's own key"
        self._known = read_file(self._path, dict[str, BegunUpload], notes, why) or {}

    async def begin(self, bucket: str, key: str, upload_id: str, who: Principal) -> None:
        """Remember it, where who has begun it signs at the origin. Raises EnvironmentProblem."""
        user = who.user_at(bucket)
        if user is None or user.credentials is None:
            return
        self._known[upload_id] = BegunUpload(bucket, key, who.name, self._clock.wall())
        while len(self._known) > BEGUN_MAX:
            del self._known[next(iter(self._known))]
        async with self._turn:
            try:
                await asyncio.to_thread(write_file, self._path, dict(self._known))
            except OSError as error:
                raise EnvironmentProblem(f"cannot write {self._path}: {error.strerror}") from error

    def end(self, upload_id: str) -> None:
        """There is no such upload any more."""
        self._known.pop(upload_id, None)

    def before(self, bucket: str, begun_s: float) -> list[tuple[str, BegunUpload]]:
        """Those to a bucket that were begun before then."""
        return [
            (upload_id, one)
            for upload_id, one in self._known.items()
            if one.bucket == bucket and one.begun_s < begun_s
        ]
