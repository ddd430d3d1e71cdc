"""A fleet's members as Envoy's endpoint discovery has them (`envoy.config.endpoint.v3`, as JSON). Pure.

Members are told in the order of their names and placed by them (`hash_key`): every Envoy fills the same Maglev table,
and it is that of `cache/maglev.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import xxhash

from stoker.cache.maglev import WEIGHT_MAX
from stoker.errors import ConfigError
from stoker.wire.cache_api import FleetMember

CLUSTER = "stoker"
"""The resource that is the whole fleet."""
TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
TRANSPORT = "envoy.transport_socket_match"
TLS = {"speaks": "tls"}
"""What an endpoint's metadata says there of a server that speaks TLS."""
_NEAR = f"{CLUSTER}@"


class Node(msgspec.Struct, frozen=True):
    """Who asks."""

    id: str = ""


class DiscoveryRequest(msgspec.Struct, frozen=True):
    """What an Envoy asks for; `version_info` is what it has."""

    version_info: str = ""
    resource_names: list[str] = []
    type_url: str = ""
    node: Node = Node()


class DiscoveryResponse(msgspec.Struct, frozen=True):
    """What it is told. The version depends on nothing but the resources."""

    version_info: str
    resources: list[dict[str, Any]]
    type_url: str = TYPE_URL


class Endpoint(msgspec.Struct, frozen=True):
    """A member, and the IP address at which Envoy reaches it: endpoints cannot be found by host names. `tls_host`: the
    name that its certificate must have; empty where it speaks plain HTTP."""

    member: FleetMember
    address: str
    port: int
    tls_host: str = ""


def near_resource(zone: str) -> str:
    """The resource with the members of a zone first, and the others for when there are none there."""
    return f"{_NEAR}{zone}"


def host_of(member: FleetMember) -> tuple[str, int] | None:
    """A member's host, a name or an IP address, and port; None where its URL has none."""
    try:
        parts = urlsplit(member.url)
        port = parts.port
    except ValueError:
        return None
    return None if parts.hostname is None or port is None else (parts.hostname, port)


def without_names(members: Sequence[FleetMember]) -> list[str]:
    """Those that speak TLS and are known by IP addresses, of which Envoy verifies no certificate: an address is no name
    that it could ask for."""
    found = []
    for member in members:
        place = host_of(member)
        if place is not None and member.url.startswith("https://") and _is_address(place[0]):
            found.append(f"{member.name} at {member.url}")
    return sorted(found)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def endpoints_of(members: Sequence[FleetMember], addresses: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Those of the members whose hosts have known addresses, in the order that is the same for everybody."""
    found = {}
    for member in members:
        place = host_of(member)
        if place is not None and place[0] in addresses and 0 <= member.weight <= WEIGHT_MAX:
            tls_host = place[0] if member.url.startswith("https://") else ""
            found[member.name] = Endpoint(member, addresses[place[0]], place[1], tls_host)
    return tuple(found[name] for name in sorted(found))


def assignment(resource: str, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The ClusterLoadAssignment of that name. Raises ConfigError for a resource that there is not."""
    if resource != CLUSTER and not resource.startswith(_NEAR):
        raise ConfigError(f"there is no resource {resource!r}: ask for {CLUSTER} or {near_resource('ZONE')}")
    near = resource.removeprefix(_NEAR) if resource != CLUSTER else None
    by_place: dict[tuple[int, str], list[dict[str, Any]]] = {}
    here = {endpoint.member.zone for endpoint in endpoints}
    for endpoint in endpoints:
        zone = endpoint.member.zone
        is_second = near is not None and near in here and zone != near
        by_place.setdefault((int(is_second), zone), []).append(_lb_endpoint(endpoint))
    groups = []
    for (priority, zone), found in sorted(by_place.items()):
        group: dict[str, Any] = {"lb_endpoints": found}
        if zone:
            group["locality"] = {"zone": zone}
        if priority:
            group["priority"] = priority
        groups.append(group)
    return {"cluster_name": resource, "endpoints": groups}


def response(resources: Sequence[str], endpoints: Sequence[Endpoint]) -> DiscoveryResponse:
    """The answer to who asks for these resources (none named: for the whole fleet). Raises ConfigError."""
    told = [
        {"@type": TYPE_URL, **assignment(name, endpoints)} for name in sorted(set(resources)) or [CLUSTER]
    ]
    return DiscoveryResponse(version_of(told), told)


def version_of(resources: list[dict[str, Any]]) -> str:
    """A mark of their content: the same at every discovery server, and after a restart."""
    return xxhash.xxh64_hexdigest(msgspec.json.encode(resources))


def _lb_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    member = endpoint.member
    filters: dict[str, Any] = {"envoy.lb": {"hash_key": member.name}}
    at: dict[str, Any] = {
        "address": {"socket_address": {"address": endpoint.address, "port_value": endpoint.port}}
    }
    if endpoint.tls_host:
        at["hostname"] = endpoint.tls_host
        filters[TRANSPORT] = TLS
    told: dict[str, Any] = {
        "endpoint": at,
        "load_balancing_weight": max(member.weight, 1),
        "metadata": {"filter_metadata": filters},
    }
    if not member.weight:
        told["health_status"] = "DRAINING"
    return told
