"""Documents of listings that were made lately, in bounded memory. Pure.

Which page of a list is known, and for how long that is good, is not decided here: a document is good for the very page
that it was made of, and for no other that says the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from stoker.cache.server.s3.operation_types import Listing

BYTES_MAX = 32 * 1024 * 1024
_CHARACTER_BYTES = 4
_ENTRY_BYTES = 1024
"""What each takes beside the document, the page and what was asked."""


class _Made(NamedTuple):
    page: bytes
    document: bytes
    size_bytes: int


class Documents:
    """By what was asked; `page`: as it is kept, see `Lists.said`."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._made: OrderedDict[Listing, _Made] = OrderedDict()
        self.size_bytes = 0

    def get(self, operation: Listing, page: bytes | None) -> bytes | None:
        """The document that was made of that page; None if there is none."""
        made = self._made.get(operation)
        if made is None or page is None:
            return None
        if made.page is not page:
            self._drop(operation)
            return None
        self._made.move_to_end(operation)
        return made.document

    def put(self, operation: Listing, page: bytes, document: bytes) -> None:
        """Remember it."""
        self._drop(operation)
        # The page is kept from going where it was kept first.
        texts = (one for one in msgspec.structs.astuple(operation) if isinstance(one, str))
        size_bytes = len(page) + len(document) + _CHARACTER_BYTES * sum(map(len, texts)) + _ENTRY_BYTES
        self._made[operation] = _Made(page, document, size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            self._drop(next(iter(self._made)))

    def _drop(self, operation: Listing) -> None:
        made = self._made.pop(operation, None)
        if made is not None:
            self.size_bytes -= made.size_bytes
