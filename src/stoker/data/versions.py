"""Whether objects still are what an index was made of."""

from __future__ import annotations

import time
from collections.abc import Iterable

from stoker.data.formats.source import Source
from stoker.data.record_index import Listing
from stoker.errors import DatasetChanged, ObjectChanged, ObjectNotFound

CONFIRMED_S = 300.0


class Versions:
    """Asks the cache which version of an object it serves, when an object is read first and every few minutes: ranges
    of another version would be read without an error, but be no records."""

    def __init__(self, source: Source, listing: Listing) -> None:
        self._source = source
        self._listing = listing
        self._confirmed_at: dict[int, float] = {}

    def confirm(self, objects: Iterable[int]) -> None:
        """Raises DatasetChanged if one of them is another version now, CacheError."""
        now = time.monotonic()
        for number in set(objects):
            confirmed_at = self._confirmed_at.get(number)
            if confirmed_at is None or now - confirmed_at > CONFIRMED_S:
                self.confirm_now(number)

    def confirm_now(self, number: int) -> None:
        """Raises as `confirm`."""
        key, version = self._listing.keys[number], self._listing.versions[number]
        client, bucket = self._source.client, self._source.bucket
        try:
            known = client.known(bucket, key)
            if (known.is_absent or known.version != version) and version:
                # What the cache knows may be older than what is indexed: asked for a version, it looks again.
                client.read(bucket, key, 0, 1, version=version)
        except (ObjectChanged, ObjectNotFound) as error:
            self._source.refresh()  # or the next start would be given the same old list
            raise changed(self._source.url, key) from error
        self._confirmed_at[number] = time.monotonic()


def changed(url: str, key: str) -> DatasetChanged:
    """The error for an object that is not what was indexed."""
    return DatasetChanged(
        f"{key!r} of {url!r} was changed or removed after the records in it were found: put back what was there, or "
        "start the run again, which finds the records anew"
    )
