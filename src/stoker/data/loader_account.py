"""What a loader's report is made of, while its loops go on, and the report at the end of the program."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from stoker.cache.client.client import CacheClient
from stoker.data.loader_report import EPOCHS_KEPT, CacheFigures, Epoch, Report, total_of
from stoker.data.waiting import Times, causes
from stoker.errors import StokerError
from stoker.settings import reports_at_exit

SHOWN_AT_EXIT = 4
ACCOUNTS_KEPT = 100
Asker = Callable[[], CacheFigures | None]


class Account:
    """Of one loader. It knows nothing of the loader, and outlives it."""

    def __init__(self, loader: str) -> None:
        self.loader = loader
        self.rank = 0
        self.world_size = 1
        self.num_workers = 0
        self.ask: Asker | None = None
        """What the cache's figures are asked with; None: nobody knows any."""
        self._before: CacheFigures | None = None
        self.is_wanted = True
        """Its report, at the end of the program."""
        self._is_told = False
        self.epochs: list[Epoch] = []

    def begin(self, epoch: int, rank: int, world_size: int) -> None:
        """A loop over an epoch begins, or goes on."""
        self.rank, self.world_size, self._is_told = rank, world_size, False
        if not self.epochs or self.epochs[-1].number != epoch:
            self.close()
            self.epochs.append(Epoch(epoch))
            if len(self.epochs) > EPOCHS_KEPT:
                self.epochs[:2] = [total_of(self.epochs[:2])]
        if self._before is None:
            self._before = self._asked()

    def note(self, began_s: float, ended_s: float, times: Times, records: int, size_bytes: int) -> None:
        """The loop has waited from `began_s` to `ended_s` for a batch."""
        epoch = self.epochs[-1]
        epoch.steps += 1
        epoch.records += records
        epoch.size_bytes += size_bytes
        epoch.waited_s += ended_s - began_s
        epoch.busy_s += times.collated_s - times.began_s
        for cause, seconds in causes(began_s, ended_s, times):
            epoch.waiting[cause] += seconds

    def ran(self, seconds: float, num_workers: int) -> None:
        """A loop went on for so long."""
        self.num_workers = num_workers
        self.epochs[-1].wall_s += seconds
        self.epochs[-1].available_s += seconds * max(1, num_workers)

    def close(self) -> None:
        """The epoch has ended, for now: what the cache did meanwhile belongs to it."""
        before, self._before = self._before, None
        now = self._asked() if before is not None and self.epochs else None
        less = now.since(before) if now is not None and before is not None else None
        if less is not None:
            known = self.epochs[-1].cache or CacheFigures()
            self.epochs[-1].cache = CacheFigures(*map(sum, zip(known, less, strict=True)))

    def clear(self) -> None:
        """Begin anew."""
        last = self.epochs[-1].number if self.epochs else None
        self.epochs = [] if last is None else [Epoch(last)]
        if self._before is not None:
            self._before = self._asked()

    def report(self) -> Report:
        """Of all so far."""
        if self._before is not None:
            self.close()
            self._before = self._asked()
        cores = len(os.sched_getaffinity(0))
        epochs = [epoch for epoch in self.epochs if epoch.steps]
        return Report(self.loader, self.rank, self.world_size, self.num_workers, cores, epochs)

    def told(self) -> None:
        """Somebody has been told of all so far: at the end it need not be said again."""
        self._is_told = True

    @property
    def is_due(self) -> bool:
        """Whether there is something to be told at the end, by this rank."""
        is_news = self.is_wanted and not self._is_told
        return is_news and self.rank == 0 and any(epoch.steps for epoch in self.epochs)

    def _asked(self) -> CacheFigures | None:
        if self.ask is None:
            return None
        try:
            return self.ask()
        except StokerError:
            self.ask = None  # nobody is to wait for it again
            return None


def figures_of(client: CacheClient, bucket: str) -> CacheFigures | None:
    """What a cache server says of a bucket. Raises what the cache says."""
    for known in client.status().buckets:
        if known.name == bucket:
            return CacheFigures(
                known.hits, known.misses, known.origin_bytes, known.origin_requests, known.peer_bytes
            )
    return None


class AtExit:
    """Knows the accounts of this process's loaders, and prints their reports as it ends in good order, on rank 0."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.accounts: list[Account] = []
        atexit.register(self._print)

    def add(self, account: Account) -> None:
        """Its loops begin."""
        if account not in self.accounts:
            self.accounts = [*self.accounts, account][-ACCOUNTS_KEPT:]

    def _print(self) -> None:
        # Below a traceback nobody is to look for it, and a fork of a process has no part in its loops.
        is_crash = getattr(sys, "last_value", None) is not None
        if os.getpid() != self._owner or is_crash or not reports_at_exit():
            return
        due = [account for account in self.accounts if account.is_due]
        due.sort(key=lambda account: -sum(epoch.waited_s for epoch in account.epochs))
        with suppress(Exception):  # a stream that is closed, an end that is near: it is not worth a failure
            for account in due[:SHOWN_AT_EXIT]:
                sys.stderr.write(f"stoker: {account.report()}\n")
            if len(due) > SHOWN_AT_EXIT:
                sys.stderr.write(f"stoker: {len(due) - SHOWN_AT_EXIT} more loaders waited less\n")
            sys.stderr.flush()


@functools.cache
def at_exit() -> AtExit:
    """The process's one. Made after a cache that the process has started, so that it is asked before that ends."""
    return AtExit()
