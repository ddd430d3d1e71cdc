"""The process that holds a mount: it keeps the device open, and has a daemon answer it.

Where the daemon ends, in whatever way, another one goes on in its place: readers notice nothing but the time it takes.
SIGHUP has that done on purpose, as after an upgrade. SIGTERM and SIGINT unmount.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from stoker.cache.client.fleet import open_client
from stoker.cache.embedded import EmbeddedCache
from stoker.cache.mount import device
from stoker.cache.mount.child import Child, DaemonConfig
from stoker.cache.mount.places import BucketPlace, MountInfo, MountPlace, is_on, mounted_on
from stoker.cache.mount.retries import Retries
from stoker.cache.mount.state import MountSettings
from stoker.errors import EnvironmentProblem, StokerError
from stoker.wire.cache_api import BucketSpec

log = logging.getLogger("stoker.mount")
_QUICK_S = 10.0
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_FAILURES_MAX = 10
_READY_S = 60.0
_LOOK_S = 1.0
_WAITS = "nobody finds the mount there any more, and it ends when those who have something open are done"


class EmbeddedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cache that a mount has for itself. `directory` None: a folder of its own, which goes with it. `ttl_s`: for
    how long it takes a name to be what it was."""

    origin_url: str
    directory: str | None
    capacity_bytes: int
    ttl_s: float = 3600.0


class HolderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One mount. `source`: what lists of mounts show. `place`, `behind`: as DaemonConfig has them; with `embedded`
    the endpoint is found. `staging_path`: where files lie that are written, until the origin has them."""

    folder: str
    source: str
    place: BucketPlace
    settings: MountSettings
    behind: BucketPlace | None = None
    embedded: EmbeddedConfig | None = None
    lets_others: bool = False
    staging_path: str = ""


class Holder:
    """Of one mount, whose place is taken. Lives in the main thread of its process. `on_ready` is told what to warn of,
    if there is something."""

    def __init__(self, config: HolderConfig, place: MountPlace, on_ready: Callable[[str], None]) -> None:
        self._config = config
        self._place = place
        self._on_ready = on_ready
        self._cache: EmbeddedCache | None = None
        self._daemon: Child | None = None
        self._is_daemon_ready = False
        self._daemon_again = Retries(_PAUSES_S, _QUICK_S)
        self._cache_again = Retries(_PAUSES_S, _QUICK_S)
        self._warning = ""
        self._is_ready = False
        self._stops = 0
        self._fd = -1
        self._number = ""
        self._cache_gone = -1

    def run(self) -> int:
        """Mount, and hold it until it is unmounted; what to exit with. Raises EnvironmentProblem, ConfigError."""
        signals, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _noted)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        config = self._config
        try:
            self._start_cache()
            self._check_source()
            self._fd = device.attach(
                config.folder, config.source,
                is_writable=config.settings.is_writable, lets_others=config.lets_others,
            )  # fmt: skip
            there = mounted_on(config.folder)
            self._number = "" if there is None else there.number
            self._start_daemon()
            return self._hold(signals)
        finally:
            self._end()

    def _hold(self, signals: int) -> int:
        until = time.monotonic() + _READY_S
        while True:
            self._start_what_is_due()
            readable, _, _ = select.select(self._watched(signals), [], [], self._wait_s())
            if signals in readable:
                for number in os.read(signals, 64):
                    self._on_signal(number)
            daemon = self._daemon
            if daemon is None:
                if self._stops > 1:
                    return 0
            else:
                if daemon.output in readable and daemon.is_ready():
                    self._on_daemon_ready()
                if daemon.gone in readable:
                    code = daemon.wait()
                    if code == 0 or self._stops > 1:
                        return 0
                    self._on_daemon_end(code)
            if self._cache_gone in readable:
                self._forget_cache()
                self._cache_again.ended(time.monotonic(), was_ready=True)
                log.error("the cache of the mount has ended: another one is started")
            if not self._is_ready and time.monotonic() > until:
                raise EnvironmentProblem(
                    f"the mount on {self._config.folder} is not ready after {_READY_S:g} s"
                )

    def _start_what_is_due(self) -> None:
        """Those who read wait meanwhile. What is open in passthrough is read on."""
        if self._cache_again.takes(time.monotonic()):
            try:
                self._start_cache()
            except StokerError as error:
                pause_s = self._cache_again.ended(time.monotonic(), was_ready=False)
                log.error(
                    "the cache of the mount cannot be started: %s; it is tried again in %g s", error, pause_s
                )
            else:
                self._cache_again.failures = 0
                if self._daemon is not None:
                    self._daemon.end()  # the next one knows where it is
        if self._daemon_again.takes(time.monotonic()):
            self._start_daemon()

    def _watched(self, signals: int) -> list[int]:
        watched = [signals]
        if self._daemon is not None:
            watched += [self._daemon.gone, *([] if self._is_daemon_ready else [self._daemon.output])]
        if self._cache_gone >= 0:
            watched.append(self._cache_gone)
        return watched

    def _wait_s(self) -> float:
        due = [at for at in (self._daemon_again.at, self._cache_again.at) if at is not None]
        return max(0.0, min([_LOOK_S, *(at - time.monotonic() for at in due)]))

    def _on_daemon_ready(self) -> None:
        self._is_daemon_ready = True
        if not self._is_ready:
            self._is_ready = True
            self._say()
            self._on_ready(self._warning)

    def _on_daemon_end(self, code: int) -> None:
        self._daemon = None
        pause_s = self._daemon_again.ended(time.monotonic(), was_ready=self._is_daemon_ready)
        if self._daemon_again.failures >= _FAILURES_MAX:
            raise EnvironmentProblem(
                f"{_FAILURES_MAX} daemons in a row of the mount on {self._config.folder} have ended at their start, "
                f"the last with {_how(code)}: it is given up; what they said is in the log"
            )
        log.error("the daemon of the mount has ended (%s): another one goes on in %g s", _how(code), pause_s)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            log.info("starting the daemon anew")
            if self._cache is not None:
                self._forget_cache()
                self._cache_again.at = time.monotonic()
            elif self._daemon is not None:
                self._daemon.end()
            return
        self._stops += 1
        if self._stops > 1:
            if self._daemon is not None:
                self._daemon.end()
            return
        folder = self._config.folder
        if not is_on(folder, self._number):
            log.warning("%s shows something else by now: %s", folder, _WAITS)
            return
        try:
            device.unmount(folder)
            return
        except EnvironmentProblem as error:
            log.warning("%s: %s", error, _WAITS)
        try:
            device.unmount(folder, is_lazy=True)
        except EnvironmentProblem as error:
            log.error("%s", error)  # somebody else has unmounted it just now

    def _start_daemon(self) -> None:
        config = self._config
        self._is_daemon_ready = False
        self._daemon = Child(
            DaemonConfig(
                fd=self._fd,
                folder=config.folder,
                number=self._number,
                state_path=str(self._place.state_path),
                staging_path=config.staging_path,
                place=config.place,
                behind=config.behind,
                settings=config.settings,
            )
        )
        self._say()

    def _start_cache(self) -> None:
        wanted = self._config.embedded
        if wanted is None:
            return
        if self._cache is not None:
            self._cache.stop()
        config = self._config
        spec = BucketSpec(wanted.origin_url, ttl_s=wanted.ttl_s, writable=config.settings.is_writable)
        self._cache = EmbeddedCache(
            wanted.directory, wanted.capacity_bytes, {config.place.bucket: spec}, config.place.token,
            socket_folder=self._place.socket_folder(),
        )  # fmt: skip
        endpoint = self._cache.start()
        found = msgspec.structs.replace(self._config.place, endpoint=endpoint.unix_url)
        self._config = msgspec.structs.replace(self._config, place=found)
        self._forget_cache()
        self._cache_gone = os.pidfd_open(endpoint.pid)

    def _forget_cache(self) -> None:
        """Its end is no news any more."""
        if self._cache_gone >= 0:
            os.close(self._cache_gone)
            self._cache_gone = -1

    def _check_source(self) -> None:
        """Whether it is there, before anybody looks for it. Raises what the cache says."""
        place, timeout_s = self._config.place, self._config.settings.timeout_s
        with open_client(place.endpoint, place.token, timeout_s=timeout_s, tls=place.tls) as client:
            if not client.list_page(place.bucket, place.prefix, None, 1).objects:
                self._warning = (
                    f"there is nothing below {self._config.source} (yet): {self._config.folder} is empty"
                )
                log.warning("%s", self._warning)

    def _say(self) -> None:
        config = self._config
        self._place.say(
            MountInfo(
                folder=config.folder,
                source=config.source,
                pid=os.getpid(),
                place=config.place,
                is_ready=self._is_ready,
                daemon_pid=0 if self._daemon is None else self._daemon.pid,
            )
        )

    def _end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            if is_on(self._config.folder, self._number):
                with suppress(EnvironmentProblem):  # somebody else has unmounted it just now
                    device.unmount(self._config.folder, is_lazy=True)
        if self._daemon is not None:
            self._daemon.kill()
        if self._cache is not None:
            self._cache.stop()
        self._place.leave()


def _noted(*_: object) -> None:
    """A signal is read from the pipe that wakes the holder."""


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"
