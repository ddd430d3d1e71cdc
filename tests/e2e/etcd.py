"""Real etcd processes, for tests: one member or several, that can be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _candidates() -> Iterator[int]:
    """Ports below those that the kernel takes for connections, and between those of seaweedfs (`s3_server.py`), again
    and again. Each process of pytest-xdist has its own, and each other process another start."""
    lowest, count, processes = 23_000, 600, 8
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % processes
    start = os.getpid() * 2_654_435_761
    for step in itertools.count():
        yield lowest + (start + step) % count * processes + own


_PORTS = _candidates()


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, and that nobody here was given before: who was may not have opened theirs yet."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in itertools.islice(_PORTS, 10_000):
            held = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError(f"no {count} free ports")


class Member:
    """One etcd process with its own data folder."""

    def __init__(
        self,
        name: str,
        folder: Path,
        client_port: int,
        peer_port: int,
        extra: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.endpoint = f"127.0.0.1:{client_port}"
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.extra = extra
        self.tls = tls
        self.process: subprocess.Popen[bytes] | None = None
        self._cluster = ""

    def start(self, cluster: str = "") -> None:
        """Start, with the data that is there."""
        program = shutil.which("etcd")
        assert program is not None, "etcd is not installed: `make system` installs it"
        self._cluster = cluster or self._cluster
        url = f"{'https' if self.tls else 'http'}://{self.endpoint}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    *("--name", self.name, "--data-dir", str(self.folder / "data")),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                    *("--initial-cluster", self._cluster, "--log-level", "warn", *self.extra),
                ],
                stdout=log,
                stderr=log,
            )

    def send(self, number: int) -> None:
        """Send a signal; SIGKILL is waited for."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Etcd:
    """A cluster of one or more members. `url` is what Stoker is told."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        extra: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        ports = free_ports(2 * members)
        self.members = [
            Member(f"m{i}", folder / f"m{i}", ports[2 * i], ports[2 * i + 1], extra, tls)
            for i in range(members)
        ]
        self.url = "etcd://" + ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start all members and wait until they serve."""
        cluster = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.start(cluster)
        self.wait_healthy()

    def wait_healthy(self, timeout_s: float = 60.0) -> None:
        """Wait until every running member answers a linearizable read."""
        deadline = time.monotonic() + timeout_s
        for member in self.members:
            while member.process is not None and member.process.poll() is None:
                try:
                    request(member.endpoint, "kv/range", {"key": "AA=="}, timeout_s=2.0, tls=member.tls)
                    break
                except (OSError, urllib.error.URLError) as error:
                    if time.monotonic() > deadline:
                        raise AssertionError(f"{member.name} is not healthy: {error}") from None
                    time.sleep(0.05)

    def leader(self) -> Member:
        """The member that leads the cluster."""
        for member in self.members:
            status = request(member.endpoint, "maintenance/status", {}, timeout_s=2.0, tls=member.tls)
            if status.get("leader") == status["header"]["member_id"]:
                return member
        raise AssertionError("no member leads")

    def stop(self) -> None:
        """End all members."""
        for member in self.members:
            member.stop()


def request(
    endpoint: str, path: str, body: dict[str, Any], timeout_s: float = 5.0, tls: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """One request to one member's JSON gateway, by other means than Stoker's client."""
    url = f"{'https' if tls else 'http'}://{endpoint}/v3/{path}"
    with urllib.request.urlopen(
        urllib.request.Request(url, data=json.dumps(body).encode()), timeout=timeout_s, context=tls
    ) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


@contextlib.contextmanager
def running_etcd(
    folder: Path, members: int = 1, extra: tuple[str, ...] = (), tls: ssl.SSLContext | None = None
) -> Iterator[Etcd]:
    """A cluster that is gone at the end. `tls`: what its owner's requests use, if `extra` makes it want that."""
    etcd = Etcd(folder, members, extra, tls)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()
