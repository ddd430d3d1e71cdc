"""A cache server as a child of this process, for one machine and one command."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stoker.cache.client.client import CacheClient
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.wire.cache_api import BucketSpec

DEFAULT_CAPACITY_BYTES = 20_000_000_000
_STOP_S = 10.0


class _Announcement(msgspec.Struct):
    endpoint: str = ""
    unix_path: str | None = None
    error: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class EmbeddedEndpoint:
    """Where the child listens: `url` over TCP, `unix_url` (faster) on this machine."""

    url: str
    unix_url: str
    pid: int


class EmbeddedCache:
    """Runs a cache server until `stop`, or until this process ends in whatever way.

    Without `directory` it caches in a private folder that `stop` removes. `buckets` maps names to origin
    URLs (another fleet is one: `stoker+http://HOST:PORT/BUCKET`) or BucketSpecs. `listen` is HOST:PORT; port 0 takes a
    free one. `is_writable`: the buckets that are given by URLs may be written to, through to their origins.
    `socket_folder`: where its Unix socket is, under the same name after each start; None: in a private folder.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        buckets: Mapping[str, str | BucketSpec] | None = None,
        token: str | None = None,
        listen: str = "127.0.0.1:0",
        *,
        is_writable: bool = False,
        socket_folder: str | Path | None = None,
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._capacity_bytes = capacity_bytes
        self._buckets = {
            name: spec if isinstance(spec, BucketSpec) else BucketSpec(spec, writable=is_writable)
            for name, spec in (buckets or {}).items()
        }
        self._token = token
        self._socket_folder = None if socket_folder is None else Path(socket_folder)
        host, colon, port = listen.rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError(f"{listen!r} is not HOST:PORT")
        self._host, self._port = host, int(port)
        self._child: subprocess.Popen[bytes] | None = None
        self._private: str | None = None
        self._said = b""
        self.endpoint: EmbeddedEndpoint | None = None

    def start(self, timeout_s: float = 30.0) -> EmbeddedEndpoint:
        """Start the child and wait until it serves.

        Raises ConfigError or EnvironmentProblem with the child's reason, or if it is not up in time.
        """
        if self.endpoint is not None:
            return self.endpoint
        deadline = time.monotonic() + timeout_s
        try:
            output = self.launch()
            while True:
                ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise EnvironmentProblem(f"the embedded cache did not start within {timeout_s:g} s")
                if (endpoint := self.announced()) is not None:
                    return endpoint
        except BaseException:
            self.stop()
            raise

    def launch(self) -> int:
        """Start the child; the descriptor of what it says, which `announced` reads. Raises EnvironmentProblem."""
        sockets = self._socket_folder
        if self._directory is None or sockets is None:
            self._private = tempfile.mkdtemp(prefix="stoker-cache-")
        folder = self._directory or Path(self._private or "") / "cache"
        config: dict[str, Any] = {
            "folder": str(folder.absolute()),
            "capacity_bytes": self._capacity_bytes,
            "host": self._host,
            "port": self._port,
            "unix_path": f"{(sockets or Path(self._private or '')).absolute()}/socket",
            "buckets": self._buckets,
            "tokens": [] if self._token is None else [self._token],
        }
        self._said = b""
        try:
            child = self._child = subprocess.Popen(
                # -P: a user's own queue.py or http.py is not Python's
                [sys.executable, "-P", "-m", "stoker.cache.server.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentProblem(f"the embedded cache cannot be started: {error}") from None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(config) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass
        return child.stdout.fileno()

    def announced(self) -> EmbeddedEndpoint | None:
        """Take what the child says; where it serves, once it has said so. Raises as `start`."""
        child = self._child
        assert child is not None
        assert child.stdout is not None
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            raise EnvironmentProblem(f"the embedded cache ended at its start (exit code {child.wait()})")
        self._said += data
        if not self._said.endswith(b"\n"):
            return None
        said = msgspec.json.decode(self._said, type=_Announcement)
        if said.error:
            raise (ConfigError if said.exit_code == ConfigError.exit_code else EnvironmentProblem)(said.error)
        self.endpoint = EmbeddedEndpoint(said.endpoint, f"unix://{said.unix_path}", child.pid)
        return self.endpoint

    def pid(self) -> int:
        """Of the child; 0: there is none."""
        return 0 if self._child is None else self._child.pid

    def ask_to_stop(self) -> None:
        """Have the child end, without waiting for that."""
        child = self._child
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.terminate()

    def kill(self) -> None:
        """End the child at once."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """Stop the child, letting it finish and make its index durable, and remove the private folder."""
        self.ask_to_stop()
        child, self._child, self.endpoint = self._child, None, None
        if child is not None:
            assert child.stdout is not None
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def client(self, timeout_s: float = 30.0) -> CacheClient:
        """A client of the child. Raises EnvironmentProblem if it was not started."""
        if self.endpoint is None:
            raise EnvironmentProblem("the embedded cache is not running: call start() first")
        return CacheClient(self.endpoint.unix_url, self._token, timeout_s=timeout_s)

    def __enter__(self) -> EmbeddedCache:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
