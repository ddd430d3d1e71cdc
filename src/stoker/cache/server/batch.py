"""POST /-/read: many objects, or parts of objects, in one answer."""

from __future__ import annotations

import msgspec

from stoker.cache.server.allowed import check_may_read, may_have_descriptors
from stoker.cache.server.batch_stream import BatchStream, Item, Reader
from stoker.cache.server.engine import Engine
from stoker.cache.server.port import Answer, Request
from stoker.errors import ConfigError
from stoker.wire.cache_api import MSGPACK
from stoker.wire.cache_batch import OFFSET_MAX, RANGE, READ_KEYS_MAX, READ_RANGES_MAX, ReadRequest

_decoder = msgspec.msgpack.Decoder(ReadRequest)


class BatchReader:
    """Answers batches for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: Request, answer: Answer) -> None:
        """Errors of an item go into its frames; ConfigError, ObjectNotFound, AccessDenied are the batch's."""
        wanted = _decoder.decode(request.body)
        check_may_read(request.principal, wanted.bucket, wanted.keys)
        count = _checked_count(wanted)
        bucket = self._engine.bucket(wanted.bucket)
        may_have = request.is_near and may_have_descriptors(request.principal, wanted.bucket)
        descriptors = wanted.descriptors if may_have else None
        hit = answer.batch(wanted, self._engine.metadata.rule(bucket), descriptors)
        if hit is not None:
            bucket.hits += count
            bucket.hit_bytes += hit.size_bytes
            bucket.local_hits += hit.places
            for container in hit.large:
                self._engine.store.large_files.hand_out(container)
            return
        items = _items(wanted)
        answer.start(200, [("Content-Type", MSGPACK)], None)
        reader = None if descriptors is None else Reader(descriptors, answer)
        await BatchStream(self._engine, bucket, wanted, reader, answer).run(items)
        answer.finish()


def _checked_count(wanted: ReadRequest) -> int:
    """How many items are wanted. Raises ConfigError."""
    if len(wanted.keys) > READ_KEYS_MAX:
        raise ConfigError(f"a batch has at most {READ_KEYS_MAX} keys, not {len(wanted.keys)}")
    if wanted.versions and len(wanted.versions) != len(wanted.keys):
        raise ConfigError(f"a batch has {len(wanted.versions)} versions of {len(wanted.keys)} keys")
    if wanted.ranges is None:
        return len(wanted.keys)
    count, rest = divmod(len(wanted.ranges), RANGE.size)
    if rest:
        raise ConfigError(f"the ranges of a batch have {RANGE.size} bytes each, and {rest} are left over")
    if count > READ_RANGES_MAX:
        raise ConfigError(f"a batch has at most {READ_RANGES_MAX} ranges, not {count}")
    return count


def _items(wanted: ReadRequest) -> list[Item]:
    """Raises ConfigError."""
    if wanted.ranges is None:
        return [Item(number, 0, OFFSET_MAX) for number in range(len(wanted.keys))]
    items = [Item(*packed) for packed in RANGE.iter_unpack(wanted.ranges)]
    if any(item.key >= len(wanted.keys) for item in items):
        raise ConfigError(f"a batch asks for a range of a key that is none of its {len(wanted.keys)}")
    return items
