"""Connections whose other side is not there any more, and never said so."""

from __future__ import annotations

import contextlib
import errno
import socket

_ASK_AFTER_S = 4
_ASK_EVERY_S = 2
_ASKED_MAX = 3


def give_up_when_unheard(sock: socket.socket | None, seconds: float) -> None:
    """Have the kernel end a connection on which nothing that was sent is acknowledged for so long, and one on which
    nothing is sent or comes, and the other side's kernel does not know it, after some 10 s. None: nothing is done, as
    with what is not TCP.

    Peers that hold their window shut for so long are given up as well, though they live.
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # it has been closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _ASK_AFTER_S),
            (socket.TCP_KEEPINTVL, _ASK_EVERY_S),
            (socket.TCP_KEEPCNT, _ASKED_MAX),
            (socket.TCP_USER_TIMEOUT, round(seconds * 1000)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_lost(error: BaseException) -> bool:
    """Whether the kernel has given up a connection; a timeout of our own is none of these."""
    return isinstance(error, OSError) and error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH)
