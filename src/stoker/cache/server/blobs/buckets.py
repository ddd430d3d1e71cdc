"""Buckets of blobs as a server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stoker.base.ids import check_name
from stoker.cache.server.engine import Engine
from stoker.errors import ConfigError
from stoker.wire.cache_api import RESERVED_BUCKETS

NOTE = "blobs:"
"""What the index has in an origin's place."""


class BlobBucketSpec(msgspec.Struct, frozen=True):
    """`capacity_bytes`: what it may take of a server's disk. `reads_through`: a blob that is not there, whose key
    begins with such a prefix, is what the rest of the key names in that bucket of objects."""

    capacity_bytes: int
    reads_through: Mapping[str, str] = {}


@dataclass(slots=True)
class BlobBucket:
    """A bucket of blobs with its figures; `number` is the index's. What the front answers is not in them."""

    name: str
    number: int
    spec: BlobBucketSpec
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    peer_bytes: int = 0

    def source_of(self, key: str) -> tuple[str, str] | None:
        """The bucket, and the object in it, that a key stands for; the longest prefix counts."""
        found = max((p for p in self.spec.reads_through if key.startswith(p)), key=len, default=None)
        return None if found is None else (self.spec.reads_through[found], key[len(found) :])


def check_blob_buckets(specs: Mapping[str, BlobBucketSpec], objects: Mapping[str, object]) -> None:
    """Raises ConfigError if there cannot be such buckets beside those of objects."""
    for name, spec in specs.items():
        if name in RESERVED_BUCKETS:
            raise ConfigError(f"{name!r} is a reserved bucket name")
        if name in objects:
            raise ConfigError(f"there are two buckets {name!r}: one for objects, and one for blobs")
        try:
            check_name("bucket", name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if spec.capacity_bytes < 1:
            raise ConfigError(f"the blob bucket {name!r} needs a capacity, such as {name}=20GB")
        for prefix, bucket in spec.reads_through.items():
            if not prefix or bucket not in objects:
                raise ConfigError(
                    f"the blob bucket {name!r} reads {prefix!r} through {bucket!r}, and there is no such bucket of "
                    f"objects: add --bucket {bucket}=ORIGIN_URL"
                )


def open_blob_buckets(engine: Engine, specs: Mapping[str, BlobBucketSpec]) -> dict[str, BlobBucket]:
    """Have the store keep them. Raises ConfigError, EnvironmentProblem."""
    check_blob_buckets(specs, engine.buckets)
    engine.reserved |= specs.keys()
    return {
        name: BlobBucket(
            name, engine.store.open_bucket(name, NOTE, quota_bytes=spec.capacity_bytes).number, spec
        )
        for name, spec in specs.items()
    }
