"""Where the newest version of a blob is: here, or at another server, from which it is brought."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

from stoker.cache.blobs.clock import parse_version
from stoker.cache.blobs.keys import BlobName
from stoker.cache.blobs.votes import Said, Which
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.blobs.council import Council
from stoker.cache.server.blobs.handing import Handing
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.flights import Flights
from stoker.cache.store.known import Known
from stoker.errors import CacheError, CacheUnavailable, EnvironmentProblem, ObjectNotFound


class _Wanted(NamedTuple):
    """A version that another server holds; brought once for all who ask for it at the same time."""

    name: BlobName
    newest: Said
    holder: str


class BlobReading:
    """Of one server."""

    def __init__(
        self, buckets: dict[str, BlobBucket], holding: Holding, council: Council, handing: Handing
    ) -> None:
        self._buckets = buckets
        self._holding = holding
        self._council = council
        self._handing = handing
        self._coming: Flights[_Wanted, bool] = Flights(self._bring)

    async def find(self, bucket: BlobBucket, name: BlobName) -> Known:
        """The newest version, which is here then. Raises ObjectNotFound: there is none, or nobody can say which it
        is."""
        try:
            return await self._find(bucket, name)
        except EnvironmentProblem as error:
            raise ObjectNotFound(
                f"no blob {name.key!r} in {bucket.name!r} can be vouched for: {error}"
            ) from error

    async def _find(self, bucket: BlobBucket, name: BlobName) -> Known:
        """Raises ObjectNotFound, EnvironmentProblem."""
        key = name.key
        known = self._holding.known(bucket, key)
        if known is None or not self._council.is_trusted(known):
            verdict, term = await self._council.newest(bucket, key)
            if verdict.which is Which.NOBODYS:
                raise ObjectNotFound(f"no blob {key!r} in {bucket.name!r}: {verdict.why}")
            if verdict.which is Which.THEIRS:
                await self._coming.get(_Wanted(name, verdict.newest, verdict.holder))
            known = self._holding.known(bucket, key)
            if known is None or known.version != verdict.newest.version:
                raise ObjectNotFound(f"{key!r} in {bucket.name!r} is being written")
            self._council.trust(bucket, known, term)
        if not self._holding.is_whole(known):
            self._holding.drop_rest(known)
            raise ObjectNotFound(f"no blob {key!r} in {bucket.name!r}")
        return known

    async def close(self) -> None:
        await self._coming.close()

    async def _bring(self, wanted: _Wanted) -> bool:
        """Raises ObjectNotFound."""
        bucket, newest = self._buckets[wanted.name.bucket], wanted.newest

        async def parts() -> AsyncIterator[bytes]:
            async with aclosing(self._handing.content(wanted.holder, wanted.name, newest)) as content:
                async for part in content:
                    bucket.peer_bytes += len(part)
                    yield part

        try:
            await self._holding.write(
                bucket, wanted.name.key, parse_version(newest.version), newest.size_bytes, parts()
            )
        except (CacheUnavailable, CacheError, EnvironmentProblem) as error:
            raise ObjectNotFound(
                f"{wanted.holder} has {wanted.name.key!r}, and it cannot be had: {error}"
            ) from error
        return True
