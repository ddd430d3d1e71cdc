"""Break a collective that waits for a dead or stopped peer, at once.

Gloo offers no way to abort: `abort` and `shutdown` return without waking a blocked call. What does wake it is
`shutdown(2)` on its *connected* sockets. Those of the default group are told from everybody else's by their ports: each
Gloo context listens on a port of its own, and every pair of ranks is joined through one of those. Of groups that a
script makes nobody knows the ports; their connections are told by how Gloo makes them (`_looks_like_gloos`). The
listening socket itself is never touched: Gloo aborts the process if it fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

TCP_SYN_SENT = 2


class TcpSocket(NamedTuple):
    """One of this process's."""

    inode: str
    """What the kernel calls it: no other open socket has that name."""
    outlives_exec: bool
    """A program that this process executes would inherit it."""
    sock: socket.socket
    """A duplicate, closed as soon as the next one is asked for."""


def tcp_sockets() -> Iterator[TcpSocket]:
    """Every TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            outlives_exec = not fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            is_stream = duplicate.type == socket.SOCK_STREAM
            if is_stream and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield TcpSocket(inode, outlives_exec, duplicate)


def open_sockets() -> frozenset[str]:
    """The TCP sockets that there are now."""
    return frozenset(tcp.inode for tcp in tcp_sockets())


def listening_addresses(before: Collection[str], *, only_gloos: bool = False) -> set[tuple[str, int]]:
    """Where this process listens with sockets that were not there before; `only_gloos`: that look like Gloo's."""
    found = set()
    for tcp in tcp_sockets():
        if tcp.inode in before or (only_gloos and not tcp.outlives_exec):
            continue
        with contextlib.suppress(OSError):
            if tcp.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = tcp.sock.getsockname()[:2]
                found.add((str(host), int(port)))
    return found


def wake_listeners(addresses: Collection[tuple[str, int]], size: int) -> None:
    """Wake a Gloo context that waits for its peers to connect, as they do, and hang up at once.

    Each pair of ranks is told by a number below the group's size squared, sent first: eight bytes, little-endian. A
    pair that was connected and lost its peer fails its rank's `connectFullMesh` at once.
    """
    for address in addresses:
        for pair in range(size + 1):
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0) as peer:
                peer.sendall(pair.to_bytes(8, "little"))


def break_connections(
    local: Collection[int],
    remote: Collection[int],
    *,
    also_connecting: bool = False,
    before: Collection[str] | None = None,
) -> int:
    """Shut down every connected TCP socket with one of these ports on its own or on its far end; returns how many.

    The two are told apart because a connection to anybody may well leave from a port with the number that some
    peer's Gloo listens on.

    `also_connecting`: and every one that waits for its connection, to whomever: that address may never answer.
    `before`: and every one of any group's that is not among these sockets.
    """
    broken = 0
    for tcp in tcp_sockets():
        is_meant = (
            (also_connecting and _is_connecting(tcp.sock))
            or (before is not None and tcp.inode not in before and _looks_like_gloos(tcp))
            or _joins(tcp.sock, local, remote)
        )
        if is_meant:
            with contextlib.suppress(OSError):
                tcp.sock.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def _joins(sock: socket.socket, local: Collection[int], remote: Collection[int]) -> bool:
    with contextlib.suppress(OSError):
        return int(sock.getpeername()[1]) in remote or int(sock.getsockname()[1]) in local
    return False


def _is_connecting(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_SYN_SENT
    return False


def _looks_like_gloos(tcp: TcpSocket) -> bool:
    """Whether a socket is, by all that can be seen, a connection between ranks, made or under way.

    Gloo leaves its sockets open to programs that are executed, which Python and most libraries do not, and asks for
    every one's address to be usable again, which others do for those that listen. Both hold on both ends.
    """
    if not tcp.outlives_exec:
        return False
    with contextlib.suppress(OSError):
        is_reusable = tcp.sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        return bool(is_reusable) and not tcp.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return False
