"""A mount's daemon as a process: what it serves comes as one JSON line on stdin, `ready` goes to stdout once the kernel
has agreed. Ends with 0 when it was unmounted."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker._native import PlainFiles
from stoker.cache.client.fleet import open_client
from stoker.cache.mount import device
from stoker.cache.mount.child import EXIT_HOLDER_GONE, EXIT_STATE_GONE, READY, DaemonConfig
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.daemon import Daemon
from stoker.cache.mount.finding import Finding
from stoker.cache.mount.places import BucketPlace, is_on
from stoker.cache.mount.source import CacheSource
from stoker.cache.mount.staging import Staging
from stoker.cache.mount.state_log import StateLog
from stoker.errors import EnvironmentProblem, StokerError

log = logging.getLogger("stoker.mount")


def main() -> int:
    """Answer until it is unmounted."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=DaemonConfig)
    threading.Thread(
        target=_end_with, args=(config.holder_pid, config.folder, config.number), daemon=True
    ).start()
    settings = config.settings
    try:
        source = _source(config.place, settings.timeout_s)
        behind = None if config.behind is None else _source(config.behind, settings.timeout_s)
        state_log = StateLog(Path(config.state_path))
        if state_log.is_gone(is_first=config.is_first):
            return EXIT_STATE_GONE
        plain = PlainFiles()
        core = MountCore(settings, plain)
        staging = Staging(Path(config.staging_path))
        finding = Finding(source, staging, config.fd, settings.timeout_s, behind)
        daemon = Daemon(
            config.fd, config.number, core, finding, state_log,
            plain=plain, follows_reload=config.follows_reload,
        )  # fmt: skip
        daemon.run(_ready)
    except StokerError as error:
        log.error("%s", error)
        return error.exit_code
    # Threads that wait for a server keep nobody.
    logging.shutdown()
    os._exit(0)


def _source(place: BucketPlace, timeout_s: float) -> CacheSource:
    # Of several servers one may fall silent: who waits for it still has time for what another one says.
    silence_s = timeout_s / 2 if "," in place.endpoint else timeout_s
    client = open_client(place.endpoint, place.token, timeout_s=silence_s, tls=place.tls)
    return CacheSource(client, place.bucket, place.prefix)


def _ready() -> None:
    try:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass


def _end_with(holder: int, folder: str, number: str) -> None:
    """Without a holder nobody would take over: what is mounted must not become a folder that fails."""
    try:
        gone = os.pidfd_open(holder)
        if os.getppid() == holder:  # else its number is another's already
            select.select([gone], [], [])
    except OSError:
        pass
    log.error("the process that held the mount is gone: unmounting %s", folder)
    try:
        if is_on(folder, number):
            device.unmount(folder, is_lazy=True)
        # A daemon before this one may have it open yet, and wait for who waits for it.
        with suppress(OSError):
            device.abort(number)
    except (EnvironmentProblem, OSError) as error:
        log.error("%s", error)
    finally:
        logging.shutdown()
        os._exit(EXIT_HOLDER_GONE)


if __name__ == "__main__":
    sys.exit(main())
