"""Uploads that nobody completes or gives up: they are given up after a while, as who has begun them by the server at
which he did, and all others by the bucket's owner as itself."""

from __future__ import annotations

import asyncio
import logging

from stoker.base.clock import Clock
from stoker.cache.auth.access import Access
from stoker.cache.maglev import block_owner_name
from stoker.cache.server.begun import BegunUploads
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.errors import NoSuchUpload, StokerError

log = logging.getLogger("stoker.cache")
EVERY_S = 3600.0
AGE_S = 7 * 86400.0
"""Nobody writes for so long. Lifecycle rules of S3 are mostly set to it."""


class Cleaning:
    """Of one engine: soon after the start, and now and then."""

    def __init__(self, engine: Engine, access: Access, clock: Clock, begun: BegunUploads) -> None:
        self._engine = engine
        self._access = access
        self._begun = begun
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.clean()
            except Exception:
                # A defect here must not end it.
                log.exception("giving up uploads that nobody ends failed")
            await asyncio.sleep(EVERY_S)

    async def clean(self) -> int:
        """Give up what is too old; how many those were."""
        count = 0
        for bucket in list(self._engine.buckets.values()):
            if not bucket.spec.writable:
                continue
            count += await self._give_up_begun(bucket)
            if not self._owns(bucket):
                continue
            try:
                found = await bucket.writable_origin.clean_up(self._clock.wall(), AGE_S)
            except StokerError as error:
                log.warning("uploads to %s that nobody ends cannot be given up now: %s", bucket.name, error)
                continue
            if found:
                log.info("%d uploads to %s that nobody ended are given up", found, bucket.name)
            count += found
        return count

    async def _give_up_begun(self, bucket: Bucket) -> int:
        """Those that were begun here, as who has begun them; how many those were."""
        count = 0
        for upload_id, begun in self._begun.before(bucket.name, self._clock.wall() - AGE_S):
            who = self._access.named(begun.principal)
            user = None if who is None else who.user_at(bucket.name)
            if user is None:
                continue  # nobody by now: it is given up by the server itself
            try:
                await bucket.writable_origin.written_as(user).abort_upload(begun.key, upload_id)
            except NoSuchUpload:
                pass
            except StokerError as error:
                log.warning(
                    "an upload to %s that %s has not ended cannot be given up as that user: %s",
                    bucket.name,
                    begun.principal,
                    error,
                )
                continue
            else:
                count += 1
                log.info("an upload to %s that %s has not ended is given up", bucket.name, begun.principal)
            self._begun.end(upload_id)
        return count

    def _owns(self, bucket: Bucket) -> bool:
        return not self._engine.fleet.route(block_owner_name(bucket.name, "", 0), 1, 0).peers
