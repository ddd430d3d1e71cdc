"""`stoker cache envoy`: where the servers of a fleet are, for Envoys in front of it; and what those start with."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.cache.auth.access import access_of, check_listen
from stoker.cache.fleet.discovery import WHY_NAMELESS
from stoker.cache.fleet.envoy import CLUSTER, near_resource, without_names
from stoker.cache.fleet.envoy_bootstrap import Address, BootstrapOptions, bootstrap
from stoker.cache.fleet.open import FORMS, members_of, open_membership
from stoker.cli.cache_envoy_serve import run_discovery
from stoker.cli.cache_options import print_json
from stoker.errors import EXIT_OK, ConfigError
from stoker.settings import cache_settings, environment

DEFAULT_LISTEN = "127.0.0.1:7080"
_ANY_ADDRESS = frozenset(("0.0.0.0", "::"))
_EXAMPLES = """\
examples:
  stoker cache envoy --fleet file:///shared/members          beside an Envoy: discovery at 127.0.0.1:7080
  stoker cache envoy --print-bootstrap > envoy.json && envoy -c envoy.json
  stoker cache envoy --fleet etcd://etcd-1:2379/stoker --listen 0.0.0.0:7080 --token a-long-s3cret-token
  stoker cache envoy --print-bootstrap --discovery 10.0.0.5:7080 --discovery 10.0.0.6:7080 \\
      --token-file /etc/envoy/discovery-token --port 0.0.0.0:80 > envoy.json
  stoker cache envoy --fleet http://a:7070,http://b:7070 --to /etc/envoy/fleet.json    no server, a file

Envoys route each object to the server that owns it, as the servers themselves do. One discovery may serve many Envoys;
while it is away they go on with what they know. STOKER_CACHE_TOKEN is the token where --token is not given. Stop it
with Ctrl-C or SIGTERM: it exits with 0.

exit codes:
  0 done   2 wrong usage   5 the machine refuses (port, file)
"""


def add_envoy_parser(commands: Any) -> None:
    """Add `envoy` to the commands of `stoker cache`."""
    envoy = commands.add_parser(
        "envoy",
        help="tell Envoys in front of a fleet where its servers are",
        description="Serve endpoint discovery (xDS v3 over REST, or a file) for a fleet, or print what an Envoy in "
        "front of it starts with.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    envoy.add_argument("--fleet", metavar="WHERE", help=f"where the servers meet: {FORMS}")
    envoy.add_argument(
        "--listen", metavar="HOST:PORT",
        help=f"where Envoys ask; default {DEFAULT_LISTEN}, or nowhere with --to; port 0 takes a free one",
    )  # fmt: skip
    envoy.add_argument(
        "--to", metavar="FILE",
        help="write the endpoints to this file, which Envoy watches; with --zone also to FILE@ZONE",
    )  # fmt: skip
    envoy.add_argument(
        "--token", metavar="TOKEN", action="append", default=[],
        help="what Envoys have to show, unless on loopback (repeats)",
    )  # fmt: skip
    envoy.add_argument("--json", action="store_true", help="say in JSON where discovery is")
    envoy.add_argument("--zone", metavar="ZONE", help="where the Envoy stands")
    starts = envoy.add_argument_group("what an Envoy starts with")
    starts.add_argument(
        "--print-bootstrap",
        action="store_true",
        help="print an Envoy's configuration (JSON), and serve nothing",
    )
    starts.add_argument(
        "--port",
        metavar="[HOST:]PORT",
        default="8080",
        help="where Envoy listens; default 8080, on loopback",
    )
    starts.add_argument(
        "--discovery", metavar="HOST:PORT", action="append", default=[],
        help="where it asks (repeats); default: what --listen says, or the file of --to",
    )  # fmt: skip
    starts.add_argument(
        "--token-file",
        metavar="FILE",
        help="where Envoy finds the token that discovery wants; alone on its line",
    )
    starts.add_argument(
        "--near", metavar="BUCKET", action="append", default=[],
        help="a bucket with max_replicas = 0, to be read from servers in --zone while there are any (repeats)",
    )  # fmt: skip
    starts.add_argument(
        "--admin-port", metavar="N", type=int, default=9901, help="on loopback; 0: none (9901)"
    )
    starts.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    starts.add_argument("--tls-key", metavar="FILE", help="its key")
    starts.add_argument(
        "--ca", metavar="FILE",
        help="who signs the certificates of servers that are reached by https://; without it they are not asked",
    )  # fmt: skip
    starts.add_argument(
        "--server-name", metavar="NAME",
        help="the host name in their certificates; default: that by which the fleet knows each, which cannot be an "
        "IP address",
    )  # fmt: skip
    starts.add_argument(
        "--client-cert", metavar="FILE", help="what Envoy shows to servers that ask for a certificate"
    )
    starts.add_argument("--client-key", metavar="FILE", help="its key")
    envoy.set_defaults(handler=_envoy)


def bootstrap_options(arguments: argparse.Namespace) -> BootstrapOptions:
    """What the arguments say. Raises ConfigError."""
    _check_names(arguments)
    port = arguments.port if ":" in arguments.port else f"127.0.0.1:{arguments.port}"
    discovery = [_address("--discovery", text) for text in arguments.discovery]
    if not discovery and not arguments.to:
        found = _address("--listen", arguments.listen or DEFAULT_LISTEN)
        if found.host in _ANY_ADDRESS or not found.port:
            raise ConfigError(
                f"--listen {arguments.listen} is no address to ask at: give --discovery HOST:PORT"
            )
        discovery = [found]
    return BootstrapOptions(
        listener=_address("--port", port),
        discovery=discovery,
        endpoints_file=_absolute(arguments.to),
        admin_port=arguments.admin_port,
        zone=arguments.zone or "",
        near_buckets=arguments.near,
        token_file=_absolute(arguments.token_file),
        tls_certificate=_absolute(arguments.tls_cert),
        tls_key=_absolute(arguments.tls_key),
        server_ca=_absolute(arguments.ca),
        server_name=arguments.server_name or "",
        client_certificate=_absolute(arguments.client_cert),
        client_key=_absolute(arguments.client_key),
    )


def _check_names(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the fleet is said as well, and Envoy could not verify who is in it."""
    if not arguments.fleet or not arguments.ca or arguments.server_name:
        return
    nameless = without_names(members_of(arguments.fleet))
    if nameless:
        raise ConfigError(WHY_NAMELESS % ", ".join(nameless))


def _envoy(arguments: argparse.Namespace) -> int:
    if arguments.print_bootstrap:
        told = msgspec.json.encode(bootstrap(bootstrap_options(arguments)))
        print(msgspec.json.format(told, indent=2).decode(), flush=True)
        return EXIT_OK
    if not arguments.fleet:
        raise ConfigError(f"say where the servers meet: --fleet {FORMS}")
    files = {}
    if arguments.to:
        files[CLUSTER] = Path(arguments.to)
        if arguments.zone:
            files[near_resource(arguments.zone)] = Path(f"{arguments.to}@{arguments.zone}")
    text = arguments.listen or (None if files else DEFAULT_LISTEN)
    listen = None if text is None else _address("--listen", text)
    known = cache_settings().token
    auth = access_of(arguments.token or ([] if known is None else [known]))
    if listen is not None:
        check_listen(listen.host, auth)
    if not auth.is_open and auth.fleet_token() is None:
        raise ConfigError("--token TOKEN:BUCKET opens nothing here: give one without buckets")

    def announce(url: str, written: Sequence[Path]) -> None:
        if arguments.json:
            print_json({"discovery": url or None, "files": [str(path) for path in written]})
            return
        places = ([f"discovery at {url}"] if url else []) + [f"endpoints in {path}" for path in written]
        print(" and ".join(places), flush=True)

    membership = open_membership(arguments.fleet, environment())
    place = None if listen is None else (listen.host, listen.port)
    asyncio.run(run_discovery(membership, auth, place, files, announce))
    return EXIT_OK


def _address(option: str, text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{option} {text!r} is not HOST:PORT")
    return Address(host.strip("[]"), int(port))


def _absolute(path: str | None) -> str:
    return os.path.abspath(path) if path else ""
