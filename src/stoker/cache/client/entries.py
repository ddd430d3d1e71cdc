"""What lies below a prefix, page by page: objects and folders, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from stoker.wire.cache_api import LIST_LIMIT_MAX, ObjectInfo, ObjectPage

Lister = Callable[[str, str | None, int], ObjectPage]
"""Asks for a page: prefix, the key after which it begins, and how many objects at most."""


class FolderLister(Protocol):
    """The same, with the delimiter at which folders end."""

    def __call__(self, prefix: str, after: str | None, limit: int, delimiter: str = "") -> ObjectPage: ...


_LAST = "\U0010ffff"
_AFTER_SKIP = 100
_DELIMITER = "/"


class FolderPage(NamedTuple):
    """Objects, and folders as keys that end with a slash, sorted. `after`: begins with the last of them; None: nothing
    follows."""

    entries: list[ObjectInfo | str]
    after: str | None


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


def folder_page(ask: FolderLister, prefix: str, after: str | None, limit: int) -> FolderPage:
    """At most `limit` entries right below a prefix, from its beginning or after the last of another page. Raises what
    `ask` does."""
    page = ask(prefix, after, limit, delimiter=_DELIMITER)
    if page.folders is not None:
        entries: list[ObjectInfo | str] = [*page.objects, *page.folders]
        return FolderPage(sorted(entries, key=_key_of), page.after)
    # A server that knows no delimiters: that page was of no use.
    after = None if after is None else after.partition("\0")[0]  # what another server has said of that place
    found = children(ask, prefix, max(limit, _AFTER_SKIP), after)
    shown = list(islice(found, limit))
    return FolderPage(shown, _key_of(shown[-1]) if next(found, None) is not None else None)


def _key_of(entry: ObjectInfo | str) -> str:
    return entry if isinstance(entry, str) else entry.key


def children(
    ask: Lister, prefix: str, limit: int = LIST_LIMIT_MAX, after: str | None = None
) -> Iterator[ObjectInfo | str]:
    """The objects right below a prefix, and the folders there as keys that end with a slash, sorted; those that come
    after one of them, if it is said.

    What lies in a folder is skipped, not listed; pages are of at most `limit` objects. Raises what `ask` does.
    """
    folder: str | None = None
    if after is not None and after != prefix and after.endswith(_DELIMITER):
        after += _LAST
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
