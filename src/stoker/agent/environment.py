"""The environment of a worker: torchrun's variables, and Stoker's own."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence

from stoker.wire.job import WorkerSpec

SIOCGIFADDR = 0x8915


def worker_environment(
    base: Mapping[str, str],
    spec: WorkerSpec,
    *,
    run_id: str,
    address: str,
    agent_socket: str,
    error_file: str,
    timeout_s: float,
    extra: Mapping[str, str],
    by_slot: Sequence[Mapping[str, str]] = (),
) -> dict[str, str]:
    """What torchrun gives its workers (same names, same meaning), then `STOKER_*`, `extra` and those of its slot."""
    variables = {
        "RANK": spec.rank,
        "LOCAL_RANK": spec.local_rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "GROUP_RANK": spec.group_rank,
        "GROUP_WORLD_SIZE": spec.group_world_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": spec.rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": spec.master_port,
        "TORCHELASTIC_RESTART_COUNT": spec.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "STOKER_AGENT_SOCKET": agent_socket,
        "STOKER_WORKER_ID": spec.worker,
        "STOKER_TIMEOUT_S": timeout_s,
    }
    result = dict(base)
    result.update({name: str(value) for name, value in variables.items()})
    result.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    result.setdefault("PYTHONUNBUFFERED", "1")
    result.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns with a page of frames for each lost peer
    _name_interface(result, address)
    if spec.local_world_size > 1:
        # As torchrun does: several workers that each start a thread per core slow each other down.
        result.setdefault("OMP_NUM_THREADS", "1")
    result.update(extra)
    if by_slot:
        result.update(by_slot[spec.slot % len(by_slot)])
    return result


def check_environment(
    base: Mapping[str, str],
    *,
    address: str,
    extra: Mapping[str, str],
    by_slot: Mapping[str, str],
) -> dict[str, str]:
    """What the program of the node check gets: network and device are those of a worker of that slot."""
    result = dict(base)
    result.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _name_interface(result, address)
    result.update(extra)
    result.update(by_slot)
    return result


def _name_interface(environment: dict[str, str], address: str) -> None:
    """Else Gloo asks for the address of the host's name, which may be one that no other host can reach."""
    interface = interface_of(address)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none has, or it is a name."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            if answer[20:24] == wanted:
                return name
    return None


def free_port(address: str) -> int:
    """A TCP port that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.bind(("", 0))
        return int(probe.getsockname()[1])
