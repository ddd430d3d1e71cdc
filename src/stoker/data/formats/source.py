"""What a format reads from: a dataset's URL, and the cache behind which it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from stoker.cache.client.client import CacheClient
from stoker.data.attach import Served, Started, attach, start_cache, started_cache
from stoker.data.listing import list_all
from stoker.data.record_index import Listing
from stoker.errors import AccessDenied, CacheError, EmptyDataset, OriginError, StokerError
from stoker.settings import CacheSettings, cache_settings
from stoker.wire.cache_api import ObjectPage

log = logging.getLogger("stoker.data")


class IndexProgress(NamedTuple):
    """How far the building of an index has come."""

    objects_done: int
    objects: int
    records: int
    done_bytes: int
    """Of the objects, as far as they were looked through; what need not be read counts, too."""
    size_bytes: int


Report = Callable[[IndexProgress], None]


class Source:
    """Where a dataset is. Nothing is asked before it is needed. A pickled copy finds the cache for itself, and is
    told of the one that this process has started, if there was none.

    `cache`: where the cache is; None: where the environment says. `ca`: as of Dataset. `on_progress` is called while an
    index is built.
    """

    def __init__(
        self,
        url: str,
        cache: CacheSettings | None = None,
        on_progress: Report | None = None,
        ca: str | None = None,
    ) -> None:
        self.url = url
        self.on_progress = on_progress
        self._cache = cache
        self._ca = ca
        self._parents: Started | None = None
        self._served: Served | None = None
        self._listing: Listing | None = None

    @property
    def settings(self) -> CacheSettings:
        """Of the cache."""
        known = self._cache if self._cache is not None else cache_settings()
        return known.trusting(self._ca)

    @property
    def served(self) -> Served:
        return self._attached()

    @property
    def client(self) -> CacheClient:
        return self._attached().client

    @property
    def bucket(self) -> str:
        return self._attached().bucket

    @property
    def prefix(self) -> str:
        return self._attached().prefix

    def listing(self, *, anew: bool = False) -> Listing:
        """The objects under the URL. Raises EmptyDataset, CacheError."""
        if self._listing is None or anew:
            try:
                self._listing = self._listed(at_once=True)
            except OriginError:
                # Among others: an origin that lists out of order is only noticed on the way, and is then listed as a
                # whole for each page.
                self._listing = self._listed(at_once=False)
        if not len(self._listing.keys):
            raise EmptyDataset(
                f"there are no objects under {self.url!r}: check the bucket and the prefix (it is a plain prefix: "
                "a folder ends in '/')"
            )
        return self._listing

    def refresh(self) -> None:
        """Have the origin asked again what is under the URL, if who reads may do that: the cache keeps lists for a
        while."""
        try:
            self.client.refresh(self.bucket, self.prefix)
        except (CacheError, AccessDenied) as error:
            log.debug("%s is not refreshed: %s", self.url, error)

    def share(self) -> None:
        """Where no cache is known, start the one that processes that are started with a copy will be told of."""
        if self.settings.endpoint is None and not self.url.startswith("stoker://"):
            try:
                start_cache(self.settings)
            except StokerError as error:
                log.debug("no cache is started for other processes: %s", error)  # they will say it

    def forget(self) -> None:
        """Give up the listing, which may be large."""
        self._listing = None

    def _listed(self, *, at_once: bool) -> Listing:
        client, bucket, prefix = self._attached()

        def ask(prefix: str, after: str | None, limit: int) -> ObjectPage:
            return client.list_page(bucket, prefix, after, limit)

        return list_all(ask, prefix, self._is_far if at_once else lambda: False)

    def _is_far(self) -> bool:
        """Whether the origin is an object store: a folder would be looked through for each page."""
        try:
            rows = self.client.status().buckets
        except (CacheError, AccessDenied) as error:
            log.debug("the origin of %s is not known: %s", self.url, error)
            return False
        return any(row.name == self.bucket and row.origin.startswith("s3://") for row in rows)

    def _attached(self) -> Served:
        if self._served is None:
            self._served = attach(self.url, self.settings, self._parents)
        return self._served

    def __getstate__(self) -> dict[str, Any]:
        # Without it, each process that is spawned would start a cache and read the origin for itself.
        parents = started_cache(self.settings) or self._parents
        nothing = {"_served": None, "_listing": None, "on_progress": None}
        return {**self.__dict__, **nothing, "_parents": parents}
