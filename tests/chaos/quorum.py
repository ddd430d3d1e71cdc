"""etcd with one member on each of some test hosts, which lives and dies with its host."""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import time
import urllib.error
from collections.abc import Sequence
from typing import Any

from tests.e2e.etcd import request
from tests.e2e.hosts import Host

CLIENT_PORT, PEER_PORT = 2379, 2380


class Quorum:
    """The members. `url` is what Stoker is told."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        self.url = "etcd://" + ",".join(f"{host.address}:{CLIENT_PORT}" for host in hosts)
        self._cluster = ",".join(f"{host.name}=http://{host.address}:{PEER_PORT}" for host in hosts)
        self._members: dict[int, subprocess.Popen[Any]] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the hosts that have a member."""
        return tuple(host.number for host in self.hosts)

    def start(self) -> None:
        """Start all members."""
        self.start_on(*self.numbers)

    def start_on(self, *numbers: int) -> None:
        """Start the members that these hosts have, with the data that is there."""
        program = shutil.which("etcd")
        assert program is not None, "etcd is not installed: `make system` installs it"
        for host in (host for host in self.hosts if host.number in numbers):
            client, peer = (f"http://{host.address}:{port}" for port in (CLIENT_PORT, PEER_PORT))
            with (host.folder / "etcd.log").open("ab") as log:
                self._members[host.number] = host.popen(
                    *(program, "--name", host.name, "--data-dir", str(host.folder / "etcd")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", self._cluster, "--log-level", "warn"),
                    stdout=log,
                    stderr=log,
                )

    def wait_healthy(self, observer: Host, timeout_s: float = 60.0) -> None:
        """Wait until every member answers a linearizable read."""
        deadline = time.monotonic() + timeout_s

        def ask() -> None:
            for host in self.hosts:
                request(f"{host.address}:{CLIENT_PORT}", "kv/range", {"key": "AA=="}, timeout_s=2.0)

        while True:
            try:
                observer.call(ask)
                return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"etcd is not healthy: {error}") from None
                time.sleep(0.1)

    def master_host(self, observer: Host, job: str) -> Host:
        """Where etcd says that the job's master is."""
        key = base64.b64encode(f"/stoker/jobs/{job}/master".encode()).decode()
        where = f"{self.hosts[0].address}:{CLIENT_PORT}"
        found = observer.call(lambda: request(where, "kv/range", {"key": key}))["kvs"]
        address = base64.b64decode(found[0]["value"]).decode().rpartition(":")[0]
        return next(host for host in self.hosts if host.address == address)

    def stop(self) -> None:
        """End all members."""
        for member in self._members.values():
            member.send_signal(signal.SIGKILL)
            member.wait()
