"""The process group of one generation: made, broken when it must be, and taken down."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import constants

from stoker.train.aborts import start_aborting, take_down
from stoker.train.accelerator import backend_of
from stoker.train.sockets import break_connections, listening_addresses, open_sockets, wake_listeners
from stoker.wire.job import WorldView

CONNECT_TIMEOUT_S = 10.0
LEAVE_WAIT_S = 2.0
"""Seconds that a rank waits for the others before it aborts a group that is sound."""
GLOO = "gloo"
"""The backend that cannot be aborted: its connections are cut instead."""


@dataclass
class _Generation:
    """What is known of the connections of the generation that is being opened or open."""

    size: int
    hosts_store: bool
    store_port: int
    before: frozenset[str]
    """Sockets that there were before it."""
    is_opening: bool = True
    ports: frozenset[int] = frozenset()
    """Where this rank's Gloo listens."""
    peer_ports: frozenset[int] = frozenset()


class ProcessGroup:
    """torch.distributed's default group, renewed for every generation.

    Every worker keeps a store of its own listening from its start; a generation meets through that of its rank
    0, so that no address has to be agreed on first and neither master nor agent needs PyTorch.
    """

    def __init__(self, device: torch.device, *, timeout_s: float, address: str | None) -> None:
        """Raises ConfigError when this PyTorch has no backend for the device."""
        _spare_children()
        self.device = device
        self.backend = backend_of(device)
        self._timeout = timedelta(seconds=timeout_s)
        self._address = address
        self._lock = threading.Lock()
        self._generation: _Generation | None = None
        """None: there is nobody to wait for."""
        self.is_broken = False
        """The newest generation's group has been broken off."""
        self._aborting: list[threading.Thread] = []
        self._joined: Store | None = None
        """Through which the ranks of the generation that is open have met."""
        self._store_broken = False
        self._own = self._new_store()

    @property
    def endpoint(self) -> str:
        """`host:port` of this worker's own store; empty for a world of one."""
        return f"{self._address}:{self._own.port}" if self._own is not None else ""

    @property
    def has_peers(self) -> bool:
        """Whether a group of more than one is being opened or open."""
        return self._generation is not None

    def open(self, world: WorldView, rank: int, check: Callable[[], None] = lambda: None) -> None:
        """Join the group of a generation. Groups that the script makes in it have its timeout, if not their own.

        `check` raises when the world is over already: a `break_off` that came before there was a connection to
        break has cut nothing, and nobody would come to this generation any more.

        Raises RuntimeError (torch's DistNetworkError and others) when a peer is not there or `break_off` came.
        """
        size = world.size
        self.is_broken = False
        store = self._store(world, rank)
        check()
        # torch names the group by a count of this process's attempts: where one failed here and not there, the
        # ranks would wait for each other under different names for ever.
        dist.distributed_c10d._world.group_count = 0
        _set_default_timeout(self._timeout)
        prefixed = PrefixStore(_prefix_of(world.generation), store)
        dist.init_process_group(
            self.backend, store=prefixed, rank=rank, world_size=size, timeout=self._timeout
        )
        generation = self._generation
        if generation is None:
            return
        ports: set[int] = set()
        peers: set[int] = set()
        if self.backend == GLOO:
            ports = {port for _, port in listening_addresses(generation.before)}
            prefixed.set(f"stoker-ports-{rank}", ",".join(map(str, sorted(ports))))
            for peer in range(size):
                if peer != rank:
                    text = prefixed.get(f"stoker-ports-{peer}").decode()
                    peers.update(int(port) for port in text.split(",") if port)
        with self._lock:
            generation.ports, generation.peer_ports = frozenset(ports), frozenset(peers)
            generation.is_opening = False
        self._joined = prefixed

    def _store(self, world: WorldView, rank: int) -> Store:
        if world.size == 1:
            return HashStore()
        host, _, port = world.store.rpartition(":")
        hosts_store = rank == 0 and self._own is not None
        with self._lock:
            self._generation = _Generation(world.size, hosts_store, int(port), open_sockets())
        if rank == 0 and self._own is not None:
            _forget_all_but(world.generation, self._own)
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
        """Wake whoever is blocked in a collective of any group, or in the making of one, in any thread.

        Connections to the store are cut at any time: the making of a group waits for its ranks there.
        """
        with self._lock:
            if self._generation is None:
                return
            known = replace(self._generation)
            self._store_broken |= known.hosts_store
            self.is_broken = True
            if self.backend != GLOO and not self._aborting:
                self._aborting = start_aborting()
        break_connections(
            {*known.ports, known.store_port} if known.hosts_store else known.ports,
            {*known.peer_ports, known.store_port},
            also_connecting=known.is_opening,
            before=known.before,
        )
        listening = listening_addresses(known.before, only_gloos=True)
        wake_listeners([address for address in listening if address[1] not in known.ports], known.size)

    def close(self) -> None:
        """Take the group down. Drop every DDP and Work of it before.

        What can be aborted is not shut down: a shutdown, which waits for ranks that may be gone, could not be ended.

        Raises RuntimeError when the backend cannot end its collectives: then this process must end.
        """
        if self.backend != GLOO:
            self._wait_for_others()
        with self._lock:
            self._generation = None
            broken, self._store_broken = self._store_broken, False
            aborting, self._aborting = self._aborting, []
        if self.backend != GLOO and not aborting:
            aborting = start_aborting()
        if dist.is_initialized() and not aborting:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        take_down(aborting)
        self._joined = None
        _set_default_timeout(None)
        if broken:
            self._own = self._new_store()

    def _wait_for_others(self) -> None:
        """Until every rank has come here, so that none has to receive any more, or one does not come.

        What this rank's device has sent may still be on its way to another host, which an abort would end.
        """
        store, generation = self._joined, self._generation
        if store is None or generation is None or self.is_broken:
            return
        wait_for_leavers(store, generation.size)

    def _new_store(self) -> TCPStore | None:
        if self._address is None:
            return None
        listener = _listener_at(self._address)
        return TCPStore(
            "localhost" if listener is None else self._address,
            0 if listener is None else int(listener.getsockname()[1]),
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )


def wait_for_leavers(store: Store, size: int) -> None:
    """Until so many ranks have come here, or one does not come, or the store is gone."""
    with contextlib.suppress(RuntimeError):
        if store.add("stoker-leaving", 1) == size:
            store.set("stoker-all-leave", "")
        store.wait(["stoker-all-leave"], timedelta(seconds=LEAVE_WAIT_S))


@functools.cache
def _spare_children() -> None:
    """Have no forked process, such as a loader's, collect what was garbage here.

    Where a group is part of it, its destructor waits in the child for threads that only the parent has, for ever.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _set_default_timeout(timeout: timedelta | None) -> None:
    """Of groups that are made without one, as `dist.new_group` does; None: torch's own, of up to 30 minutes."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, getattr(constants, name) if timeout is None else timeout)


def _listener_at(address: str) -> socket.socket | None:
    """A socket that listens at this address alone, for a store knows no token. None where it must listen on every
    interface: no interface here has the address, by which others know this host; or it is a name, which may mean
    another address here than there."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return None
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None


def _prefix_of(generation: int) -> str:
    """Of a generation's keys in the store."""
    return f"generation-{generation}"


def _forget_all_but(generation: int, store: TCPStore) -> None:
    """Delete what generations before have left in the store. Everybody has left them."""
    if hasattr(store, "list_keys"):  # not in every PyTorch
        for key in store.list_keys():
            if not key.startswith(f"{_prefix_of(generation)}/"):
                store.delete_key(key)
