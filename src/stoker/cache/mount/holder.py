"""The process that holds a mount: it keeps the device open, and has a daemon answer it.

Where the daemon ends, in whatever way, another one goes on in its place: readers notice nothing but the time it takes.
SIGHUP has that done on purpose, as after an upgrade. SIGTERM and SIGINT unmount.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from stoker.cache.mount import device
from stoker.cache.mount.child import EXIT_STATE_GONE, Child, DaemonConfig
from stoker.cache.mount.own_cache import EmbeddedConfig, OwnCache
from stoker.cache.mount.places import BucketPlace, MountInfo, MountPlace, is_on, mounted_on
from stoker.cache.mount.retries import Retries
from stoker.cache.mount.sampling import are_small
from stoker.cache.mount.source_check import check_token, is_object, sizes_below
from stoker.cache.mount.state import MountSettings
from stoker.errors import ConfigError, EnvironmentProblem, StokerError

log = logging.getLogger("stoker.mount")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_QUICK_S = 10.0
_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_FAILURES_MAX = 10
_READY_S = 60.0
_LOOK_S = 1.0
_ENDS_S = 5.0
_DIES_S = 0.5
_FINISHES_S = 30.0
"""An unmounted daemon may write so long what it was left with, and some more."""
_WAITS = "nobody finds the mount there any more, and it ends when those who have something open are done"


class HolderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One mount. `source`: what lists of mounts show. `place`, `behind`: as DaemonConfig has them; with `embedded`
    the endpoint is found. `staging_path`: where files lie that are written, until the origin has them.
    `may_skip_opens`: the kernel opens files without asking where nearly all are small. `token_from`: what has said the
    token that the server or fleet is shown."""

    folder: str
    source: str
    place: BucketPlace
    settings: MountSettings
    behind: BucketPlace | None = None
    embedded: EmbeddedConfig | None = None
    lets_others: bool = False
    runs_programs: bool = True
    staging_path: str = ""
    may_skip_opens: bool = False
    token_from: str = ""


class Holder:
    """Of one mount, whose place is taken. Lives in the main thread of its process. `on_ready` is told what to warn of,
    if there is something."""

    def __init__(self, config: HolderConfig, place: MountPlace, on_ready: Callable[[str], None]) -> None:
        self._config = config
        self._place = place
        self._on_ready = on_ready
        self._cache: OwnCache | None = None
        self._daemon: Child | None = None
        self._dies_at: float | None = None
        self._dying: list[Child] = []
        """Those before it that stand in the kernel yet, until this one has answered what is in their way."""
        self._is_daemon_ready = False
        self._is_reloading = False
        self._daemon_again = Retries(_PAUSES_S, _QUICK_S)
        self._kill_at: float | None = None
        self._is_first = True
        self._warning = ""
        self._is_ready = False
        self._stops = 0
        self._fd = -1
        self._number = ""
        self._has_terminal = os.isatty(sys.stderr.fileno())

    def run(self) -> int:
        """Mount, and hold it until it is unmounted; what to exit with. Raises EnvironmentProblem, ConfigError."""
        config = self._config
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _given_up)
        try:
            self._start_cache()
            self._check_source()
            signals = _noting()
            self._fd = device.attach(
                config.folder, config.source,
                is_writable=config.settings.is_writable, lets_others=config.lets_others,
                runs_programs=config.runs_programs,
            )  # fmt: skip
            there = mounted_on(config.folder)
            self._number = "" if there is None else there.number
            self._daemon_again.at = time.monotonic()
            return self._hold(signals)
        finally:
            for number in _SIGNALS:
                signal.signal(number, _noted)
            self._end()

    def _hold(self, signals: int) -> int:
        until = time.monotonic() + _READY_S
        while True:
            now = time.monotonic()
            if self._daemon_again.takes(now):
                self._start_daemon(now)
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
                elif self._is_dead(daemon, time.monotonic()):
                    self._dying.append(daemon)
                    self._on_daemon_end(-signal.SIGKILL)
                elif self._kill_at is not None and time.monotonic() > self._kill_at:
                    log.error("the daemon of the mount does not end: it is killed")
                    daemon.kill()
                    self._kill_at = None
            self._dying = [one for one in self._dying if not one.is_over()]
            if self._cache is not None:
                self._cache.step(readable, time.monotonic())
            if not self._is_ready and time.monotonic() > until:
                raise EnvironmentProblem(
                    f"the mount on {self._config.folder} is not ready after {_READY_S:g} s"
                )
            self._place.shorten_log()

    def _is_dead(self, daemon: Child, now: float) -> bool:
        """Whether it runs no more, for longer than it takes to end."""
        if not daemon.is_dying():
            self._dies_at = None
        elif self._dies_at is None:
            self._dies_at = now + _DIES_S
        return self._dies_at is not None and now >= self._dies_at

    def _watched(self, signals: int) -> list[int]:
        watched = [signals]
        if self._daemon is not None:
            watched += [self._daemon.gone, *([] if self._is_daemon_ready else [self._daemon.output])]
        if self._cache is not None:
            watched += self._cache.watched()
        return watched

    def _wait_s(self) -> float:
        due = (
            self._daemon_again.at,
            self._kill_at,
            self._dies_at,
            None if self._cache is None else self._cache.due(),
        )
        return max(0.0, min([_LOOK_S, *(at - time.monotonic() for at in due if at is not None)]))

    def _on_daemon_ready(self) -> None:
        self._is_daemon_ready, self._is_first = True, False
        was_ready, self._is_ready = self._is_ready, True
        self._say()
        if not was_ready:
            self._on_ready(self._warning)

    def _on_daemon_end(self, code: int) -> None:
        self._daemon = self._kill_at = self._dies_at = None
        if code == EXIT_STATE_GONE:
            raise EnvironmentProblem(
                f"the mount on {self._config.folder} cannot be gone on with: somebody has removed what its daemon had "
                f"written down, in {self._place.state_path}"
            )
        if self._is_reloading:
            self._daemon_again.at = time.monotonic()
            return
        self._daemon_failed(_how(code))

    def _daemon_failed(self, how: str) -> None:
        pause_s = self._daemon_again.ended(time.monotonic(), was_ready=self._is_daemon_ready)
        if self._daemon_again.failures >= _FAILURES_MAX:
            raise EnvironmentProblem(
                f"{_FAILURES_MAX} daemons in a row of the mount on {self._config.folder} have ended at their start, "
                f"the last with {how}: it is given up; what they said is in the log"
            )
        log.error("the daemon of the mount has ended (%s): another one goes on in %g s", how, pause_s)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and not (self._has_terminal and _is_hung_up(sys.stderr.fileno())):
            log.info("starting the daemon anew")
            if self._cache is not None:
                self._cache.restart(time.monotonic())
            self._is_reloading = self._daemon is not None
            self._end_daemon(_ENDS_S)
            return
        self._stops += 1
        if self._stops > 1:
            self._end_daemon(_ENDS_S)
            return
        folder = self._config.folder
        if not is_on(folder, self._number):
            log.warning("%s shows something else by now: %s", folder, _WAITS)
            return
        try:
            device.unmount(folder)
            self._kill_at = time.monotonic() + _FINISHES_S
            return
        except EnvironmentProblem as error:
            log.warning("%s: %s", error, _WAITS)
        try:
            device.unmount(folder, is_lazy=True)
        except EnvironmentProblem as error:
            log.error("%s", error)  # somebody else has unmounted it just now

    def _end_daemon(self, within_s: float) -> None:
        if self._daemon is not None:
            self._daemon.end()
            self._kill_at = time.monotonic() + within_s

    def _start_daemon(self, now: float) -> None:
        """What keeps it from starting may pass; readers wait meanwhile."""
        config = self._config
        self._is_daemon_ready = False
        try:
            self._daemon = Child(
                DaemonConfig(
                    fd=self._fd,
                    folder=config.folder,
                    number=self._number,
                    holder_pid=os.getpid(),
                    is_first=self._is_first,
                    follows_reload=self._is_reloading,
                    state_path=str(self._place.state_path),
                    staging_path=config.staging_path,
                    place=config.place,
                    behind=config.behind,
                    settings=config.settings,
                )
            )
        except OSError as error:
            self._daemon_failed(f"it cannot be started: {error}")
            return
        self._is_reloading = False
        self._say()

    def _start_cache(self) -> None:
        config = self._config
        if config.embedded is None:
            return
        self._cache = OwnCache(
            config.embedded, config.place.bucket, config.place.token, self._place.socket_folder(),
            is_writable=config.settings.is_writable,
        )  # fmt: skip
        found = msgspec.structs.replace(config.place, endpoint=self._cache.start())
        self._config = msgspec.structs.replace(config, place=found)

    def _check_source(self) -> None:
        """Whether it is there, before anybody looks for it; and how large its files are. Raises what the cache says,
        and ConfigError where it is no folder."""
        config, settings = self._config, self._config.settings
        is_to_be_chosen = config.may_skip_opens and settings.wants_passthrough
        try:
            sizes_bytes = sizes_below(
                config.place, settings.timeout_s,
                is_sampled=is_to_be_chosen, is_writable=settings.is_writable, token_from=config.token_from,
            )  # fmt: skip
        except StokerError:
            if config.behind is not None:
                check_token(config.behind, settings.timeout_s, config.token_from)
            raise
        if not sizes_bytes:
            # A cache of the mount's own knows nothing but what lies below.
            own = config.embedded if config.behind is None else None
            origin_url = None if own is None else own.origin_url
            if is_object(config.behind or config.place, settings.timeout_s, origin_url):
                raise ConfigError(f"{config.source} is an object: mount the folder that it lies in")
            self._warning = f"there is nothing below {config.source} (yet): {config.folder} is empty"
            log.warning("%s", self._warning)
        if is_to_be_chosen and are_small(sizes_bytes, settings.packed_bytes_max):
            log.info("nearly all is in small files, which the kernel opens without asking (--no-small-files)")
            changed = dataclasses.replace(settings, wants_passthrough=False)
            self._config = msgspec.structs.replace(config, settings=changed)

    def _say(self) -> None:
        config = self._config
        info = MountInfo(
            folder=config.folder, source=config.source, pid=os.getpid(), place=config.place, is_ready=self._is_ready,
            daemon_pid=0 if self._daemon is None else self._daemon.pid, answers=self._is_daemon_ready,
        )  # fmt: skip
        try:
            self._place.say(info)
        except OSError as error:
            log.error("what is said of the mount in %s stays as it was: %s", self._place.path, error)

    def _end(self) -> None:
        """All of it, whatever fails."""
        with contextlib.ExitStack() as last:
            last.callback(self._place.leave)
            if self._cache is not None:
                last.callback(self._cache.stop)
            last.callback(self._close_daemons)
            if self._fd >= 0:
                os.close(self._fd)
                if is_on(self._config.folder, self._number):
                    with contextlib.suppress(EnvironmentProblem):  # somebody else has unmounted it just now
                        device.unmount(self._config.folder, is_lazy=True)

    def _close_daemons(self) -> None:
        """Who stands in the kernel until others are answered never ends where nobody is left to answer those: then the
        kernel is to fail them all."""
        daemons = [*self._dying, *([] if self._daemon is None else [self._daemon])]
        if [one for one in daemons if not one.close()]:
            with contextlib.suppress(OSError):
                device.abort(self._number)


def _noting() -> int:
    """From now on signals are read from the descriptor that is returned."""
    signals, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in _SIGNALS:
        signal.signal(number, _noted)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return signals


def _given_up(number: int, _: object) -> None:
    """Nothing is mounted yet: what was started is ended on the way out."""
    sys.exit(128 + number)


def _is_hung_up(terminal: int) -> bool:
    """Whether the terminal has been closed, on which one has its programs end."""
    poll = select.poll()
    poll.register(terminal, 0)
    return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


def _noted(*_: object) -> None:
    """A signal is read from the pipe that wakes the holder."""


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"
