"""What a source is like, before it is mounted: how large its files are, and whether it can be written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import uuid4

from stoker.errors import AccessDenied, OriginReadOnly, StokerError, WriteDenied
from stoker.wire.cache_api import ObjectPage
from stoker.wire.cache_writes import Written

_PAGE = 1000
_MANY = 1000


class Copies(Protocol):
    """A client of a cache."""

    def copy(self, bucket: str, key: str, to: str) -> Written:
        """One object, under another name."""


class Lists(Protocol):
    """A client of a cache."""

    def list_page(
        self, bucket: str, prefix: str, after: str | None, limit: int, delimiter: str = ""
    ) -> ObjectPage:
        """A page of what is there."""


def sample(client: Lists, bucket: str, prefix: str) -> list[int]:
    """Sizes, bytes, of the first files, and where there are more of the first ones in two of its folders: shards often
    come with many small files beside, which may be all that the first page has. Raises what the client does."""
    first = client.list_page(bucket, prefix, None, _PAGE)
    sizes_bytes = [one.size_bytes for one in first.objects]
    if first.after is None:
        return sizes_bytes
    folders = client.list_page(bucket, prefix, None, _PAGE, "/").folders or []
    for folder in {*folders[len(folders) // 2 :][:1], *folders[-1:]}:
        sizes_bytes += [one.size_bytes for one in client.list_page(bucket, folder, None, _PAGE).objects]
    return sizes_bytes


def are_small(sizes_bytes: Sequence[int], small_bytes_max: int) -> bool:
    """Whether there are many files, and most of their bytes are in files of at most so many bytes."""
    in_small_bytes = sum(one for one in sizes_bytes if one <= small_bytes_max)
    return len(sizes_bytes) >= _MANY and 2 * in_small_bytes > sum(sizes_bytes)


def check_writable(client: Copies, bucket: str, prefix: str) -> None:
    """Who may not write hears of it before a file is lost whose writer does not look at what `close` says. What is
    asked for does nothing: there is nothing of that name. Raises WriteRefused or AccessDenied."""
    nothing = f"{prefix}.stoker-{uuid4().hex}"
    try:
        client.copy(bucket, nothing, nothing)
    except (AccessDenied, OriginReadOnly, WriteDenied):
        raise
    except StokerError:
        pass  # as it is not there; what else may be wrong is said of what is written
