"""A fleet of cache servers below mounts, whose servers are killed and started again where they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.cache.maglev import Member, Placement, block_owner_name
from tests.e2e import mount_readers as readers
from tests.e2e.etcd import free_ports
from tests.e2e.test_cache_fleet import TOKEN, FleetOfServers

SERVERS = "xyz"


class SteadyFleet(FleetOfServers):
    """Three servers, each of which listens again where it did when it was killed."""

    def __init__(self, folder: Path, origin: str, *options: str) -> None:
        folder.mkdir()
        super().__init__(folder, origin, ttl_s=3600.0)
        self._options = options
        self._ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        self._placement = Placement(Member(name) for name in SERVERS)
        (folder / "token").write_text(TOKEN)

    def begin(self, names: str = SERVERS) -> None:
        for name in names:
            self.start(name, "--listen", f"127.0.0.1:{self._ports[name]}", *self._options)
        self.wait_for_members(*SERVERS)

    def kill(self, names: str) -> None:
        for name in names:
            server = self.servers.pop(name)
            self.gone.append(server)
            server.child.kill()
            server.child.wait()

    def owner(self, key: str) -> str:
        """Who is asked for the beginning of an object, while all are there."""
        member = self._placement.owner(block_owner_name("b", key, 0))
        assert member is not None
        return member.name

    def at(self, names: str = SERVERS) -> tuple[str, ...]:
        """The options that say where the servers are."""
        endpoints = ",".join(f"http://127.0.0.1:{self._ports[name]}" for name in names)
        return "--endpoint", endpoints, "--token-file", str(self.folder / "token")

    def seen(self, name: str, keys: Sequence[str]) -> list[str]:
        """What one server says of objects."""
        with self.client(name) as client:
            return [readers.sha256(client.read("b", key)) for key in keys]


@contextlib.contextmanager
def steady_fleet(folder: Path, origin: str, *options: str) -> Iterator[SteadyFleet]:
    fleet = SteadyFleet(folder / "fleet", origin, *options)
    try:
        fleet.begin()
        yield fleet
    finally:
        fleet.stop()
