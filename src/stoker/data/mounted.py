"""Order announced by who reads files of a mount: the cache behind it fetches what comes next before it is read.

files = [path for path, _ in dataset.samples]                   # an ImageFolder's
sampler = stoker.AnnouncedSampler(sampler, files)
loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=8)
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from stoker.cache.client import orders
from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import FleetClient, open_client
from stoker.cache.mount.places import MountInfo, mount_of
from stoker.data.order import I64
from stoker.errors import CacheUnavailable, StokerError
from stoker.wire.cache_orders import Announced, Announcement

log = logging.getLogger("stoker.data")
CHUNK = 16_384
"""Keys or reads in one message."""
EVERY_S = 0.1
"""So often at most the cache is told how far the reader has come."""
RENEWED_S = 10.0
LEASE_S = 60.0
RETRY_S = 5.0


class AnnouncedSampler:
    """Yields what `sampler` yields: numbers of `files`, which lie in one mount of this user. The cache is told of all
    of an epoch when it begins; where there is no such mount, or its cache cannot be told, that costs speed and nothing
    else. For torch's DataLoader, in the process that has the loader; each rank announces its own share.

    Raises IndexError where the sampler yields what is no number of `files`.
    """

    def __init__(self, sampler: Iterable[int], files: Sequence[str | os.PathLike[str]]) -> None:
        self._sampler = sampler
        self._files = [os.path.abspath(file) for file in files]
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """As the sampler has it: `set_epoch`, for one."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[int]:
        order = [int(number) for number in self._sampler]
        for number in order:
            if not 0 <= number < len(self._files):
                raise IndexError(f"the sampler yields {number}, and there are {len(self._files)} files")
        keys, mount = self._keys()
        if mount is None or not order:
            yield from order
            return
        stream = f"{os.uname().nodename}/{os.getpid()}/{id(self)}/{next(self._numbers)}"
        telling = _Telling(mount, keys, np.array(order, np.int64), stream)
        try:
            for position, number in enumerate(order, 1):
                telling.asked = position
                yield number
        finally:
            telling.end()

    def _keys(self) -> tuple[list[str], MountInfo | None]:
        """The objects that the files are, by the mount that all of them lie in."""
        mount = mount_of(self._files[0]) if self._files else None
        if mount is None:
            log.info("the files lie in no mount of this user: nothing is announced")
            return [], None
        folder, prefix = f"{mount.folder}/", mount.place.prefix.strip("/")
        if not all(file.startswith(folder) for file in self._files):
            log.warning("not all files lie in %s: nothing is announced, which costs only speed", mount.folder)
            return [], None
        before = f"{prefix}/" if prefix else ""
        return [before + file[len(folder) :] for file in self._files], mount


class _Telling:
    """Tells of one epoch, in a thread of its own, until its end."""

    def __init__(self, mount: MountInfo, keys: Sequence[str], order: I64, stream: str) -> None:
        place = mount.place
        self.asked = 0
        self._bucket = place.bucket
        self._client: CacheClient = open_client(place.endpoint, place.token, tls=place.tls)
        self._keys = keys
        self._order = order
        self._stream = stream
        self._catalog = f"mount/{xxhash.xxh3_128_hexdigest(chr(0).join(keys))}"
        self._plan = int(time.time() * 1e3)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="stoker-announced-sampler", daemon=True).start()

    def end(self) -> None:
        """All is read, or nothing more."""
        self._ended.set()

    def _run(self) -> None:
        known: Announced | None = None
        told_at, told_asked = 0.0, -1
        while not self._ended.is_set():
            is_all = known is not None and known.stop >= len(self._order)
            now = time.monotonic()
            if is_all and told_asked == self.asked and now - told_at < RENEWED_S:
                self._ended.wait(EVERY_S)
                continue
            try:
                told_at, told_asked = now, self.asked
                stop = -1 if known is None else known.stop
                known = orders.announce(self._client, self._bucket, self._message(known))
                # Where it has no room for more it says so by taking nothing.
                has_room = known.stop > stop or known.stop >= len(self._order)
                self._ended.wait(EVERY_S if is_all else 0.0 if has_room else RETRY_S)
            except CacheUnavailable:
                known = None
                self._ended.wait(RETRY_S)
            except StokerError as error:
                log.warning("the cache is not told of the reads to come, which costs only speed: %s", error)
                break
        try:
            with self._client:
                orders.withdraw(self._client, self._bucket, self._stream)
        except StokerError:
            pass  # it forgets by itself

    def _message(self, known: Announced | None) -> Announcement:
        is_ours = known is not None and known.plan == self._plan
        start = known.stop if known is not None and is_ours else 0
        keys = 0 if known is None else known.keys
        common: dict[str, Any] = {
            "stream": self._stream, "plan": self._plan, "catalog": self._catalog, "cursor": self.asked,
            "asked": self.asked, "lease_s": LEASE_S, "at_owners": isinstance(self._client, FleetClient),
        }  # fmt: skip
        if keys < len(self._keys):
            return Announcement(first_key=keys, keys=list(self._keys[keys : keys + CHUNK]), **common)
        if start >= len(self._order):
            return Announcement(**common)
        some = self._order[start : start + CHUNK]
        return Announcement(start=start, reads=some.astype("<u4").tobytes(), **common)
