"""The sockets that a server listens on, and how many it may have open."""

from __future__ import annotations

import os
import resource
import socket
import stat
from typing import NamedTuple

from stoker.errors import ConfigError, EnvironmentProblem

_BACKLOG = 4096
_FILES_WANTED = 65536
_PASSING_SHARE = 16
_PATH_BYTES_MAX = 100
OWN_USER_MODE = 0o600


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError, EnvironmentProblem."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen"
        ) from error
    return sock


class UnixSocket(NamedTuple):
    """A socket that listens at a path. `made`: what it was there when it was made."""

    path: str
    listener: socket.socket
    made: os.stat_result

    def remove(self) -> None:
        """From its path, if it is there still: not that of a server which has come since."""
        try:
            there = os.stat(self.path)
            # The same inode alone may be that of another one, once this is closed.
            if os.path.samestat(there, self.made) and there.st_mtime_ns == self.made.st_mtime_ns:
                os.unlink(self.path)
        except FileNotFoundError:
            pass


def listen_unix(path: str, mode: int = OWN_USER_MODE) -> UnixSocket:
    """A listening socket, for this user only without another `mode`. Raises ConfigError, EnvironmentProblem."""
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigError(f"the path of a Unix socket has at most {_PATH_BYTES_MAX} bytes: {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
        previous = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
            sock.listen(_BACKLOG)
        finally:
            os.umask(previous)
        return UnixSocket(path, sock, os.stat(path))
    except OSError as error:
        sock.close()
        raise EnvironmentProblem(f"cannot listen on {path}: {error.strerror}") from error


def raise_file_limit() -> None:
    """As many open files as this process may have, up to what a server needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_max() -> int:
    """How many connections leave enough descriptors for files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(_FILES_WANTED, soft) // 2 - 64)


def passing_max() -> int:
    """How many descriptors may be on their way to readers at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_FILES_WANTED, soft) // _PASSING_SHARE
