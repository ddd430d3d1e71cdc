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
from stoker.errors import ConfigError
from stoker.settings import job_token, runtime_dir

DEFAULT_PORT = 29400


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
    nodes: Nodes, *, rdzv_endpoint: str | None, master_addr: str | None, master_port: int | None
) -> Endpoint:
    """Where the master is. Raises ConfigError."""
    if rdzv_endpoint is not None:
        host, colon, port_text = rdzv_endpoint.rpartition(":")
        if not colon:
            host, port_text = rdzv_endpoint, str(DEFAULT_PORT)
        if not host or not port_text.isdigit() or int(port_text) > 65535:
            raise ConfigError(
                f"--rdzv-endpoint {rdzv_endpoint!r}: write HOST:PORT, like host1:{DEFAULT_PORT}"
            )
        return Endpoint(host.strip("[]"), int(port_text))
    if master_addr is not None or master_port is not None:
        return Endpoint(master_addr or "127.0.0.1", DEFAULT_PORT if master_port is None else master_port)
    return Endpoint("127.0.0.1", 0 if nodes.maximum == 1 else DEFAULT_PORT)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether the master may listen at `host` here."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in infos:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def address_towards(endpoint: Endpoint) -> str:
    """This node's own address on the way to the master."""
    if endpoint.is_loopback:
        return "127.0.0.1"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.host, endpoint.port or 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


@dataclass(frozen=True)
class JobToken:
    """The secret, and the file through which this machine's agents share it."""

    value: str
    shared: Path | None = None

    def forget(self) -> None:
        """Remove the file: the master does so when the job ends."""
        if self.shared is not None:
            self.shared.unlink(missing_ok=True)


def token_of(endpoint: Endpoint, token_file: str | None) -> JobToken:
    """The job's secret: from a file, from the environment, or, on one machine, from a 0600 file that the agents of
    one user share.

    Raises ConfigError: across hosts it has to be given.
    """
    if token_file is not None:
        try:
            text = Path(token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"--job-token-file {token_file}: {error.strerror}") from None
        if not text:
            raise ConfigError(f"--job-token-file {token_file} is empty")
        return JobToken(text)
    given = job_token()
    if given is not None:
        return JobToken(given)
    if not endpoint.is_loopback:
        raise ConfigError(
            f"the endpoint {endpoint.host}:{endpoint.port} can be reached from other machines, so the job needs a "
            "secret. On one node type\n"
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
