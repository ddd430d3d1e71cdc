"""Reading many records with one request: the same for a server and for a fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, overload

from stoker.cache.client.asked import Asked, ByteRange, Item, Parts, Wholes
from stoker.cache.client.waited import waited
from stoker.errors import StokerError

Errors = Literal["raise", "return"]


class RecordReader(ABC):
    """Many objects, or parts of objects, in one call.

    With `errors="return"` what is wrong with single items stands in their places in the list; what is wrong with all of
    them (no such bucket, no access, no server) is raised in any case. With `errors="raise"` the first is raised, and
    names its key: ObjectNotFound, ObjectChanged, OriginError.

    With `views` the items are read-only memoryviews that nobody has copied: at a Unix socket of the server's files,
    else of the answer, all of which stays in memory while a view of it lives. What they show never changes, also where
    the server gives it up meanwhile; but a disk that fails, or who cuts the cache's files, ends this process with
    SIGBUS when it looks at a view. Who keeps a view keeps the room of the server's file.
    """

    @abstractmethod
    def _items(self, bucket: str, asked: Asked, *, is_raising: bool, views: bool) -> list[Item]:
        """What came of each; where it `is_raising`, there is no error among them."""

    @overload
    def read_many(
        self, bucket: str, keys: Sequence[str], *, errors: Literal["raise"] = ..., views: Literal[False] = ...
    ) -> list[bytes]: ...
    @overload
    def read_many(
        self, bucket: str, keys: Sequence[str], *, errors: Literal["raise"] = ..., views: Literal[True]
    ) -> list[memoryview]: ...
    @overload
    def read_many(
        self, bucket: str, keys: Sequence[str], *, errors: Literal["return"], views: Literal[False] = ...
    ) -> list[bytes | StokerError]: ...
    @overload
    def read_many(
        self, bucket: str, keys: Sequence[str], *, errors: Literal["return"], views: Literal[True]
    ) -> list[memoryview | StokerError]: ...
    def read_many(
        self, bucket: str, keys: Sequence[str], *, errors: Errors = "raise", views: bool = False
    ) -> list[Any]:
        """Whole objects, in the order of `keys`, by one request."""
        with waited().asking():
            return self._items(bucket, Wholes(keys), is_raising=_is_raising(errors), views=views)

    @overload
    def read_ranges(
        self,
        bucket: str,
        ranges: Sequence[ByteRange],
        *,
        errors: Literal["raise"] = ...,
        views: Literal[False] = ...,
    ) -> list[bytes]: ...
    @overload
    def read_ranges(
        self,
        bucket: str,
        ranges: Sequence[ByteRange],
        *,
        errors: Literal["raise"] = ...,
        views: Literal[True],
    ) -> list[memoryview]: ...
    @overload
    def read_ranges(
        self,
        bucket: str,
        ranges: Sequence[ByteRange],
        *,
        errors: Literal["return"],
        views: Literal[False] = ...,
    ) -> list[bytes | StokerError]: ...
    @overload
    def read_ranges(
        self, bucket: str, ranges: Sequence[ByteRange], *, errors: Literal["return"], views: Literal[True]
    ) -> list[memoryview | StokerError]: ...
    def read_ranges(
        self, bucket: str, ranges: Sequence[ByteRange], *, errors: Errors = "raise", views: bool = False
    ) -> list[Any]:
        """Parts of objects, in the order of `ranges`, by one request; a part ends where its object does.

        Each part is of one version of its object: that of its range, or what is there. Raises ValueError for what is
        not a range.
        """
        with waited().asking():
            return self._items(bucket, Parts(ranges), is_raising=_is_raising(errors), views=views)


def _is_raising(errors: str) -> bool:
    if errors not in ("raise", "return"):
        raise ValueError(f"errors={errors!r} is neither 'raise' nor 'return'")
    return errors == "raise"
