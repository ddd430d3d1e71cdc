"""All that a server has for blobs, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stoker._native import Front
from stoker.base.clock import BootClock, Clock
from stoker.cache.blobs.clock import HybridClock
from stoker.cache.server.blobs.buckets import BlobBucketSpec, open_blob_buckets
from stoker.cache.server.blobs.council import Council
from stoker.cache.server.blobs.face import BlobFace
from stoker.cache.server.blobs.flushing import Flushing
from stoker.cache.server.blobs.handing import Handing
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.blobs.keeping import BlobKeeping
from stoker.cache.server.blobs.reading import BlobReading
from stoker.cache.server.blobs.writing import BlobWriting
from stoker.cache.server.engine import Engine

TTL_S = 1e12
"""What is known of a blob is good until a newer one is written."""


class Blobs:
    """Of one server; without buckets it does nothing. Raises ConfigError, EnvironmentProblem."""

    def __init__(
        self,
        engine: Engine,
        specs: Mapping[str, BlobBucketSpec],
        clock: Clock,
        folder: Path,
    ) -> None:
        self.buckets = open_blob_buckets(engine, specs)
        self._engine = engine
        versions = HybridClock(engine.fleet.me.name)
        holding = Holding(engine.store, versions)
        flushing = Flushing(partial(engine.store.holdings.run, engine.store.index.sync))
        self._council = Council(
            engine.fleet, holding, versions, BootClock(), folder, self.buckets, flushing, engine.store.now_s
        )
        handing = Handing(engine.fleet)
        self._reading = BlobReading(self.buckets, holding, self._council, handing)
        writing = BlobWriting(holding, self._council, clock)
        self.face = BlobFace(engine, self.buckets, holding, self._council, self._reading, writing, handing)
        self.keeping = BlobKeeping(engine.store, engine.fleet, self.buckets, holding, clock)
        self._forgetting: asyncio.Task[None] | None = None

    def rules(self) -> dict[str, tuple[int, float, int]]:
        """What the front is told; see `Metadata.rule`. Since when blobs must have been asked about is told apart."""
        return {name: (bucket.number, TTL_S, 0) for name, bucket in self.buckets.items()}

    def start(self, front: Front) -> None:
        """Once the server is in its fleet, or goes on without."""
        if self.buckets:
            self._council.on_lead = front.set_blobs_until
            self._council.start(self._engine.store.notes)
            self._forgetting = asyncio.get_running_loop().create_task(self.keeping.forget_old())

    async def stop(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        await self._council.stop()
        await self._reading.close()
