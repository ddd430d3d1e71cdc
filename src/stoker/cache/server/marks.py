"""From which origins this server has its buckets, as it tells its peers, and which peers have one from another."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from stoker.errors import AnotherOrigin, StokerError
from stoker.wire.cache_api import ORIGIN

log = logging.getLogger("stoker.cache")


class Marks:
    """For the peers of one server. `of`: what stands for the origin of each bucket, by its name."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._strangers: set[tuple[str, str]] = set()

    @property
    def notes(self) -> list[str]:
        """What operators should know."""
        return [_strange(url, bucket) for url, bucket in sorted(self._strangers)]

    def header(self, bucket: str) -> str:
        """What is said with each request about a bucket."""
        mark = self.of.get(bucket)
        return "" if mark is None else f"{ORIGIN}: {mark}\r\n"

    def agreed(self, url: str, bucket: str) -> None:
        """A peer has answered."""
        self._strangers.discard((url, bucket))

    def refused(self, url: str, bucket: str, error: StokerError) -> StokerError:
        """A peer has answered with this error. That it has another bucket is said once."""
        if isinstance(error, AnotherOrigin) and (url, bucket) not in self._strangers:
            self._strangers.add((url, bucket))
            log.warning("%s", _strange(url, bucket))
        return error

    def keep(self, urls: Iterable[str]) -> None:
        """There are no other peers."""
        known = set(urls)
        self._strangers = {(url, bucket) for url, bucket in self._strangers if url in known}


def _strange(url: str, bucket: str) -> str:
    return (
        f"bucket {bucket!r} is from another origin at {url}, and nothing of it comes from there: give it the same "
        "origin_url at all servers, or the same identity where that is another way to the same bytes"
    )
