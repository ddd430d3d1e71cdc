"""The cache that a mount has for itself, as the mount's holder keeps it running: nothing here waits, but its start."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from stoker.cache.embedded import EmbeddedCache
from stoker.cache.mount.retries import Retries
from stoker.cache.store.containers import IN_USE
from stoker.errors import StokerError
from stoker.wire.cache_api import BucketSpec

log = logging.getLogger("stoker.mount")
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_LASTS_S = 10.0
_STOP_S = 10.0
_START_S = 600.0
"""A large index takes a while; a start that hangs must not hang for ever."""
_RELEASED_S = 6.0
"""The cache of a mount that was killed lets go of its folder when it has noticed."""
_AGAIN_S = 0.2


class EmbeddedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cache that a mount has for itself. `directory` None: a folder of its own, which goes with it. `ttl_s`: for
    how long it takes a name to be what it was."""

    origin_url: str
    directory: str | None
    capacity_bytes: int
    ttl_s: float = 3600.0


class OwnCache:
    """Of the bucket of one mount, always at the same place: `sockets` is the folder of its Unix socket; None: one
    of its own."""

    def __init__(
        self,
        wanted: EmbeddedConfig,
        bucket: str,
        token: str | None,
        sockets: Path | None,
        *,
        is_writable: bool,
    ) -> None:
        self._private = None if sockets is not None else tempfile.mkdtemp(prefix="stoker-mount-")
        spec = BucketSpec(wanted.origin_url, ttl_s=wanted.ttl_s, writable=is_writable)
        self._cache = EmbeddedCache(
            wanted.directory,
            wanted.capacity_bytes,
            {bucket: spec},
            token,
            socket_folder=sockets or self._private,
        )
        self._again = Retries(_PAUSES_S, _LASTS_S)
        self._output = -1
        self._gone = -1
        self._until: float | None = None

    def start(self) -> str:
        """Start it, and wait for it; its URL. Raises ConfigError, EnvironmentProblem."""
        until = time.monotonic() + _RELEASED_S
        while True:
            try:
                endpoint = self._cache.start()
                break
            except StokerError as error:
                if IN_USE not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_S)
        self._gone = os.pidfd_open(endpoint.pid)
        return endpoint.unix_url

    def restart(self, now: float) -> None:
        """Another one, as after an upgrade; those who read wait meanwhile."""
        if self._gone < 0:
            self._again.at = now
        elif self._until is None or self._output >= 0:
            self._cache.ask_to_stop()
            self._output, self._until = -1, now + _STOP_S
            self._again.at = None

    def watched(self) -> list[int]:
        """Descriptors that `step` has something to do for when they can be read."""
        return [fd for fd in (self._output, self._gone) if fd >= 0]

    def due(self) -> float | None:
        """When `step` has something to do in any case."""
        return min((at for at in (self._until, self._again.at) if at is not None), default=None)

    def step(self, readable: list[int], now: float) -> None:
        """Do what is to be done now."""
        if self._output in readable:
            self._hear(now)
        if self._gone >= 0 and self._gone in readable:
            self._ended(now)
        if self._until is not None and now >= self._until:
            log.error("the cache of the mount neither starts nor ends: it is killed")
            self._cache.kill()
            self._until = None
        if self._again.takes(now):
            self._launch(now)

    def stop(self) -> None:
        """End it, and wait for that."""
        self._close()
        self._cache.stop()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    def _hear(self, now: float) -> None:
        try:
            endpoint = self._cache.announced()
        except StokerError as error:
            self._failed(error, now)
            return
        if endpoint is not None:
            self._output, self._until = -1, None
            self._again.failures = 0
            log.info("the cache of the mount serves again")

    def _ended(self, now: float) -> None:
        is_wanted = self._until is not None
        self._close()
        self._cache.stop()
        if is_wanted:
            self._again.at = now
        else:
            pause_s = self._again.ended(now, was_ready=True)
            log.error("the cache of the mount has ended: another one is started in %g s", pause_s)

    def _launch(self, now: float) -> None:
        try:
            self._output = self._cache.launch()
            self._gone = os.pidfd_open(self._cache.pid())
        except (StokerError, OSError) as error:
            self._failed(error, now)
            return
        self._until = now + _START_S

    def _failed(self, error: Exception, now: float) -> None:
        self._close()
        self._cache.kill()
        self._cache.stop()
        pause_s = self._again.ended(now, was_ready=False)
        log.error("the cache of the mount cannot be started: %s; it is tried again in %g s", error, pause_s)

    def _close(self) -> None:
        """What became of the child is no news any more."""
        if self._gone >= 0:
            os.close(self._gone)
        self._output, self._gone, self._until = -1, -1, None
