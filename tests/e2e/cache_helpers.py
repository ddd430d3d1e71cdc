"""A cache server as a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.cache.client.client import CacheClient

RUN_CLI = """
import argparse, sys
from stoker.cli.cache import add_cache_parser
from stoker.errors import StokerError
parser = argparse.ArgumentParser(prog="stoker")
add_cache_parser(parser.add_subparsers(required=True))
arguments = parser.parse_args()
try:
    sys.exit(arguments.handler(arguments))
except StokerError as error:
    print(f"stoker: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class ServerProcess:
    """`stoker cache serve` with these arguments. `files_max`: so many files it may open, where that is fewer; `under`:
    the program that runs it, with its arguments."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        files_max: int | None = None,
        under: Sequence[str] = (),
    ) -> None:
        limit = [] if files_max is None else ["prlimit", f"--nofile={files_max}:{files_max}"]
        self.child = subprocess.Popen(
            [
                *under,
                *limit,
                sys.executable,
                "-c",
                RUN_CLI,
                "cache",
                "serve",
                "--listen",
                "127.0.0.1:0",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line.startswith("serving at "):
            raise AssertionError(f"no server: {line!r} {self.finish()}")
        self.url = line.split()[2]

    def finish(self) -> tuple[int, str]:
        """Wait for its end; exit code and stderr."""
        _, errors = self.child.communicate(timeout=60)
        return self.child.returncode, errors

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait for the end."""
        self.child.send_signal(number)
        return self.finish()


@contextlib.contextmanager
def served(
    folder: Path,
    buckets: dict[str, str],
    *arguments: str,
    capacity: str = "1GB",
    environment: dict[str, str] | None = None,
    files_max: int | None = None,
    under: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """A server that is stopped at the end, if it still runs."""
    options = [part for name, url in buckets.items() for part in ("--bucket", f"{name}={url}")]
    options += ["--dir", str(folder), "--capacity", capacity, *arguments]
    server = ServerProcess(*options, environment=environment, files_max=files_max, under=under)
    try:
        yield server
    finally:
        if server.child.poll() is None:
            server.stop()


def fill(folder: Path, names: Sequence[str], size_bytes: int = 1000) -> dict[str, bytes]:
    """Write random objects; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = {name: os.urandom(size_bytes) for name in names}
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return objects


@contextlib.contextmanager
def client_of(server: ServerProcess, token: str | None = None) -> Iterator[CacheClient]:
    """A client that is closed at the end."""
    with CacheClient(server.url, token, timeout_s=20.0) as client:
        yield client


def wait_until_held(client: CacheClient, blocks: int) -> None:
    """What was read is stored soon after: wait until so many blocks are."""
    deadline = time.monotonic() + 60
    while (held := client.status().held_blocks) < blocks:
        assert time.monotonic() < deadline, f"{held} of {blocks} blocks are held"
        time.sleep(0.01)
