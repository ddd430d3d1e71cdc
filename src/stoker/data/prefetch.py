"""Bring objects into the cache while the program goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields

from stoker.cache.client.entries import objects
from stoker.cache.client.loading import LoadCounts, Loader, Wanted
from stoker.cache.client.servers import Servers
from stoker.errors import CacheUnavailable, EnvironmentProblem
from stoker.wire.cache_api import ObjectPage


class Prefetch:
    """Objects that are on their way into the cache; `keys` of each bucket, where one that is empty or ends with a slash
    stands for all below it.

    `wait` for it, or `await` it in any event loop, or do neither. It ends with the process, and belongs to the one that
    began it.
    """

    def __init__(self, servers: Servers, keys: Mapping[str, Sequence[str]]) -> None:
        self._servers = servers
        self._keys = keys
        self._owner = os.getpid()
        self._counted: list[LoadCounts] = []
        self._future: Future[LoadCounts] = Future()
        # So that nobody who stops waiting stops it.
        self._future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, name="stoker-prefetch", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    @property
    def progress(self) -> LoadCounts:
        """What has become of the objects so far."""
        total = LoadCounts()
        for counts in list(self._counted):
            for field in fields(LoadCounts):
                setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
        return total

    def wait(self, timeout_s: float | None = None) -> LoadCounts:
        """Wait for the end. What came of all objects: single ones that failed are in `failures`, what had no room in
        `passed`.

        Raises TimeoutError, and what ended it: CacheUnavailable, AccessDenied, ObjectNotFound for a bucket.
        """
        return self._own().result(timeout_s)

    def __await__(self) -> Generator[None, None, LoadCounts]:
        return asyncio.wrap_future(self._own()).__await__()

    def _own(self) -> Future[LoadCounts]:
        if self._owner != os.getpid():
            raise EnvironmentProblem(
                "a prefetch goes on in the process that began it: this one is a fork of that"
            )
        return self._future

    def _run(self) -> None:
        try:
            with self._servers as servers:
                with suppress(CacheUnavailable):  # others of it may answer below
                    servers.fleet()
                for bucket, keys in self._keys.items():
                    loader = Loader(servers, bucket)
                    self._counted.append(LoadCounts())
                    loader.run(_wanted(servers, bucket, keys), self._replace)
        except BaseException as error:  # noqa: BLE001 (raised again where the end is awaited)
            self._future.set_exception(error)
        else:
            self._future.set_result(self.progress)

    def _replace(self, counts: LoadCounts) -> None:
        self._counted[-1] = counts


def _wanted(servers: Servers, bucket: str, keys: Iterable[str]) -> Iterator[Wanted]:
    for key in keys:
        if key and not key.endswith("/"):
            yield Wanted(key, None)
            continue
        for info in objects(_lister(servers, bucket), key):
            if not info.key.endswith("/"):
                yield Wanted(info.key, info.size_bytes)


def _lister(servers: Servers, bucket: str) -> Callable[[str, str | None, int], ObjectPage]:
    return lambda prefix, after, limit: servers.call(
        lambda client: client.list_page(bucket, prefix, after, limit)
    )
