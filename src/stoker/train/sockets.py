"""Break a collective that waits for a dead or stopped peer, at once.

Gloo offers no way to abort: `abort` and `shutdown` return without waking a blocked call. What does wake it is
`shutdown(2)` on its *connected* sockets. They are told from everybody else's by their ports: each Gloo context
listens on a port of its own, and every pair of ranks is joined through one of those. The listening socket
itself is never touched: Gloo aborts the process if it fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process, closed as soon as the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            is_stream = duplicate.type == socket.SOCK_STREAM
            if is_stream and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def listening_ports() -> set[int]:
    """Local ports of this process's listening TCP sockets."""
    ports = set()
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(int(sock.getsockname()[1]))
    return ports


def break_connections(local: set[int], remote: set[int]) -> int:
    """Shut down every connected TCP socket with one of these ports on its own or on its far end; returns how many.

    The two are told apart because a connection to anybody may well leave from a port with the number that some
    peer's Gloo listens on.
    """
    broken = 0
    for sock in tcp_sockets():
        try:
            here, there = int(sock.getsockname()[1]), int(sock.getpeername()[1])
        except OSError:
            continue
        if here in local or there in remote:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken
