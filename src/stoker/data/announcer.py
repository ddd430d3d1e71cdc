"""Tells a cache what a loader is going to read, so that it is there when it is read, and kept if it is read again."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Any

import numpy as np

from stoker.cache.client import orders
from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import FleetClient
from stoker.data.coming_reads import ComingRecords
from stoker.data.formats.port import Reads, Records
from stoker.data.loader_plan import Pass, groups_for
from stoker.errors import CacheUnavailable, ConfigError, StokerError
from stoker.settings import worker_settings
from stoker.wire.cache_orders import Announced, Announcement

log = logging.getLogger("stoker.data")

PASSES_AHEAD = 2
"""Epochs that are told of: what the next one reads is worth keeping while this one is read."""
READS_AHEAD_MAX = 4_000_000
CHUNK = 16_384
"""Keys or reads in one message: the training thread does not have to wait for more."""
EVERY_S = 0.02
"""So often at most the cache is told how far the loader has come."""
RENEWED_S = 10.0
LEASE_S = 60.0
RETRY_S = 5.0
REFUSED_S = 60.0
WHOLE_BYTES_MAX = 1024 * 1024
"""Objects that are larger may be of several blocks, of which a fleet has to know who owns them."""


class Announcer:
    """For one loader of one process. Its thread ends with the loader, with the process, or when the cache says that it
    takes no announcements; whatever fails here costs speed, and nothing else."""

    def __init__(self, records: Records, client: CacheClient, bucket: str, name: str, group: str) -> None:
        self._records = records
        self._client = client
        self._bucket = bucket
        self._stream = f"{os.uname().nodename}/{worker_settings().worker}/{os.getpid()}/{name}"
        self._group = group
        self._catalog = f"{records.fingerprint}/{bucket}"
        self._at_owners = isinstance(client, FleetClient)
        self._is_by_bytes: bool | None = None
        self._owner = os.getpid()
        self._news = threading.Event()
        self._lock = threading.Lock()
        self._coming: ComingRecords | None = None
        self._plan = 0
        self._cursor = 0
        self._asked = 0
        self._is_closed = False
        self._refused_until = 0.0
        self._thread: threading.Thread | None = None
        self.told: Announced | None = None
        """What the cache said last."""

    def follow(self, of: Pass) -> None:
        """A pass begins."""
        with self._lock:
            if self._coming is not None and self._coming.goes_on_with(of):
                self._coming.go_on()
            else:
                self._coming = ComingRecords(of, groups_for(of, self._records))
                # Also higher than that of an announcer of this name in a process before.
                self._plan = max(self._plan + 1, int(time.time() * 1e3))
            self._cursor = self._asked = self._coming.start
        self._news.set()
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._news), name="stoker-announcer", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                log.warning("the cache is not told of the reads to come, which costs only speed: %s", error)

    def read(self, steps: int, asked: int) -> None:
        """So many steps of the pass were read, and so many with those that are under way."""
        with self._lock:
            if self._coming is not None:
                self._cursor = self._coming.read_by(steps)
                self._asked = self._coming.read_by(asked)
        self._news.set()

    def close(self) -> None:
        """Nothing more is read. The cache forgets by itself what it cannot be told of."""
        self._is_closed = True
        self._news.set()
        if self._thread is not None and self._owner == os.getpid():
            self._thread.join(EVERY_S * 50)

    def step(self, known: Announced | None) -> tuple[Announced | None, bool]:
        """Tell the cache the next part of what it does not know; what it knows then, and whether there is more to tell.
        Raises what the cache says."""
        with self._lock:
            if self._coming is None:
                return known, False
            asks_first = known is None and self.told is not None
            if known is not None and known.plan > self._plan:
                self._plan = known.plan + 1
            start = known.stop if known is not None and known.plan == self._plan else 0
            if start < self._coming.start and not asks_first:
                self._begin_anew()
                start = 0
            coming, plan, cursor = self._coming, self._plan, self._cursor
            while coming.passes < PASSES_AHEAD and coming.stop - cursor < READS_AHEAD_MAX:
                coming.add()
            stop = min(coming.stop, cursor + READS_AHEAD_MAX)
            if time.monotonic() < self._refused_until:
                stop = min(stop, start)
            # Where it could not be reached meanwhile, it says itself what it has not forgotten.
            said = self._message(coming, start, 0 if asks_first else stop, known)
        if said is None:
            return known, False
        told = self.told = orders.announce(self._client, self._bucket, said)
        if asks_first:
            return told, True
        is_all = told.plan == plan and told.stop >= stop
        if said.reads and told.stop <= start:
            self._refused_until = time.monotonic() + RETRY_S  # it has no room for more
        return told, not is_all and time.monotonic() >= self._refused_until

    def figures(self) -> dict[str, float]:
        """What the cache fetched before it was asked for."""
        told = self.told
        return {} if told is None else {"records": told.prefetched, "bytes": told.prefetched_bytes}

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def withdraw(self) -> None:
        """Have the cache forget it now. Raises what the cache says."""
        orders.withdraw(self._client, self._bucket, self._stream)

    def _begin_anew(self) -> None:
        """The cache has forgotten what was read in passes before: positions are counted from this one on."""
        assert self._coming is not None
        self._cursor -= self._coming.start
        self._asked -= self._coming.start
        of = self._coming.of
        self._coming = ComingRecords(of, groups_for(of, self._records))
        self._plan += 1

    def _message(
        self, coming: ComingRecords, start: int, stop: int, known: Announced | None
    ) -> Announcement | None:
        """What is read from `start` on, before `stop`. None if the records are not read through the cache."""
        common: dict[str, Any] = {
            "stream": self._stream, "plan": self._plan, "group": self._group, "catalog": self._catalog,
            "cursor": self._cursor, "asked": self._asked, "lease_s": LEASE_S,
            "at_owners": self._at_owners,
        }  # fmt: skip
        if start >= stop:
            return Announcement(**common)
        chunk = coming.chunk(start, min(CHUNK, stop - start))
        reads = self._records.reads(chunk.records)
        if reads is None:
            self._is_closed = True
            return None
        keys = 0 if known is None else known.keys
        if keys < len(reads.keys):
            some = list(reads.keys[keys : keys + CHUNK])
            common |= {"first_key": keys, "keys": some}
            if keys + len(some) < len(reads.keys):
                return Announcement(**common)
        return Announcement(
            start=start,
            reads=reads.objects.astype("<u4").tobytes(),
            spans=self._spans(reads),
            round=chunk.epoch,
            **common,
        )

    def _spans(self, reads: Reads) -> bytes:
        """Nothing where each object is one record, and none is large."""
        if self._is_by_bytes is None:
            self._is_by_bytes = len(reads.keys) != len(self._records) or _has_large(self._records)
        if not self._is_by_bytes:
            return b""
        return np.stack([reads.starts, np.maximum(reads.starts, reads.stops)], axis=1).astype("<u8").tobytes()


def _has_large(records: Records) -> bool:
    reads = records.reads(np.arange(len(records), dtype=np.int64))
    return reads is not None and bool((reads.stops - reads.starts > WHOLE_BYTES_MAX).any())


def _run(ref: weakref.ref[Announcer], news: threading.Event) -> None:
    """The announcer's thread, which does not keep it alive."""
    known: Announced | None = None
    has_more, wait_s, rests_until, is_refused = False, RENEWED_S, 0.0, False
    while True:
        if not has_more:
            news.wait(wait_s)
            news.clear()
        while (rest_s := rests_until - time.monotonic()) > 0:
            time.sleep(min(rest_s, EVERY_S * 10))
            waiting = ref()
            if waiting is None or waiting.is_closed:
                break
            del waiting
        announcer = ref()
        if announcer is None:
            return
        try:
            if announcer.is_closed:
                announcer.withdraw()
                return
            known, has_more = announcer.step(known)
            wait_s = RENEWED_S
        except CacheUnavailable:
            if announcer.is_closed:
                return
            known, has_more, wait_s, rests_until = None, True, RENEWED_S, time.monotonic() + RETRY_S
        except ConfigError as error:
            if announcer.is_closed:
                return
            # Others have announced all that it takes, and come to their end.
            if not is_refused:
                log.warning(
                    "the cache is not told of the reads to come now, which costs only speed: %s", error
                )
            is_refused = True
            known, has_more, wait_s, rests_until = None, True, RENEWED_S, time.monotonic() + REFUSED_S
        except StokerError as error:
            log.warning("the cache is not told of the reads to come, which costs only speed: %s", error)
            return
        except Exception:
            log.exception("the cache is not told of the reads to come, which costs only speed")
            return
        del announcer
        time.sleep(EVERY_S)
