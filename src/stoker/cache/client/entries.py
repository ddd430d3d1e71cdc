"""What lies below a prefix, page by page: objects and folders, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.wire.cache_api import LIST_LIMIT_MAX, ObjectInfo, ObjectPage

Lister = Callable[[str, str | None, int], ObjectPage]
"""Asks for a page: prefix, the key after which it begins, and how many objects at most."""

_LAST = "\U0010ffff"
_AFTER_SKIP = 100


def objects(ask: Lister, prefix: str, limit: int = LIST_LIMIT_MAX) -> Iterator[ObjectInfo]:
    """All objects whose keys start with `prefix`, sorted by key; one page of at most `limit` is kept at a time.

    Raises what `ask` does.
    """
    after: str | None = None
    while True:
        page = ask(prefix, after, limit)
        yield from page.objects
        after = page.after
        if after is None:
            return


def children(ask: Lister, prefix: str, limit: int = LIST_LIMIT_MAX) -> Iterator[ObjectInfo | str]:
    """The objects right below a prefix, and the folders there as keys that end with a slash, sorted.

    What lies in a folder is skipped, not listed; pages are of at most `limit` objects. Raises what `ask` does.
    """
    after: str | None = None
    folder: str | None = None
    limit_max = limit
    while True:
        page = ask(prefix, after, limit)
        for info in page.objects:
            name, slash, _ = info.key[len(prefix) :].partition("/")
            if not slash:
                yield info
            elif (found := f"{prefix}{name}/") != folder:
                folder = found
                yield found
        if page.after is None:
            return
        after = page.after
        if folder is not None and after.startswith(folder):
            # Where a page ends in a folder the next one begins after it, and is short: another folder may follow,
            # of which nothing but its name is wanted.
            after = max(after, f"{folder}{_LAST}")
            limit = min(limit_max, _AFTER_SKIP)
        else:
            limit = min(limit_max, limit * 4)
