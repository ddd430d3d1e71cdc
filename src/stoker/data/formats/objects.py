"""One record in each object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.formats.port import Reads
from stoker.data.formats.source import Source
from stoker.data.index_build import index_name
from stoker.data.index_store import IndexStore
from stoker.data.record_index import Columns, Listing, RecordIndex, StringTable
from stoker.errors import BadRecord

SHARED_FROM = 10_000
"""So many keys are kept in a file that all processes map; fewer are handed to each."""


@dataclass(frozen=True)
class Objects:
    """A sample is an object's bytes. Records are numbered in the order of their keys."""

    name = "objects"

    @property
    def options(self) -> dict[str, Any]:
        """None changes which objects there are."""
        return {}

    def open(self, source: Source) -> ObjectRecords:
        """The records under a URL. Raises EmptyDataset, CacheError."""
        return ObjectRecords(source, listed(source, self, source.listing()))


def listed(source: Source, form: Any, listing: Listing) -> RecordIndex:
    """An index of objects that are one record each; a large one is shared among the processes of the node."""
    kept = Listing(listing.keys, StringTable.of(()), listing.sizes)
    columns = Columns(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.uint32))
    index = RecordIndex(kept, columns, [], np.empty(0, np.uint32), [])
    if len(kept.keys) < SHARED_FROM:
        return index
    store, name = IndexStore(source.settings.directory / "indexes"), index_name(source.url, form, kept)
    return store.find(name) or store.keep(name, index)


class ObjectRecords:
    """Objects as records."""

    def __init__(self, source: Source, index: RecordIndex) -> None:
        self._source = source
        self.index = index

    @property
    def fingerprint(self) -> str:
        """Changes when the set of keys does."""
        return self.index.fingerprint

    @property
    def keys(self) -> StringTable:
        """Of the records, in their order."""
        return self.index.listing.keys

    def __len__(self) -> int:
        return len(self.keys)

    def reads(self, numbers: npt.NDArray[np.int64]) -> Reads:
        """Whole objects."""
        stops = np.asarray(self.index.listing.sizes[numbers])
        return Reads(self.keys, np.array(numbers, np.int64), np.zeros_like(stops), stops)

    def read(self, numbers: Sequence[int]) -> list[Any | BadRecord]:
        """Their bytes. Raises CacheError."""
        return list(self.bodies(numbers))

    def bodies(self, numbers: Sequence[int]) -> list[bytes]:
        """The same, for formats that make something of them."""
        return self._source.client.read_many(self._source.bucket, [self.keys[number] for number in numbers])
