"""What a mount shows: files and folders below a prefix of a bucket. Every method may block, for no longer than the
cache's client waits, and may be called from any thread; each may raise CacheUnavailable, OriginError, AccessDenied, and
ObjectNotFound where there is no such bucket.

Paths are relative, `a/b`; "" is the root. A name that is an object and a folder is the file if the object has bytes,
else the folder. What no file system can show (names of more than 255 bytes, `.`, `..`, none at all) is not there.
"""

from __future__ import annotations

from typing import BinaryIO, NamedTuple, Protocol


class Found(NamedTuple):
    """What a path is. Of a file: its size, `version`, which names its content, and when it was written, in seconds
    since 1970; 0: nobody knows."""

    is_folder: bool
    size_bytes: int = 0
    version: str = ""
    modified_s: float = 0.0


class Page(NamedTuple):
    """Some of what is right below a folder, each name once. They are sorted as keys are: a folder's name as if it ended
    with a slash. `after`: what the next page is asked for with; None: this is the last. Only the last may be empty."""

    entries: list[tuple[str, Found]]
    after: str | None


class Source(Protocol):
    """Whole files can be written where the bucket may be written to; WriteRefused otherwise."""

    def find(self, path: str) -> Found | None:
        """What is there; None: nothing. The root is always a folder."""
        ...

    def page(self, path: str, after: str | None, limit: int) -> Page:
        """At most `limit` entries of a folder, from its beginning or after another page; none, where it is none."""
        ...

    def read(self, path: str, version: str, start: int, stop: int) -> bytes | memoryview:
        """Exactly these bytes of that version, fewer only at its end. Raises ObjectChanged: it is there no more."""
        ...

    def whole_file(self, path: str, version: str) -> int | None:
        """A new descriptor, which the caller closes, of a file that holds exactly this object, complete and verified,
        for reading; None, where it is packed with others, not all held, or not on this machine. The file never changes,
        and its room is free only when nobody has it open any more."""
        ...

    def fetch(self, path: str, version: str) -> None:
        """Have all of it held soon; nobody waits for that, and nobody hears of errors."""
        ...

    def refresh(self, path: str) -> int:
        """Have the origin asked before this file, or anything below this folder, is answered again. Of how many objects
        something was known."""
        ...

    def held_bytes(self, path: str, version: str) -> int:
        """How much of a file the cache holds; of another version, nothing."""
        ...

    def room(self) -> tuple[int, int]:
        """How many bytes the cache may hold, and how many it holds."""
        ...

    def put(self, path: str, file: BinaryIO, size_bytes: int) -> Found:
        """Write a whole file, from where this one is read next; when it returns, the origin has it. Raises
        WriteRefused, and leaves what was there, if it is not that long."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; what is not there is no error. A path that ends with a slash is the marker of a folder."""
        ...

    def copy(self, path: str, to: str) -> Found:
        """Copy a file, at the origin. Raises ObjectNotFound."""
        ...

    def make_folder(self, path: str) -> None:
        """Have it there also while nothing is in it: an object of no bytes whose key ends with a slash."""
        ...
