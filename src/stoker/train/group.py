"""The process group of one generation: made, broken when it must be, and taken down."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from stoker.train.sockets import break_connections, listening_ports
from stoker.wire.job import World

CONNECT_TIMEOUT_S = 10.0


class ProcessGroup:
    """torch.distributed's default group, renewed for every generation.

    Every worker keeps a store of its own listening from its start; a generation meets through that of its rank
    0, so that no address has to be agreed on first and neither master nor agent needs PyTorch.
    """

    def __init__(self, device: torch.device, *, timeout_s: float, address: str | None) -> None:
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._ports: set[int] = set()
        """Where this rank's Gloo listens."""
        self._peer_ports: set[int] = set()
        self._store_port = 0
        self._store_broken = False
        self._address = address
        self._own = self._new_store()

    @property
    def endpoint(self) -> str:
        """`host:port` of this worker's own store; empty for a world of one."""
        return f"{self._address}:{self._own.port}" if self._own is not None else ""

    def open(self, world: World, rank: int, check: Callable[[], None] = lambda: None) -> None:
        """Join the group of a generation.

        `check` raises when the world is over already: a `break_off` that came before there was a connection to
        break has cut nothing, and nobody would come to this generation any more.

        Raises RuntimeError (torch's DistNetworkError and others) when a peer is not there or `break_off` came.
        """
        size = len(world.members)
        store = self._store(world, rank)
        check()
        before = listening_ports()
        prefixed = PrefixStore(f"generation-{world.generation}", store)
        dist.init_process_group(
            self.backend, store=prefixed, rank=rank, world_size=size, timeout=self._timeout
        )
        if size > 1 and self.backend == "gloo":
            mine = sorted(listening_ports() - before)
            prefixed.set(f"stoker-ports-{rank}", ",".join(map(str, mine)))
            peers: set[int] = set()
            for peer in range(size):
                if peer != rank:
                    text = prefixed.get(f"stoker-ports-{peer}").decode()
                    peers.update(int(port) for port in text.split(",") if port)
            with self._lock:  # from here on the store is out of danger
                self._ports, self._peer_ports, self._store_port = set(mine), peers, 0

    def _store(self, world: World, rank: int) -> Store:
        if len(world.members) == 1:
            return HashStore()
        host, _, port = world.store.rpartition(":")
        with self._lock:
            self._ports, self._peer_ports, self._store_port = set(), set(), int(port)
        if rank == 0 and self._own is not None:
            return self._own
        store = TCPStore(
            host,
            int(port),
            is_master=False,
            timeout=timedelta(seconds=min(CONNECT_TIMEOUT_S, self._timeout.total_seconds())),
        )
        store.set_timeout(self._timeout)
        return store

    def break_off(self) -> None:
        """Wake whoever is blocked in a collective or in `open`, in any thread."""
        with self._lock:
            local, remote = set(self._ports), set(self._peer_ports)
            if self._store_port:
                local.add(self._store_port)
                remote.add(self._store_port)
                self._store_broken = True
        if self.backend == "nccl":
            self._abort_nccl()
        elif remote:
            break_connections(local, remote)

    def close(self) -> None:
        """Take the group down. Drop every DDP and Work of it before."""
        with self._lock:
            self._ports, self._peer_ports, self._store_port = set(), set(), 0
            broken, self._store_broken = self._store_broken, False
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        if broken:
            self._own = self._new_store()

    def _new_store(self) -> TCPStore | None:
        if self._address is None:
            return None
        port, listener = 0, None
        if self._address.startswith("127."):  # by itself it listens on every interface, and it knows no token
            server = socket.create_server((self._address, 0), backlog=1024)
            port, listener = int(server.getsockname()[1]), server.detach()
        return TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener,
        )

    def _abort_nccl(self) -> None:
        group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                group._get_backend(self.device).abort()


def is_collective_failure(error: BaseException) -> bool:
    """Whether an exception says that a peer or the network is gone, and not that the script is wrong."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "gloo/",
        "NCCL",
        "Timed out waiting",
        "Socket closed",
        "process group has been destroyed",
        "process group has not been initialized",
    )
    return any(sign in text for sign in signs)
