"""Buckets that S3 clients make and remove: each is a folder, or a prefix, below one origin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress

from msgspec.structs import replace

from stoker.base.clock import Clock
from stoker.cache.auth.s3_refusal import S3Refusal
from stoker.cache.origin.open import below, make_place, remove_place
from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.s3 import operation_types as ops
from stoker.cache.server.s3.call import Call
from stoker.cache.server.s3.errors import no_such_bucket
from stoker.cache.server.s3.xml import read_location
from stoker.errors import StokerError
from stoker.wire.cache_api import BucketSpec

LOCATION_BYTES_MAX = 64 * 1024


class Making:
    """Of one engine. `origin_url`: below which buckets are made; empty, if none are."""

    def __init__(self, engine: Engine, added: AddedBuckets, clock: Clock, origin_url: str) -> None:
        self._engine = engine
        self._added = added
        self._clock = clock
        self._origin_url = origin_url
        self._turn = asyncio.Lock()

    def handlers(self) -> Mapping[type[ops.Operation], Callable[[Call, ops.Operation], Awaitable[None]]]:
        """What does which operation."""
        return {ops.CreateBucket: self._create, ops.DeleteBucket: self._delete}

    async def _create(self, call: Call, operation: ops.Operation) -> None:
        self._check()
        # Wherever it is to be, it is here.
        read_location(await call.document(LOCATION_BYTES_MAX))
        name = operation.bucket
        async with self._turn:
            if name in self._engine.buckets:
                raise S3Refusal(
                    "BucketAlreadyOwnedByYou",
                    "Your previous request to create the named bucket succeeded and you already own it.",
                    (("BucketName", name),),
                )
            url = below(self._origin_url, name)
            await asyncio.to_thread(make_place, url)
            made_ms = max(self._now_ms(), self._added.removed.get(name, 0) + 1)
            await self._added.add_everywhere(name, BucketSpec(url, writable=True, made_ms=made_ms))
        call.reply(200, [("Location", f"/{name}")])

    async def _delete(self, call: Call, operation: ops.Operation) -> None:
        self._check()
        await call.take_no_body()
        name = operation.bucket
        async with self._turn:
            bucket = self._engine.buckets.get(name)
            if bucket is None:
                raise no_such_bucket(name)
            spec = self._added.specs.get(name)
            if spec is None or not spec.made_ms:
                raise S3Refusal(
                    "AccessDenied", f"Access Denied: the settings of this cache say that there is {name!r}"
                )
            if await _has_objects(bucket):
                raise _not_empty(name)
            # By another server's clock it may have been made later than now.
            await self._added.remove_everywhere(name, max(self._now_ms(), spec.made_ms + 1))
            is_gone = False
            try:
                # What was on its way when it was removed: it is at the origin by now, or fails.
                is_gone = await _is_gone(spec.origin_url, bucket)
            finally:
                if not is_gone:
                    again = replace(spec, made_ms=max(self._now_ms(), self._added.removed[name] + 1))
                    await self._added.add_everywhere(name, again)
            if not is_gone:
                raise _not_empty(name)
            await _give_up_uploads(bucket)
        call.reply(204)

    def _check(self) -> None:
        """Raises S3Refusal."""
        if not self._origin_url:
            raise S3Refusal(
                "AccessDenied",
                "Access Denied: this cache was not told where to make buckets (--s3-buckets-at URL)",
            )

    def _now_ms(self) -> int:
        return int(self._clock.wall() * 1000)


async def _is_gone(url: str, bucket: Bucket) -> bool:
    """Whether there is nothing at the origin; where that is a folder, not even that."""
    is_removed = await asyncio.to_thread(remove_place, url)
    return not await _has_objects(bucket) if is_removed is None else is_removed


async def _has_objects(bucket: Bucket) -> bool:
    async with aclosing(bucket.origin.list("", None, 1)) as pages:
        return bool(await anext(pages, None))


async def _give_up_uploads(bucket: Bucket) -> None:
    """Nobody can complete them any more, nor give them up. The bucket is removed, whatever becomes of them."""
    after: tuple[str, str] | None = None
    with suppress(StokerError):
        while found := await bucket.writable_origin.list_uploads("", after):
            for upload in found:
                await bucket.writable_origin.abort_upload(upload.key, upload.upload_id)
            after = found[-1][:2]


def _not_empty(name: str) -> S3Refusal:
    why = "The bucket you tried to delete is not empty"
    return S3Refusal("BucketNotEmpty", why, (("BucketName", name),))
