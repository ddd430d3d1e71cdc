"""Buckets of blobs among the options of `stoker cache serve`."""

from __future__ import annotations

import argparse

import msgspec

from stoker.base.units import parse_size_bytes
from stoker.cache.server.blobs.buckets import BlobBucketSpec
from stoker.errors import ConfigError


class BlobBucketFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the configuration's file says of one."""

    capacity: str | int
    reads_through: dict[str, str] = {}


def add_blob_options(server: argparse.ArgumentParser) -> None:
    """Add them."""
    server.add_argument(
        "--blob-bucket", metavar="NAME=SIZE[,PREFIX=BUCKET…]", action="append", default=[],
        help="a bucket for what is pushed to /blob/NAME/KEY, such as by pfio (repeats); a blob that is not there, "
        "whose key begins with PREFIX, is read as the object that the rest of the key names in BUCKET",
    )  # fmt: skip


def blob_buckets(arguments: list[str], file: dict[str, BlobBucketFile]) -> dict[str, BlobBucketSpec]:
    """Those of the file, and of the arguments, which beat it. Raises ConfigError."""
    found = {
        name: BlobBucketSpec(_size(f"[blob_buckets.{name}]", said.capacity), said.reads_through)
        for name, said in file.items()
    }
    for text in arguments:
        name, _, rest = text.partition("=")
        size, *through = rest.split(",")
        if not name or not size:
            raise ConfigError(f"--blob-bucket {text!r} is not NAME=SIZE, such as pfio=20GB")
        reads_through = {}
        for pair in through:
            prefix, equals, bucket = pair.rpartition("=")
            if not equals or not prefix or not bucket:
                raise ConfigError(
                    f"--blob-bucket {text!r}: {pair!r} is not PREFIX=BUCKET, such as s3://s3.example.org/data/=data"
                )
            reads_through[prefix] = bucket
        found[name] = BlobBucketSpec(_size(f"--blob-bucket {text}", size), reads_through)
    return found


def _size(option: str, said: str | int) -> int:
    try:
        return said if isinstance(said, int) else parse_size_bytes(said)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
