"""Where a job's master is, who may start it, and the secret that its nodes share."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stoker.base.ids import new_token
from stoker.cli.registry import checked_token, read_token
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.job.master import listen
from stoker.settings import job_token, runtime_dir

DEFAULT_JOB = "none"
"""Name of a job that was given no --rdzv-id."""
DEFAULT_PORT = 29400
PORT_MAX = 65535
ANY_ADDRESS = ("0.0.0.0", "::")
FAR_AWAY = "198.51.100.1"
"""An address that nobody has (RFC 5737): the way to it is the default route."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})


class Nodes(NamedTuple):
    """`--nnodes MIN:MAX`."""

    minimum: int
    maximum: int


@dataclass(frozen=True)
class Endpoint:
    """Where the master listens; port 0 takes a free one, which only this node then knows."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def nodes_of(text: str) -> Nodes:
    """Parse `--nnodes`. Raises ConfigError."""
    low, _, high = text.partition(":")
    try:
        nodes = Nodes(int(low), int(high or low))
    except ValueError:
        raise ConfigError(f"--nnodes {text!r}: give a number, or MIN:MAX like 1:4") from None
    if not 1 <= nodes.minimum <= nodes.maximum:
        raise ConfigError(f"--nnodes {text!r}: MIN must be at least 1 and at most MAX")
    return nodes


def endpoint_of(
    nodes: Nodes,
    *,
    rdzv_endpoint: str | None,
    master_addr: str | None,
    master_port: int | None,
    flag: str = "--rdzv-endpoint",
) -> Endpoint:
    """Where the master is. Raises ConfigError."""
    if rdzv_endpoint is not None:
        host, colon, port_text = rdzv_endpoint.rpartition(":")
        if not colon:
            host, port_text = rdzv_endpoint, str(DEFAULT_PORT)
        if not host or not port_text.isdigit() or int(port_text) > PORT_MAX:
            raise ConfigError(f"{flag} {rdzv_endpoint!r}: write HOST:PORT, like host1:{DEFAULT_PORT}")
        return Endpoint(host.strip("[]"), int(port_text))
    if master_port is not None and not 0 <= master_port <= PORT_MAX:
        raise ConfigError(
            f"--master-port {master_port}: a port is a number from 0 (any free one) to {PORT_MAX}"
        )
    if master_addr is not None or master_port is not None:
        return Endpoint(master_addr or "127.0.0.1", DEFAULT_PORT if master_port is None else master_port)
    return Endpoint("127.0.0.1", 0 if nodes.maximum == 1 else DEFAULT_PORT)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether the master may listen at `host` here."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in infos:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def listen_here(host: str, port: int, *, flag: str = "--rdzv-endpoint") -> socket.socket:
    """Bind and listen. Raises EnvironmentProblem: another port is the mend only where the port is the matter.

    A machine's own name may well be a loopback address to itself (`127.0.1.1 host1` in Debian's /etc/hosts) and another
    one to everybody else: there it listens on all addresses.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: the name {host!r} says nothing here; give an address of this machine "
            f"with {flag}"
        ) from None
    if not is_loopback(host) and any(is_loopback(str(address[0])) for *_, address in found):
        families = {family for family, *_ in found}
        return listen(ANY_ADDRESS[0 if socket.AF_INET in families else 1], port, flag=flag)
    try:
        return listen(host, port, flag=flag)
    except EnvironmentProblem:
        if is_this_machine(host):
            raise
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {host} is not an address of this machine; give one that is, or 0.0.0.0, "
            f"with {flag}"
        ) from None


def address_towards(endpoint: Endpoint) -> str | None:
    """This node's own address on the way to the master, that others reach it by, too; None while there is no way.

    On the master's own host the way may be the loopback interface: then it is the address on the default route.
    """
    if endpoint.is_loopback:
        return "127.0.0.1"
    address = source_towards(endpoint.host, endpoint.port)
    if address is not None and is_loopback(address):
        return source_towards(FAR_AWAY) or address
    return address


def outward_address(host: str) -> str:
    """This machine's address on the way to a host, or to the world where its name says nothing here (an alias of ssh's)
    or it is this machine: other hosts are to reach the workers there, too."""
    for target in (host.rpartition("@")[2], FAR_AWAY):
        address = source_towards(target)
        if address is not None and not is_loopback(address):
            return address
    return socket.gethostname()


def source_towards(host: str, port: int = 0) -> str | None:
    """This machine's address on the way to a host; None while there is no way. No packet is sent."""
    try:
        found = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


@dataclass(frozen=True)
class JobToken:
    """The secret, and the file through which this machine's agents share it."""

    value: str
    shared: Path | None = None

    def forget(self) -> None:
        """Remove the file: the master does so when the job ends."""
        if self.shared is not None:
            self.shared.unlink(missing_ok=True)


def token_of(endpoint: Endpoint, token_file: str | None, *, shared_journal: bool = False) -> JobToken:
    """The job's secret: from a file, from the environment, or, on one machine, from a 0600 file that the agents of
    one user share.

    Raises ConfigError: across hosts it has to be given.
    """
    if token_file is not None:
        return JobToken(read_token(token_file))
    given = job_token()
    if given is not None:
        return JobToken(checked_token(given, "STOKER_JOB_TOKEN"))
    if not endpoint.is_loopback or shared_journal:
        raise ConfigError(
            f"the job's master ({endpoint.host}:{endpoint.port}) can be reached from other machines, so the job needs "
            "a secret. On one node type\n"
            "    export STOKER_JOB_TOKEN=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')\n"
            "and give every node the same value (or the same file with --job-token-file)"
        )
    if endpoint.port == 0:
        return JobToken(new_token())
    return _shared_token(runtime_dir() / f"job-{endpoint.port}.token")


def _shared_token(path: Path) -> JobToken:
    with contextlib.suppress(FileNotFoundError):
        return JobToken(path.read_text().strip(), path)
    token = new_token()
    part = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    try:
        os.link(part, path)  # atomic: whoever comes second reads the first one's
        return JobToken(token, path)
    except FileExistsError:
        return JobToken(path.read_text().strip(), path)
    finally:
        part.unlink()
