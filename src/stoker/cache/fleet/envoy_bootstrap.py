"""What an Envoy in front of a fleet starts with, as data (Envoy's v3 configuration). Pure.

What matters in it:

- Requests are placed by `BUCKET/KEY`, as `block_owner_name` has it, with Maglev over the members' names: Envoy and the
  servers name the same owner. A query, and which bytes of the object are wanted, change nothing.
- Targets go through as they came: `//`, `..` and percent-encoding are part of keys.
- A request is tried again, elsewhere, where it cannot have done anything; one that only reads also if its server is
  gone before it answered.
- Servers are judged by their health checks and by whether they can be reached, never by the statuses of their answers,
  which say as much about the origin or the token.
- Whom the fleet's records reach by `https://` is spoken to by TLS, under the name that stands there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stoker.cache.fleet.envoy import CLUSTER, TLS, near_resource
from stoker.cache.fleet.envoy_tls import tls_of_listener, tls_to_servers
from stoker.cache.maglev import TABLE_SIZE
from stoker.errors import ConfigError

Json = dict[str, Any]

HOLD_S = 10.0
"""How long discovery keeps a request that knows the newest endpoints already."""
NAME_HEADER = "x-stoker-name"
SERVER_HEADER = "x-stoker-server"
_DISCOVERY = "stoker-discovery"
_NEAR = "stoker-near"
_TOKEN = "stoker-discovery-token"
_TYPES = "type.googleapis.com/envoy"
_CONNECTIONS_MAX = 65536
_KEPT_ALIVE_S = 90
"""Below the 120 s after which a server ends an idle connection: a request must not meet its end."""

# The name of an object whose key is percent-encoded. Control characters stay encoded: this becomes a header.
_LUA = f"""\
function envoy_on_request(handle)
  local headers = handle:headers()
  local name = string.match(headers:get(":path"), "^/([^?]*)")
  name = string.gsub(name, "^%-/stat/", "")
  local decoded = string.gsub(name, "%%(%x%x)", function(code) return string.char(tonumber(code, 16)) end)
  if string.find(decoded, "%c") then decoded = name end
  headers:replace("{NAME_HEADER}", decoded)
end
"""


@dataclass(frozen=True)
class Address:
    """HOST and PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class BootstrapOptions:
    """One Envoy. Endpoints come from `discovery`, or from the file `endpoints_file`."""

    listener: Address
    discovery: Sequence[Address] = ()
    endpoints_file: str = ""
    admin_port: int = 9901
    """On loopback; 0: none."""
    zone: str = ""
    """Where this Envoy stands."""
    near_buckets: Sequence[str] = ()
    """Buckets that are read from servers of the own zone while there are any."""
    token_file: str = ""
    """Holds the token that discovery is shown, and nothing else; empty: none."""
    tls_certificate: str = ""
    tls_key: str = ""
    server_ca: str = ""
    """Who signs the certificates of servers; empty: those that speak TLS are not asked."""
    server_name: str = ""
    """In the certificates of all servers; empty: each has the host's name that the fleet knows it by."""
    client_certificate: str = ""
    """Of this Envoy, to show to servers; empty: none."""
    client_key: str = ""

    def __post_init__(self) -> None:
        if bool(self.discovery) == bool(self.endpoints_file):
            raise ConfigError(
                "say where Envoy learns of the servers: from --discovery HOST:PORT or --to FILE"
            )
        if self.near_buckets and not self.zone:
            raise ConfigError("--near needs --zone: say where this Envoy stands")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        if bool(self.client_certificate) != bool(self.client_key):
            raise ConfigError("to show servers a certificate, give both --client-cert and --client-key")
        if not 0 <= self.admin_port <= 65535:
            raise ConfigError(f"--admin-port is 0 to 65535, not {self.admin_port}")


def bootstrap(options: BootstrapOptions) -> Json:
    """The whole configuration."""
    clusters = [_servers(options, CLUSTER, CLUSTER)]
    if options.near_buckets:
        clusters.append(_servers(options, _NEAR, near_resource(options.zone)))
    if options.discovery:
        clusters.append(_discovery(options))
    node: Json = {"id": "stoker-envoy", "cluster": "stoker"}
    if options.zone:
        node["locality"] = {"zone": options.zone}
    told: Json = {
        "node": node,
        "static_resources": {"listeners": [_listener(options)], "clusters": clusters},
        "overload_manager": _overload(),
    }
    if options.token_file:
        secret = {"name": _TOKEN, "generic_secret": {"secret": {"filename": options.token_file}}}
        told["static_resources"]["secrets"] = [secret]
    if options.admin_port:
        told["admin"] = {"address": _socket(Address("127.0.0.1", options.admin_port))}
    return told


def _listener(options: BootstrapOptions) -> Json:
    manager: Json = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "stoker",
        "route_config": {
            "name": "stoker",
            "response_headers_to_add": [_header(SERVER_HEADER, "%UPSTREAM_METADATA(envoy.lb:hash_key)%")],
            "virtual_hosts": [{"name": "stoker", "domains": ["*"], "routes": _routes(options)}],
        },
        "http_filters": [
            _filter(
                "lua",
                f"{_TYPES}.extensions.filters.http.lua.v3.Lua",
                {"default_source_code": {"inline_string": _LUA}},
            ),
            _filter(
                "router",
                f"{_TYPES}.extensions.filters.http.router.v3.Router",
                {"suppress_envoy_headers": True},
            ),
        ],
        # Keys keep their //, .. and %2F.
        "normalize_path": False,
        "merge_slashes": False,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,
        # Of a body that comes slowly only silence is limited.
        "request_timeout": "0s",
        "request_headers_timeout": "10s",
        "stream_idle_timeout": "300s",
        "common_http_protocol_options": {"idle_timeout": "300s", "headers_with_underscores_action": "ALLOW"},
    }
    chain: Json = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if options.tls_certificate:
        chain["transport_socket"] = tls_of_listener(options.tls_certificate, options.tls_key)
    return {"name": "stoker", "address": _socket(options.listener), "filter_chains": [chain]}


class _Kind(NamedTuple):
    """Requests that are placed alike. `name`: what finds the name in a target, or _BY_SCRIPT, or _ANYWHERE."""

    path: str
    name: str


_BY_SCRIPT = "script"
_ANYWHERE = ""
_KINDS = (
    _Kind("/blob/.*", "^/blob/(.*)$"),  # keys are raw, with ? and %
    _Kind("/-/stat/[^%]*", "^/-/stat/([^?]*).*$"),
    _Kind("/-/stat/.*", _BY_SCRIPT),
    _Kind("/-/orders/.*", "^/([^?]*).*$"),  # a stream goes on where it began
    _Kind("/-/.*", _ANYWHERE),
    _Kind("/[^%]*", "^/([^?]*).*$"),
    _Kind("/.*", _BY_SCRIPT),  # percent-encoded: a script costs something, and most keys need none
)


def _routes(options: BootstrapOptions) -> list[Json]:
    """The first that matches counts."""
    near = "|".join(re.escape(name) for name in options.near_buckets)
    routes = []
    for kind in _KINDS:
        start = next((start for start in ("/blob/", "/-/") if kind.path.startswith(start)), "/")
        if near and start != "/-/":
            path = f"{start}(?:{near})/{kind.path.removeprefix(start)}"
            routes += [_route(kind._replace(path=path), _NEAR, reads=reads) for reads in (True, False)]
        routes += [_route(kind, CLUSTER, reads=reads) for reads in (True, False)]
    return routes


def _route(kind: _Kind, cluster: str, *, reads: bool) -> Json:
    """What only reads may be done twice."""
    match: Json = {"safe_regex": {"regex": kind.path}}
    retry_on = "connect-failure,refused-stream,reset-before-request"
    if reads:
        method = {"string_match": {"safe_regex": {"regex": "GET|HEAD"}}}
        match["headers"] = [{"name": ":method", **method}]
        retry_on += ",reset"
    by: Json = {"header_name": NAME_HEADER}
    if kind.name != _BY_SCRIPT:
        rewrite = {"pattern": {"regex": kind.name}, "substitution": r"\1"}
        by = {"header_name": ":path", "regex_rewrite": rewrite}
    route: Json = {
        "match": match,
        "route": {
            "cluster": cluster,
            "hash_policy": [{"header": by}] if kind.name else [],
            "timeout": "0s",
            "retry_policy": {
                "retry_on": retry_on,
                "num_retries": 3,
                "host_selection_retry_max_attempts": "5",
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": f"{_TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
                "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.1s"},
            },
        },
    }
    if kind.name != _BY_SCRIPT:
        off = {"@type": f"{_TYPES}.extensions.filters.http.lua.v3.LuaPerRoute", "disabled": True}
        route["typed_per_filter_config"] = {"envoy.filters.http.lua": off}
    return route


def _servers(options: BootstrapOptions, name: str, resource: str) -> Json:
    source = _from_discovery() if options.discovery else None
    suffix = "" if resource == CLUSTER else resource.removeprefix(CLUSTER)
    file: Json = {
        "resource_api_version": "V3",
        "path_config_source": {"path": f"{options.endpoints_file}{suffix}"},
    }
    to_servers = tls_to_servers(
        options.server_ca, options.server_name, options.client_certificate, options.client_key, source
    )
    return {
        "name": name,
        "type": "EDS",
        "eds_cluster_config": {"service_name": resource, "eds_config": source or file},
        "connect_timeout": "1s",
        "lb_policy": "MAGLEV",
        "maglev_lb_config": {"table_size": TABLE_SIZE},
        # Who does not answer is never asked, however many those are: the others hold what there is.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "ignore_health_on_host_removal": True,
        "transport_socket_matches": [{"name": "tls", "match": TLS, "transport_socket": to_servers}],
        "health_checks": [_health_check()],
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 3,
            "enforcing_consecutive_local_origin_failure": 100,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "enforcing_failure_percentage": 0,
            "interval": "1s",
            "base_ejection_time": "2s",
            "max_ejection_time": "10s",
            "max_ejection_percent": 50,
        },
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": _CONNECTIONS_MAX,
                    "max_pending_requests": _CONNECTIONS_MAX,
                    "max_requests": _CONNECTIONS_MAX,
                    "retry_budget": {"budget_percent": {"value": 50}, "min_retry_concurrency": 100},
                }
            ]
        },
        # By now the request is placed, and the servers need no such header.
        "typed_extension_protocol_options": _http1(
            [
                _filter(
                    "header_mutation",
                    f"{_TYPES}.extensions.filters.http.header_mutation.v3.HeaderMutation",
                    {"mutations": {"request_mutations": [{"remove": NAME_HEADER}]}},
                )
            ]
        ),
    }


def _from_discovery() -> Json:
    asked = {
        "api_type": "REST",
        "transport_api_version": "V3",
        "cluster_names": [_DISCOVERY],
        "refresh_delay": "0.5s",
        "request_timeout": f"{HOLD_S + 5:g}s",
    }
    return {"resource_api_version": "V3", "api_config_source": asked}


def _health_check() -> Json:
    """Who is leaving says so at once, and gets nothing new; any other answer than 200 puts it out at once."""
    answers = [{"start": 200, "end": 201}]
    return {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/-/ready", "expected_statuses": answers},
    }


def _discovery(options: BootstrapOptions) -> Json:
    found: Json = {
        "name": _DISCOVERY,
        "type": "STRICT_DNS",
        "dns_lookup_family": "ALL",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": _DISCOVERY,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _socket(at)}} for at in options.discovery]}
            ],
        },
    }
    filters = []
    if options.token_file:
        generic: Json = {
            "@type": f"{_TYPES}.extensions.http.injected_credentials.generic.v3.Generic",
            "credential": {"name": _TOKEN},
            "header_value_prefix": "Bearer ",
        }
        kind = f"{_TYPES}.extensions.filters.http.credential_injector.v3.CredentialInjector"
        credential = {"name": "envoy.http.injected_credentials.generic", "typed_config": generic}
        filters = [_filter("credential_injector", kind, {"overwrite": True, "credential": credential})]
    found["typed_extension_protocol_options"] = _http1(filters)
    return found


def _http1(filters: Sequence[Json]) -> Json:
    """HTTP/1.1 to servers, through these filters."""
    options: Json = {
        "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {"idle_timeout": f"{_KEPT_ALIVE_S}s"},
        "explicit_http_config": {"http_protocol_options": {}},
    }
    if filters:
        codec = f"{_TYPES}.extensions.filters.http.upstream_codec.v3.UpstreamCodec"
        options["http_filters"] = [*filters, _filter("upstream_codec", codec, {})]
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}


def _filter(name: str, kind: str, config: Json) -> Json:
    return {"name": f"envoy.filters.http.{name}", "typed_config": {"@type": kind, **config}}


def _overload() -> Json:
    monitor = f"{_TYPES}.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
    return {
        "resource_monitors": [
            {
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {"@type": monitor, "max_active_downstream_connections": _CONNECTIONS_MAX},
            }
        ]
    }


def _header(name: str, value: str) -> Json:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _socket(at: Address) -> Json:
    return {"socket_address": {"address": at.host, "port_value": at.port}}
