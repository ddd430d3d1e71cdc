"""GET /-/whole/BUCKET/KEY: a descriptor of the file of a large object, for who reads it without us from then on."""

from __future__ import annotations

import asyncio

from stoker._native import Piece
from stoker.cache.layout import block_count
from stoker.cache.server.allowed import check_may_read, may_have_descriptors
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.port import Answer, Request, WrongMethod
from stoker.cache.store.known import Known, is_held
from stoker.errors import ObjectChanged, ObjectNotFound
from stoker.wire.cache_api import OWN_PREFIX
from stoker.wire.http import split_target

WHOLE = f"{OWN_PREFIX}whole/".encode()
VERIFIED_AT_ONCE = 16
"""So many blocks are read to be sure of them before the answer; of more, who asks again later hears."""
_BLOCKS_PER_TURN = 1024


class WholeFiles:
    """For one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._verifying: dict[tuple[int, str, int], asyncio.Task[None]] = {}

    async def answer(self, request: Request, answer: Answer) -> None:
        """Raises AccessDenied, ObjectNotFound, ObjectChanged, OriginError."""
        if request.method != "GET":
            raise WrongMethod(request.method, ("GET",))
        _, path, query = split_target(request.target)
        name, _, key = path.removeprefix("whole/").partition("/")
        check_may_read(request.principal, name, [key])
        bucket = self._engine.bucket(name)
        if not key:
            raise ObjectNotFound(f"no object is named; ask for {WHOLE.decode()}{name}/KEY")
        known = await self._locate(bucket, key, query.get("version", ""))
        may_have = request.is_near and may_have_descriptors(request.principal, name)
        piece = await self._first_of_all(known) if may_have else None
        answer.start(200, [("Content-Type", "application/octet-stream")], None)
        if piece is not None:
            self._engine.store.large_files.hand_out(piece.container, is_whole=True)
            answer.pass_descriptor(piece)
        answer.finish()

    async def _locate(self, bucket: Bucket, key: str, version: str) -> Known:
        known = await self._engine.locate(bucket, key)
        if version and known.version != version:
            known = await self._engine.locate(bucket, key, is_refreshing=True)
        if version and known.version != version:
            raise ObjectChanged(f"{key!r} in {bucket.name!r} is another version now")
        return known

    async def _first_of_all(self, known: Known) -> Piece | None:
        """The first block of an object that is all held in a file of its own, and verified; nothing was waited for
        since all was seen to be."""
        store = self._engine.store
        count = block_count(known.size_bytes, self._engine.block_size_bytes)
        found = store.index.find(known.bucket, known.key, True)
        if found is None or found.tag != known.tag or not found.is_large:
            return None
        if not all(is_held(found, index) for index in range(count)):
            return None
        doubtful = [index for index in range(count) if (held := found.block(index)) is None or not held[1]]
        await self._verify(known, doubtful)
        for index in range(count):
            # It counts as a use: of what is read behind our back nothing else tells that it is used.
            if index and index % _BLOCKS_PER_TURN == 0:
                await asyncio.sleep(0)
            store.held(known, index)
        found = store.index.find(known.bucket, known.key, True)
        if found is None or found.tag != known.tag or not found.is_large:
            return None
        blocks = (found.block(index) for index in range(count))
        if not all(block is not None and block[1] for block in blocks):
            return None
        piece = store.held(known, 0)
        return None if piece is None or piece.container != found.container else piece

    async def _verify(self, known: Known, blocks: list[int]) -> None:
        """Few of them at once; many, while nobody waits."""
        name = known.bucket, known.key, known.tag
        if len(blocks) <= VERIFIED_AT_ONCE:
            for index in blocks:
                await self._engine.store.verified(known, index)
        elif name not in self._verifying:
            task = asyncio.get_running_loop().create_task(self._verify_all(known, blocks))
            self._verifying[name] = task
            task.add_done_callback(lambda _: self._verifying.pop(name, None))

    async def _verify_all(self, known: Known, blocks: list[int]) -> None:
        for index in blocks:
            if await self._engine.store.verified(known, index) is None:
                return

    async def stop(self) -> None:
        """Give up what is being verified."""
        for task in self._verifying.values():
            task.cancel()
        await asyncio.gather(*self._verifying.values(), return_exceptions=True)
