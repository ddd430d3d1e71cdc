"""The real Envoy in front of servers that speak TLS: whom it believes, and under which name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.maglev import Member, Placement
from stoker.settings import ClientTlsFiles
from tests.certificates import Authority
from tests.e2e.cache_helpers import ServerProcess, fill
from tests.e2e.envoy import EnvoyProcess, Processes, wait_until
from tests.e2e.etcd import free_ports

pytestmark = pytest.mark.real
TOKEN = "a-token-of-the-fleet"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    begun = Processes(tmp_path)
    yield begun
    begun.end()


@contextlib.contextmanager
def sealed_fleet(
    folder: Path, authority: Authority, servers: dict[str, tuple[str, ...]], host: str, *options: str
) -> Iterator[None]:
    """Servers by name, each with the hosts in its certificate (none: it speaks plain HTTP), reached at `host`."""
    me = authority.client("a-server")
    environment = {
        "STOKER_CACHE_CA": str(authority.path), "STOKER_CACHE_CERT": str(me[0]), "STOKER_CACHE_CERT_KEY": str(me[1]),
    }  # fmt: skip
    begun: dict[str, tuple[ServerProcess, str]] = {}
    try:
        for (name, hosts), port in zip(servers.items(), free_ports(len(servers)), strict=True):
            words = ["--dir", str(folder / name), "--name", name, "--capacity", "1GB", "--token", TOKEN]
            words += ["--bucket", f"b={folder}/o", "--fleet", f"{folder}/members"]
            words += ["--listen", f"127.0.0.1:{port}"]
            url = f"http://{host}:{port}"
            if hosts:
                url = f"https://{host}:{port}"
                certificate, key = authority.server(name, *hosts)
                words += ["--tls-cert", str(certificate), "--tls-key", str(key), *options]
            process = ServerProcess(*words, "--advertise", url, environment=environment)
            begun[name] = process, url
        tls = ClientTlsFiles(str(authority.path), *map(str, me))
        for name, (_, url) in begun.items():
            if not servers[name] or host in servers[name]:  # else nobody could ask it
                with CacheClient(url, TOKEN, tls=tls, timeout_s=60) as client:
                    wait_until(
                        lambda client=client: len(client.fleet().members) == len(servers), lambda: "no fleet"
                    )
        yield
    finally:
        for process, _ in begun.values():
            process.child.kill()
            process.child.communicate()


def reads_all(envoy: EnvoyProcess, objects: dict[str, bytes], names: str) -> None:
    placement = Placement([Member(name) for name in names])
    for key, data in objects.items():
        owner = placement.owner(f"b/{key}")
        assert owner is not None
        assert envoy.get(f"/b/{key}", headers=AUTH) == (200, owner.name, data)


def test_servers_are_spoken_to_as_the_fleet_knows_them(tmp_path: Path, processes: Processes) -> None:
    """One of them speaks plain HTTP."""
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)], 20_000)
    servers: dict[str, tuple[str, ...]] = {"a": ("localhost",), "b": ("localhost",), "c": ()}
    with sealed_fleet(tmp_path, authority, servers, "localhost"):
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoy = processes.envoy("envoy", "--discovery", discovery.address, "--ca", str(authority.path))
        envoy.wait_for_servers(3)
        reads_all(envoy, objects, "abc")
        wrong = processes.envoy("wrong", "--discovery", discovery.address, "--ca", str(other.path))
        none = processes.envoy("none", "--discovery", discovery.address)
        for stranger in (wrong, none):
            stranger.wait_for_servers(1, 3)
            found = {stranger.get(f"/b/{key}", headers=AUTH)[:2] for key in objects}
            assert found == {(200, "c")}, "it asks nobody whom it does not trust"


@pytest.mark.parametrize("name", ["", "fleet.site"])
def test_the_certificate_is_that_of_the_host_or_has_the_name_that_was_given(
    tmp_path: Path, processes: Processes, name: str
) -> None:
    authority = Authority(tmp_path / "pki")
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)], 20_000)
    right = ("localhost", "fleet.site")
    servers: dict[str, tuple[str, ...]] = {"a": right, "b": right, "c": ("elsewhere",)}
    with sealed_fleet(tmp_path, authority, servers, "localhost"):
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        shown = ("--server-name", name) if name else ()
        envoy = processes.envoy("e", "--discovery", discovery.address, "--ca", str(authority.path), *shown)
        envoy.wait_for_servers(2, 3)
        for key, data in objects.items():
            got = envoy.get(f"/b/{key}", headers=AUTH)
            assert (got.status, got.body, got.server in "ab") == (200, data, True)


def test_servers_that_are_known_by_addresses_need_a_name(tmp_path: Path, processes: Processes) -> None:
    authority = Authority(tmp_path / "pki")
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)], 20_000)
    hosts = ("127.0.0.1", "localhost", "fleet.site")
    with sealed_fleet(tmp_path, authority, {"a": hosts, "b": hosts}, "127.0.0.1"):
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        shown = ("--discovery", discovery.address, "--ca", str(authority.path))
        envoy = processes.envoy("named", *shown, "--server-name", "fleet.site")
        envoy.wait_for_servers(2)
        reads_all(envoy, objects, "ab")
        nameless = processes.envoy("nameless", *shown)
        nameless.wait_for_servers(0, 2)
        assert nameless.get("/b/k000", headers=AUTH).status == 503


def test_servers_that_require_a_certificate_are_shown_one(tmp_path: Path, processes: Processes) -> None:
    authority = Authority(tmp_path / "pki")
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)], 20_000)
    required = ("--tls-client-ca", str(authority.path), "--tls-client-required")
    servers: dict[str, tuple[str, ...]] = {"a": ("localhost",), "b": ("localhost",)}
    with sealed_fleet(tmp_path, authority, servers, "localhost", *required):
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        shown = ("--discovery", discovery.address, "--ca", str(authority.path))
        certificate, key = map(str, authority.client("envoy"))
        envoy = processes.envoy("known", *shown, "--client-cert", certificate, "--client-key", key)
        envoy.wait_for_servers(2)
        reads_all(envoy, objects, "ab")
        processes.envoy("unknown", *shown).wait_for_servers(0, 2)


def test_another_authority_is_believed_once_it_takes_the_place_of_the_one_before(
    tmp_path: Path, processes: Processes
) -> None:
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)], 20_000)
    trusted = tmp_path / "trusted.pem"

    def trust(whom: Authority) -> None:
        new = tmp_path / "new.pem"
        new.write_bytes(whom.path.read_bytes())
        new.replace(trusted)

    trust(other)
    with sealed_fleet(tmp_path, authority, {"a": ("localhost",), "b": ("localhost",)}, "localhost"):
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoy = processes.envoy("envoy", "--discovery", discovery.address, "--ca", str(trusted))
        envoy.wait_for_servers(0, 2)
        trust(authority)
        envoy.wait_for_servers(2)
        # Who was not believed may be asked no more for a while.
        for key, data in objects.items():
            wait_until(
                lambda key=key, data=data: envoy.get(f"/b/{key}", headers=AUTH)[::2] == (200, data),
                lambda key=key: key,  # type: ignore[misc]
            )
