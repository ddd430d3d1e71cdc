"""By what a mount takes its files for small ones."""

from __future__ import annotations

import pytest

from stoker.cache.mount.sampling import are_small, sample
from stoker.wire.cache_api import ObjectInfo, ObjectPage

SMALL, LARGE = 100_000, 50_000_000
MIB = 1024 * 1024


class Listed:
    """Lists of these sizes by key."""

    def __init__(self, sizes_bytes: dict[str, int]) -> None:
        self.sizes_bytes = sizes_bytes
        self.asked = 0

    def list_page(
        self, bucket: str, prefix: str, after: str | None, limit: int, delimiter: str = ""
    ) -> ObjectPage:
        self.asked += 1
        keys = sorted(key for key in self.sizes_bytes if key.startswith(prefix) and key > (after or ""))
        if delimiter:
            folders = {key[: key.index("/", len(prefix)) + 1] for key in keys if "/" in key[len(prefix) :]}
            return ObjectPage([], None, folders=sorted(folders)[:limit])
        page = [ObjectInfo(key, self.sizes_bytes[key], "1") for key in keys[:limit]]
        return ObjectPage(page, page[-1].key if len(keys) > limit else None)


def files(folder: str, count: int, size_bytes: int) -> dict[str, int]:
    return {f"{folder}/{number:05}": size_bytes for number in range(count)}


@pytest.mark.parametrize(("there", "expected", "asked"), [
    ({}, False, 1),
    (files("train", 999, SMALL), False, 1),
    (files("train", 1000, SMALL), True, 1),
    (files("train", 5000, SMALL) | files("val", 5000, SMALL), True, 3),
    (files("train", 5000, SMALL) | {"train/0": LARGE}, True, 3),
    (files("a-labels", 2000, 100) | files("shards", 20, LARGE), False, 3),
    (files("a-labels", 2000, 100) | files("shards", 20, LARGE) | files("z", 10, 100), False, 4),
])  # fmt: skip
def test_small_are_those_that_have_most_of_the_bytes(
    there: dict[str, int], expected: bool, asked: int
) -> None:
    """Shards with many labels beside them, whatever is listed first, are large."""
    source = Listed(there)
    assert are_small(sample(source, "b", ""), MIB) is expected
    assert source.asked == asked
