"""How large the files of a source are, by some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stoker.wire.cache_api import ObjectPage

_PAGE = 1000
_MANY = 1000


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
