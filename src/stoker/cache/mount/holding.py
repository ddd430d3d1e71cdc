"""A mount's holder in the background: what to mount comes as one JSON line on stdin, how it went goes to stdout."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from stoker.cache.mount.holder import Holder, HolderConfig
from stoker.cache.mount.places import MountPlace, mounted_on
from stoker.errors import CacheError, ConfigError, EnvironmentProblem, StokerError

log = logging.getLogger("stoker.mount")
_READY_S = 120.0
"""Besides the time in which the source may answer."""


class Outcome(msgspec.Struct, frozen=True):
    """No error: it is mounted."""

    error: str = ""
    exit_code: int = 0
    warning: str = ""


def hold(config: HolderConfig, place: MountPlace, on_ready: Callable[[str], None]) -> int:
    """In this process, until it is unmounted; what to exit with. Raises EnvironmentProblem, ConfigError."""
    if not place.take():
        info = place.info()
        if info is not None and mounted_on(config.folder) is None:
            raise EnvironmentProblem(
                f"{config.folder}: its last mount was ended, and process {info.pid} goes on for those who have files "
                "open there: end them first, or that process"
            )
        raise EnvironmentProblem(
            f"{config.folder} is being mounted, or is mounted, by another `stoker mount`: `stoker mount` lists them"
        )
    place.clear()
    if config.embedded is not None and config.behind is not None and config.behind.token:
        place.keep_token(config.behind.token)
    return Holder(config, place, on_ready).run()


def start(config: HolderConfig, place: MountPlace) -> int:
    """In a process of its own; its number, once it is mounted. Raises StokerError, of what kind its exit code says."""
    with place.open_log() as logged:
        child = subprocess.Popen(
            # -P: a user's own queue.py or http.py is not Python's
            [sys.executable, "-P", "-m", "stoker.cache.mount.holding"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=logged,
            start_new_session=True,
            cwd="/",
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(msgspec.json.encode(config) + b"\n")
        with child.stdout:
            outcome = _outcome(child.stdout.fileno(), _READY_S + config.settings.timeout_s)
    except BaseException:
        child.terminate()
        raise
    if outcome is None:
        child.terminate()
        raise EnvironmentProblem(f"{config.folder} could not be mounted: see {place.log_path}")
    if outcome.error:
        child.wait()
        kinds = {kind.exit_code: kind for kind in (ConfigError, CacheError, EnvironmentProblem)}
        raise kinds.get(outcome.exit_code, StokerError)(outcome.error)
    if outcome.warning:
        log.warning("%s", outcome.warning)
    return child.pid


def _outcome(output: int, within_s: float) -> Outcome | None:
    until = time.monotonic() + within_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
        data = os.read(output, 65536) if readable else b""
        if not data:
            return None
        line += data
    return msgspec.json.decode(line, type=Outcome)


def _say(outcome: Outcome) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever has started it is gone
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def main() -> int:
    """Hold what stdin says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=HolderConfig)
    try:
        return hold(config, MountPlace(config.folder), lambda warning: _say(Outcome(warning=warning)))
    except StokerError as error:
        log.error("%s", error)
        _say(Outcome(str(error), error.exit_code))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
