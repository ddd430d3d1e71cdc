"""The real Envoy in front of real cache servers: it asks the owner, whoever comes or goes."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.maglev import Member, Placement
from tests.e2e.cache_helpers import ServerProcess, fill
from tests.e2e.envoy import EnvoyProcess, Processes, Readers, ask, owner_names, wait_until
from tests.e2e.etcd import free_ports
from tests.e2e.test_cache_fleet import TOKEN, FleetOfServers, fleet_of

pytestmark = pytest.mark.real
AUTH = {"Authorization": f"Bearer {TOKEN}"}
KEYS = [f"train/part-{n % 7}/{n:06d}.bin" for n in range(10_000)]
ODD_KEYS = [f"date=2026-11-{n:02}/ü {n}%2F&+.bin" for n in range(30)] + ["//a//../b", "x?y", "x#y"]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    begun = Processes(tmp_path)
    yield begun
    begun.end()


@contextlib.contextmanager
def listed_servers(folder: Path, weights: str = "1111") -> Iterator[dict[str, str]]:
    """Four servers in two zones with a fixed list; gives what the list says of each."""
    ports = free_ports(4)
    listed = {
        f"cache-{n}": f"cache-{n}=http://127.0.0.1:{port};weight={weights[n]};zone=z{n % 2}"
        for n, port in enumerate(ports)
    }
    (folder / "o").mkdir(exist_ok=True)
    servers: list[ServerProcess] = []
    try:
        for n, (name, port) in enumerate(zip(listed, ports, strict=True)):
            options = ("--dir", str(folder / name), "--capacity", "1GB", "--token", TOKEN, "--name", name)
            place = ("--listen", f"127.0.0.1:{port}", "--fleet", ",".join(listed.values()))
            servers.append(
                ServerProcess(*options, *place, "--bucket", f"b={folder}/o", "--zone", f"z{n % 2}")
            )
        yield listed
    finally:
        for server in servers:
            server.child.kill()
            server.child.communicate()


def placement_of(listed: dict[str, str], weights: str) -> Placement:
    return Placement([Member(name, int(weights[n]), f"z{n % 2}") for n, name in enumerate(listed)])


def reverse(file: Path, to: Path) -> None:
    """The same endpoints, the last first."""
    told = json.loads(file.read_bytes())
    for resource in told["resources"]:
        resource["endpoints"].reverse()
        for group in resource["endpoints"]:
            group["lb_endpoints"].reverse()
    to.write_text(json.dumps(told))


@pytest.mark.parametrize("weights", ["1111", "1253"])
def test_envoys_and_servers_name_the_same_owner(tmp_path: Path, processes: Processes, weights: str) -> None:
    with listed_servers(tmp_path, weights) as listed:
        placement = placement_of(listed, weights)
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        file = tmp_path / "endpoints.json"
        discovery = processes.discovery(
            "--fleet", ",".join(listed.values()), "--token", TOKEN, "--to", str(file)
        )
        backwards = processes.discovery("--fleet", ",".join(reversed(listed.values())))
        wait_until(file.exists, lambda: "no file")
        reverse(file, tmp_path / "last-first.json")
        shown = ("--discovery", discovery.address, "--token-file", str(tmp_path / "token"))
        envoys = [
            processes.envoy("first", *shown),
            processes.envoy("backwards", "--discovery", f"localhost:{backwards.address.rpartition(':')[2]}"),
            processes.envoy("reversed", "--to", str(tmp_path / "last-first.json")),
        ]
        for envoy in envoys:
            envoy.wait_for_servers(4)
        keys = KEYS if weights == "1111" else KEYS[::5]
        found = envoys[0].owners("b", keys, AUTH)
        assert found == owner_names(placement, "b", keys)
        for envoy in envoys[1:]:
            some = keys[::5]
            assert envoy.owners("b", some, AUTH) == {key: found[key] for key in some}
        for envoy in envoys:
            assert envoy.owners("b", ODD_KEYS, AUTH) == owner_names(placement, "b", ODD_KEYS)
        counts = Counter(found.values())
        if weights == "1111":
            assert all(abs(counts[name] / (len(KEYS) / 4) - 1) < 0.05 for name in listed), counts


def test_what_passes_through(tmp_path: Path, processes: Processes) -> None:
    """Ranges, HEAD, queries and raw keys go to the owner; targets, statuses and request ids are what they were."""
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(60)] + ["d e/f%g=h"], 50_000)
    with fleet_of(tmp_path, "abcd", str(tmp_path / "o")) as fleet:
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoy = processes.envoy("envoy", "--discovery", discovery.address)
        envoy.wait_for_servers(4)
        placement = Placement([Member(name) for name in "abcd"])
        for key, data in objects.items():
            owner = placement.owner(f"b/{key}")
            assert owner is not None
            target = "/b/" + key.replace("%", "%25").replace(" ", "%20").replace("=", "%3D")
            assert envoy.get(target, headers=AUTH) == (200, owner.name, data)
            part = envoy.get(target, headers={**AUTH, "Range": "bytes=40000-49999"})
            assert part == (206, owner.name, data[40_000:])
            assert envoy.get(target, method="HEAD", headers=AUTH) == (200, owner.name, b"")
            assert envoy.get(f"{target}?versions=", headers=AUTH).server == owner.name
            assert envoy.get(f"/-/stat{target}", headers=AUTH)[:2] == (200, owner.name)
            raw = placement.owner("b/file://t//p/%41?x")
            assert raw is not None
            assert envoy.get("/blob/b/file://t//p/%41?x", headers=AUTH).server == raw.name
        assert fleet.origin_bytes() == sum(map(len, objects.values()))
        for name in "abcd":
            with fleet.client(name) as client:
                status = client.status()
                assert status.buckets[0].peer_bytes == 0, "nobody asks another server"
        with CacheClient(f"http://127.0.0.1:{envoy.port}", TOKEN) as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
            assert client.stat("b", "k000").size_bytes == 50_000
        assert envoy.get("/b/none", headers=AUTH).status == 404
        assert envoy.get("/b/k000", headers={"x-stoker-name": "b/other"}).status == 401
        assert envoy.get("/b/a%0d%0aRange:%20bytes=0-0", headers=AUTH).status == 404
        assert envoy.get("/b/a#b", headers=AUTH).status == 400, "Envoy refuses it"
        with envoy.connection() as connection:
            connection.request("GET", "/b/k000", headers={**AUTH, "X-Request-ID": "mine"})
            answer = connection.getresponse()
            answer.read()
            assert answer.getheader("x-request-id") == "mine"


def test_servers_come_and_go_under_load(tmp_path: Path, processes: Processes) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(400)], 20_000)
    with fleet_of(tmp_path, "abcd", str(tmp_path / "o")) as fleet:
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoys = [processes.envoy(f"e{n}", "--discovery", discovery.address) for n in range(2)]
        for envoy in envoys:
            envoy.wait_for_servers(4)
        with Readers(envoys, objects, AUTH) as readers:
            readers.go_on(500)
            assert not readers.errors
            kill(fleet, "b")
            settle(envoys, "acd", objects)
            readers.go_on(500)
            killed = list(readers.errors)
            fleet.start("b")
            settle(envoys, "abcd", objects)
            fleet.servers["c"].stop(signal.SIGTERM)
            settle(envoys, "abd", objects)
            fleet.start("e")
            settle(envoys, "abde", objects)
            readers.go_on(500)
        assert not readers.wrong
        assert len(killed) <= 6, f"a reader loses at most what it was being sent: {killed}"
        assert readers.errors == killed, "who leaves and who comes costs nobody anything"


def kill(fleet: FleetOfServers, name: str) -> None:
    server = fleet.servers.pop(name)
    server.child.kill()
    server.child.communicate()


def settle(envoys: list[EnvoyProcess], names: str, objects: dict[str, bytes]) -> None:
    """Wait until both Envoys name the same owners, those of a fleet of these servers."""
    expected = owner_names(Placement([Member(name) for name in names]), "b", objects)
    for envoy in envoys:
        envoy.wait_for_servers(len(names))
        wait_until(
            lambda e=envoy: e.owners("b", objects, AUTH) == expected,  # type: ignore[misc]
            lambda e=envoy: Counter(e.owners("b", objects, AUTH).values()),  # type: ignore[misc]
        )


def test_traffic_goes_on_while_discovery_is_away(tmp_path: Path, processes: Processes) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(100)], 5000)
    with fleet_of(tmp_path, "abc", str(tmp_path / "o")) as fleet:
        # At a port that is still its own when it is back.
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        discovery = processes.discovery("--fleet", f"{tmp_path}/members", listen=listen)
        envoy = processes.envoy("envoy", "--discovery", discovery.address)
        envoy.wait_for_servers(3)
        with Readers([envoy], objects, AUTH) as readers:
            readers.go_on(100)
            discovery.child.send_signal(signal.SIGSTOP)  # it accepts connections, and says nothing
            kill(fleet, "b")
            envoy.wait_for_servers(2, 3)
            readers.go_on(300)
            assert len(readers.errors) <= 6, readers.errors
            assert discovery.child.poll() is None
            discovery.child.send_signal(signal.SIGCONT)
            assert discovery.stop(signal.SIGINT) == 0
            fleet.start("d")
            readers.go_on(300)
            processes.discovery("--fleet", f"{tmp_path}/members", listen=listen)
            settle([envoy], "acd", objects)
            (tmp_path / "members").rename(tmp_path / "elsewhere")
            readers.go_on(300)
            envoy.restart()
            envoy.wait_for_servers(3)
            (tmp_path / "elsewhere").rename(tmp_path / "members")
        assert not readers.wrong


def test_who_leaves_gets_nothing_new_though_nobody_tells_of_it(tmp_path: Path, processes: Processes) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(100)], 5000)
    fill(tmp_path / "o", ["large"], 60_000_000)
    with fleet_of(tmp_path, "abc", str(tmp_path / "o")) as fleet:
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoy = processes.envoy("envoy", "--discovery", discovery.address)
        envoy.wait_for_servers(3)
        discovery.child.send_signal(signal.SIGSTOP)
        leaving = fleet.servers["c"]
        slow = http.client.HTTPConnection(leaving.url.removeprefix("http://"), timeout=120)
        with contextlib.closing(slow), Readers([envoy], objects, AUTH) as readers:
            slow.request("GET", "/b/large", headers=AUTH)
            assert slow.getresponse().status == 200  # and it takes its time to read it
            readers.go_on(100)
            leaving.child.send_signal(signal.SIGTERM)
            envoy.wait_for_servers(2, 3)
            assert leaving.child.poll() is None, "it is out before it is gone"
            readers.go_on(300)
        discovery.child.send_signal(signal.SIGCONT)
        assert (readers.errors, readers.wrong) == ([], [])


def test_what_is_in_every_zone_is_read_from_the_own_one(tmp_path: Path, processes: Processes) -> None:
    fill(tmp_path / "o", ["k"], 5000)
    with fleet_of(tmp_path, "", str(tmp_path / "o"), max_replicas=0) as fleet:
        for n, name in enumerate("abcd"):
            fleet.start(name, "--zone", f"z{n % 2}")
        fleet.wait_for_members(*"abcd")
        discovery = processes.discovery("--fleet", f"{tmp_path}/members")
        envoy = processes.envoy("envoy", "--discovery", discovery.address, "--zone", "z1", "--near", "b")
        envoy.wait_for_servers(4, cluster="stoker-near")
        keys = [f"k{n}" for n in range(200)]
        assert set(envoy.owners("b", keys, AUTH).values()) == {"b", "d"}
        assert set(envoy.owners("other", keys, AUTH).values()) == set("abcd")
        kill(fleet, "b")
        kill(fleet, "d")
        envoy.wait_for_servers(2, cluster="stoker-near")
        assert set(envoy.owners("b", keys, AUTH).values()) == {"a", "c"}


def test_strangers_learn_nothing_and_tls_is_spoken(tmp_path: Path, processes: Processes) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ("-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2")
    subprocess.run(
        ["openssl", "req", "-x509", *made, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    discovery = processes.discovery("--fleet", "http://127.0.0.1:1", "--token", TOKEN)
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    envoy = processes.envoy("envoy", "--discovery", discovery.address, *tls)
    stats = "cluster.stoker."
    wait_until(lambda: envoy.stats(stats)["update_failure"] > 0, lambda: envoy.stats(stats))
    assert envoy.stats(stats)["membership_total"] == 0
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False

    def status() -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", envoy.port, context=context)
        with contextlib.closing(connection):
            return ask(connection, "/b/k").status

    wait_until(lambda: status() == 503, lambda: "it does not listen")
