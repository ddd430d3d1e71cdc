"""What Envoys in front of a fleet are told: the same whatever order members were heard of in, and never nothing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.clock import SystemClock
from stoker.cache.auth.access import access_of
from stoker.cache.fleet.discovery import Discovery, resolve_host
from stoker.cache.fleet.envoy import (
    CLUSTER,
    TLS,
    TRANSPORT,
    TYPE_URL,
    DiscoveryRequest,
    Endpoint,
    assignment,
    endpoints_of,
    near_resource,
    response,
)
from stoker.cache.fleet.envoy_bootstrap import Address, BootstrapOptions, bootstrap
from stoker.cli import cache_envoy
from stoker.cli.cache_envoy_serve import (
    DISCOVERY_PATH,
    HEALTH_PATH,
    DiscoveryRouter,
    DiscoveryServer,
    EndpointFiles,
)
from stoker.errors import ConfigError
from stoker.wire.cache_api import FleetMember

MEMBERS = [FleetMember(f"cache-{n}", f"http://10.0.0.{n}:7070", 1, f"z{n % 2}") for n in range(1, 6)]
ADDRESSES = {f"10.0.0.{n}": f"10.0.0.{n}" for n in range(1, 6)}
LISTENER = Address("0.0.0.0", 8080)
TOKEN = "a-long-token"


class Told:
    """A membership that says what a test lets it say."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.said: asyncio.Queue[Sequence[FleetMember]] = asyncio.Queue()

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        while True:
            yield await self.said.get()

    async def announce(self, me: FleetMember) -> None:
        raise AssertionError("discovery is no member")

    async def leave(self) -> None:
        return None


def names(told: dict[str, Any]) -> list[str]:
    return [
        endpoint["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"]
        for group in told["endpoints"]
        for endpoint in group["lb_endpoints"]
    ]


def endpoints(*members: FleetMember) -> tuple[Endpoint, ...]:
    return endpoints_of(members or MEMBERS, ADDRESSES)


@given(st.permutations(MEMBERS))
def test_the_order_in_which_members_were_heard_of_changes_nothing(members: list[FleetMember]) -> None:
    for resource in (CLUSTER, near_resource("z1")):
        assert response([resource], endpoints(*members)) == response([resource], endpoints())


def test_endpoints_are_members_with_their_shares_and_zones() -> None:
    told = assignment(CLUSTER, endpoints(FleetMember("b", "http://10.0.0.2:80", 3, "z"), MEMBERS[0]))
    assert told["cluster_name"] == "stoker"
    assert [group.get("locality") for group in told["endpoints"]] == [{"zone": "z"}, {"zone": "z1"}]
    assert told["endpoints"][0]["lb_endpoints"] == [
        {
            "endpoint": {"address": {"socket_address": {"address": "10.0.0.2", "port_value": 80}}},
            "load_balancing_weight": 3,
            "metadata": {"filter_metadata": {"envoy.lb": {"hash_key": "b"}}},
        }
    ]


def test_who_speaks_tls_is_spoken_to_by_the_name_that_the_fleet_has() -> None:
    members = FleetMember("a", "https://one.site:7443"), FleetMember("b", "http://one.site:7070")
    found = endpoints_of(members, {"one.site": "10.0.0.1"})
    told = [one for group in assignment(CLUSTER, found)["endpoints"] for one in group["lb_endpoints"]]
    assert [one["endpoint"].get("hostname") for one in told] == ["one.site", None]
    assert [one["metadata"]["filter_metadata"].get(TRANSPORT) for one in told] == [TLS, None]
    cluster = bootstrap(BootstrapOptions(LISTENER, endpoints_file="/e", server_ca="/ca"))["static_resources"][
        "clusters"
    ][0]
    (matched,) = cluster["transport_socket_matches"]
    assert matched["match"] == TLS
    socket = matched["transport_socket"]["typed_config"]
    assert (socket["auto_host_sni"], socket["auto_sni_san_validation"]) == (True, True)


def test_who_leaves_is_drained() -> None:
    leaving = msgspec.structs.replace(MEMBERS[0], weight=0)
    told = assignment(CLUSTER, endpoints(leaving, *MEMBERS[1:]))
    states = {
        endpoint["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"]: endpoint.get("health_status")
        for group in told["endpoints"]
        for endpoint in group["lb_endpoints"]
    }
    assert states == {member.name: "DRAINING" if member is MEMBERS[0] else None for member in MEMBERS}


def test_near_is_the_own_zone_first_and_all_alike_where_there_is_none() -> None:
    near = assignment(near_resource("z1"), endpoints())
    assert [group.get("priority", 0) for group in near["endpoints"]] == [0, 1]
    assert names({"endpoints": near["endpoints"][:1]}) == ["cache-1", "cache-3", "cache-5"]
    nowhere = assignment(near_resource("z9"), endpoints())
    assert sorted(names(nowhere)) == [member.name for member in MEMBERS]
    assert all("priority" not in group for group in nowhere["endpoints"])
    with pytest.raises(ConfigError, match="no resource 'other': ask for stoker or stoker@ZONE"):
        assignment("other", endpoints())


def test_members_that_cannot_be_reached_are_left_out() -> None:
    bad = [
        FleetMember("a", "http://nowhere:70"),
        FleetMember("b", "http://10.0.0.1"),
        FleetMember("c", "http://10.0.0.1:x"),
        FleetMember("d", "http://[::1:7"),
        FleetMember("e", "http://10.0.0.1:7070", -1),
    ]
    assert endpoints(*bad) == ()


def test_versions_are_those_of_the_content() -> None:
    told = response([CLUSTER], endpoints())
    assert told.version_info == response([], endpoints()).version_info, "none named: the whole fleet"
    assert told.resources[0]["@type"] == told.type_url == TYPE_URL
    assert told.version_info != response([CLUSTER], endpoints(*MEMBERS[1:])).version_info


# -- what Envoy starts with --------------------------------------------------------------------------------------


def routes_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    listener = config["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    found: list[dict[str, Any]] = manager["route_config"]["virtual_hosts"][0]["routes"]
    return found


def routed(config: dict[str, Any], method: str, target: str) -> tuple[str, str | None, str]:
    """Cluster, what is hashed (empty: a script says; None: nothing), and when it is tried again."""
    for route in routes_of(config):
        match = route["match"]
        if not re.fullmatch(match["safe_regex"]["regex"], target.partition("?")[0]):
            continue
        if "headers" in match and not re.fullmatch(
            match["headers"][0]["string_match"]["safe_regex"]["regex"], method
        ):
            continue
        if not (policy := route["route"]["hash_policy"]):
            return route["route"]["cluster"], None, route["route"]["retry_policy"]["retry_on"]
        by = policy[0]["header"]
        name = ""
        if by["header_name"] == ":path":
            rewrite = by["regex_rewrite"]
            name = re.sub(rewrite["pattern"]["regex"], rewrite["substitution"], target)
        assert ("typed_per_filter_config" in route) == bool(name), "the script runs where it is needed"
        return route["route"]["cluster"], name, route["route"]["retry_policy"]["retry_on"]
    raise AssertionError(f"no route for {method} {target}")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/b/a/k.bin", "b/a/k.bin"),
        ("/b//a/../k", "b//a/../k"),
        ("/b/k?partNumber=2&x=%20", "b/k"),
        ("/b?list-type=2", "b"),
        ("/-/stat/b/k?begins", "b/k"),
        ("/-/list/b?prefix=x", None),
        ("/-/read", None),
        ("/-/orders/b?stream=1", "-/orders/b"),
        ("/-/stat/b/a%20", ""),
        ("/blob/b/file://t//d/a.bin", "b/file://t//d/a.bin"),
        ("/blob/b/a?b%41", "b/a?b%41"),
        ("/b/date%3D1/k", ""),
    ],
)
def test_requests_are_placed_by_bucket_and_key(target: str, name: str | None) -> None:
    config = bootstrap(BootstrapOptions(LISTENER, [Address("127.0.0.1", 7080)]))
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        cluster, hashed, retry_on = routed(config, method, target)
        assert (cluster, hashed) == ("stoker", name)
        assert ("reset" in retry_on.split(",")) == (method in ("GET", "HEAD"))


def test_near_buckets_go_to_servers_of_the_zone() -> None:
    options = BootstrapOptions(
        LISTENER, [Address("10.0.0.9", 7080)], zone="z1", near_buckets=["a.b", "c"], token_file="/t"
    )
    config = bootstrap(options)
    for target in ("/a.b/k", "/c/k%20", "/blob/c/k"):
        assert routed(config, "GET", target)[0] == "stoker-near"
    for target in ("/axb/k", "/cc/k%20", "/blob/d/k", "/-/stat/c/k"):
        assert routed(config, "PUT", target)[0] == "stoker"
    services = [
        cluster["eds_cluster_config"]["service_name"]
        for cluster in config["static_resources"]["clusters"]
        if cluster["type"] == "EDS"
    ]
    assert services == ["stoker", "stoker@z1"]
    assert config["node"]["locality"] == {"zone": "z1"}


def test_the_administration_is_on_loopback_or_nowhere() -> None:
    told = bootstrap(BootstrapOptions(LISTENER, endpoints_file="/e.json"))
    assert told["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert "admin" not in bootstrap(BootstrapOptions(LISTENER, endpoints_file="/e.json", admin_port=0))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "from --discovery HOST:PORT or --to FILE"),
        ({"discovery": [LISTENER], "endpoints_file": "/e"}, "from --discovery HOST:PORT or --to FILE"),
        ({"discovery": [LISTENER], "near_buckets": ["b"]}, "--near needs --zone"),
        ({"discovery": [LISTENER], "tls_key": "k"}, "both --tls-cert and --tls-key"),
        ({"discovery": [LISTENER], "admin_port": 70000}, "not 70000"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BootstrapOptions(LISTENER, **options)


def arguments_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cache_envoy.add_envoy_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["envoy", *words])


def test_arguments_say_where_envoy_asks() -> None:
    options = cache_envoy.bootstrap_options(arguments_of("--print-bootstrap", "--port", "80"))
    assert (options.listener, options.discovery) == (Address("127.0.0.1", 80), [Address("127.0.0.1", 7080)])
    options = cache_envoy.bootstrap_options(
        arguments_of("--port", "[::1]:80", "--to", "e", "--token-file", "t")
    )
    assert (options.listener, options.discovery) == (Address("::1", 80), [])
    assert Path(options.endpoints_file).is_absolute()
    assert Path(options.token_file).is_absolute()
    with pytest.raises(ConfigError, match="no address to ask at: give --discovery"):
        cache_envoy.bootstrap_options(arguments_of("--listen", "0.0.0.0:7080"))
    with pytest.raises(ConfigError, match="--port 'x:y' is not HOST:PORT"):
        cache_envoy.bootstrap_options(arguments_of("--port", "x:y"))


def test_a_fleet_of_addresses_that_speak_tls_needs_a_name() -> None:
    fleet = (
        "--fleet",
        "https://10.0.0.1:7070,one=https://[::1]:7443,https://one.site:7070,http://10.0.0.2:7070",
    )
    for known in ((), ("--server-name", "s"), ("--ca", "ca.pem", "--server-name", "s")):
        cache_envoy.bootstrap_options(arguments_of(*fleet, *known))
    for where in ("file:///f", "etcd://10.0.0.1:2379", "https://one.site:7070"):
        cache_envoy.bootstrap_options(arguments_of("--fleet", where, "--ca", "ca.pem"))
    why = (
        "10.0.0.1:7070 at https://10.0.0.1:7070, one at https://.::1.:7443: Envoy .* with --server-name NAME"
    )
    with pytest.raises(ConfigError, match=why):
        cache_envoy.bootstrap_options(arguments_of(*fleet, "--ca", "ca.pem"))


def test_who_follows_a_fleet_is_told_of_addresses_that_speak_tls(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        told = Told()
        discovery, task = await following(told)
        for members in (
            [FleetMember("a", "https://127.0.0.1:70")],
            [FleetMember("a", "https://127.0.0.1:70"), FleetMember("b", "http://127.0.0.1:71")],
        ):
            told.said.put_nowait(members)
            await until(lambda members=members: len(discovery.endpoints or ()) == len(members))  # type: ignore[misc]
        await ended(task)

    asyncio.run(story())
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned.startswith("a at https://127.0.0.1:70: Envoy verifies certificates by names")


def test_what_is_served_to_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CACHE_TOKEN", raising=False)
    for words, why in (
        (["--fleet", "/f", "--listen", "0.0.0.0:0"], "refusing to listen on '0.0.0.0' without a token"),
        (["--fleet", "/f", "--token", f"{TOKEN}:b"], "opens nothing here"),
        ([], "say where the servers meet: --fleet"),
    ):
        arguments = arguments_of(*words)
        with pytest.raises(ConfigError, match=why):
            arguments.handler(arguments)


# -- following a fleet -------------------------------------------------------------------------------------------


async def following(told: Told, resolve: Any = resolve_host) -> tuple[Discovery, asyncio.Task[None]]:
    discovery = Discovery(told, SystemClock(), resolve)
    return discovery, asyncio.ensure_future(discovery.follow())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_who_asks_is_told_as_soon_as_there_is_something_new() -> None:
    async def run() -> None:
        told = Told()
        discovery, task = await following(told)
        assert await discovery.answer(DiscoveryRequest(), 0.01) is None, "nobody has said anything"
        waiting = asyncio.ensure_future(discovery.answer(DiscoveryRequest(), 60))
        await told.said.put(MEMBERS[:2])
        first = await waiting
        assert first is not None
        assert names(first.resources[0]) == ["cache-2", "cache-1"]
        known = DiscoveryRequest(first.version_info)
        assert await discovery.answer(known, 0.01) is None
        waiting = asyncio.ensure_future(discovery.answer(known, 60))
        await asyncio.sleep(0)
        await told.said.put(MEMBERS[:3])
        second = await waiting
        assert second is not None
        assert len(names(second.resources[0])) == 3
        await ended(task)

    asyncio.run(run())


def test_a_fleet_that_seems_empty_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        told = Told()
        discovery, task = await following(told)
        await told.said.put(MEMBERS)
        known = await discovery.answer(DiscoveryRequest(), 60)
        assert known is not None
        await told.said.put([])
        assert await discovery.answer(DiscoveryRequest(known.version_info), 0.05) is None
        assert len(discovery.endpoints or ()) == 5
        await told.said.put(MEMBERS[1:])
        assert await discovery.answer(DiscoveryRequest(known.version_info), 60) is not None
        await ended(task)

    asyncio.run(run())
    assert "those that were known last are told on" in caplog.text


def test_hosts_with_names_are_looked_up_and_keep_their_address_while_dns_is_away() -> None:
    known = {"cache-a": "10.1.0.1", "cache-b": "10.1.0.2"}

    async def resolve(host: str) -> str:
        if host not in known:
            raise OSError("no such name")
        return known[host]

    async def run() -> None:
        told = Told()
        discovery, task = await following(told, resolve)
        members = [FleetMember(name, f"http://cache-{name}:7070") for name in "abc"]
        await told.said.put(members)
        first = await discovery.answer(DiscoveryRequest(), 60)
        assert first is not None
        assert names(first.resources[0]) == ["a", "b"], "c has no address"
        assert "cache-c" in (discovery.problem or "")
        del known["cache-a"]
        known["cache-c"] = "10.1.0.3"
        await told.said.put([*members, MEMBERS[0]])
        version = first.version_info
        while len(discovery.endpoints or ()) < 4:
            newer = await discovery.answer(DiscoveryRequest(version), 60)
            assert newer is not None
            version = newer.version_info
        assert {e.member.name: e.address for e in discovery.endpoints or ()} == {
            "a": "10.1.0.1", "b": "10.1.0.2", "c": "10.1.0.3", "cache-1": "10.0.0.1",
        }  # fmt: skip
        await ended(task)

    asyncio.run(run())


def test_loopback_has_one_address() -> None:
    assert asyncio.run(resolve_host("localhost")) in ("127.0.0.1", "::1")


def test_only_who_may_is_told() -> None:
    async def run() -> None:
        told = Told()
        discovery, task = await following(told)
        router = DiscoveryRouter(discovery, access_of([TOKEN, "another-token:b"]))
        shown = {"authorization": f"Bearer {TOKEN}"}
        assert (await router.handle("GET", HEALTH_PATH, {}, b"")).status == 503
        await told.said.put(MEMBERS)
        assert (await router.handle("POST", DISCOVERY_PATH, shown, b"{}")).status == 200
        for headers in ({}, {"authorization": "Bearer another-token"}, {"authorization": TOKEN}):
            assert (await router.handle("POST", DISCOVERY_PATH, headers, b"{}")).status == 401
        health = await router.handle("GET", HEALTH_PATH, {}, b"")
        assert (health.status, json.loads(health.body)) == (200, {"servers": 5, "problem": ""})
        assert (await router.handle("GET", DISCOVERY_PATH, shown, b"")).status == 405
        assert (await router.handle("POST", "/v3/discovery:clusters", shown, b"")).status == 404
        for body in (b"{", b"[]", b'{"resource_names":["x"]}', b'{"type_url":"x"}', b'{"resource_names":1}'):
            assert (await router.handle("POST", DISCOVERY_PATH, shown, body)).status == 400, body
        await ended(task)

    asyncio.run(run())


def test_a_server_hangs_up_when_it_stops_though_somebody_waits() -> None:
    async def run() -> None:
        discovery, task = await following(Told())
        server = DiscoveryServer(DiscoveryRouter(discovery, access_of([])), "127.0.0.1", 0)
        url = await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"POST {DISCOVERY_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await asyncio.sleep(0.05)
        await server.stop()
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        writer.close()
        await ended(task)

    asyncio.run(run())


def test_files_are_written_whenever_something_changes(tmp_path: Path) -> None:
    async def run() -> None:
        told = Told()
        discovery, task = await following(told)
        file = tmp_path / "sub" / "endpoints.json"
        keeping = asyncio.ensure_future(EndpointFiles(discovery, {CLUSTER: file}).keep())
        for count in (2, 3):
            await told.said.put(MEMBERS[:count])
            if count == 2:
                await asyncio.sleep(0.05)
                file.parent.mkdir()  # it could not be written before
            await until(
                lambda count=count: (
                    file.exists()  # type: ignore[misc]
                    and len(names(json.loads(file.read_bytes())["resources"][0])) == count
                )
            )
        assert list(file.parent.iterdir()) == [file]
        assert file.stat().st_mode & 0o444 == 0o444, "Envoy may be another user"
        await ended(keeping)
        await ended(task)

    asyncio.run(run())
