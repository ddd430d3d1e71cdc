"""Loader processes ask the training process for shards: it holds all leases, and is the worker that the master knows.

A socket in Linux's abstract namespace, so that there is no file to leave behind; only processes of this user may talk.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from typing import NamedTuple

import msgspec

from stoker.base.ids import new_token
from stoker.errors import EnvironmentProblem, WireError
from stoker.train.sharded_desk import Desk
from stoker.wire.frames import FrameCodec
from stoker.wire.shards import Shard, Split

_CREDENTIALS = struct.Struct("3i")


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Another shard, please."""

    turn: int
    """Of the loop that asks, as the first answer had it; -1: it is not known yet."""
    finished: int | None = None
    """The shard that is read to its end."""
    is_empty: bool = False
    """It had no good record."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A shard cannot be read."""

    number: int
    reason: str


class Given(msgspec.Struct, frozen=True, tag="given"):
    """Read this shard from a place on."""

    turn: int
    shard: Shard
    split: Split
    place: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """There is no more to read."""


class RelayAddress(NamedTuple):
    """Where a training process answers."""

    name: str
    pid: int

    def connect(self, turn: int) -> RelayClient:
        """For a loader process of a loop, -1: of the newest. Raises EnvironmentProblem."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0{self.name}")
        except OSError as error:
            sock.close()
            raise EnvironmentProblem(
                f"the training process does not answer its loader process ({error.strerror}): it has ended"
            ) from None
        return RelayClient(sock, self.pid, turn)


class RelayClient:
    """A loader process's end."""

    def __init__(self, sock: socket.socket, parent: int, turn: int) -> None:
        self._socket = sock
        # Another loader process may have a copy of the other end, so that its closing is not always seen.
        self._parent = os.pidfd_open(parent)
        self._poll = select.poll()
        for descriptor in (sock.fileno(), self._parent):
            self._poll.register(descriptor, select.POLLIN)
        self._codec: FrameCodec[Given | Over] = FrameCodec(Given | Over)
        self._turn = turn

    def next(self, finished: int | None, *, is_empty: bool = False) -> Given | None:
        """Another shard, once there is one; None: the loop is over."""
        try:
            self._codec.send(self._socket, Ask(self._turn, finished, is_empty))
            if any(descriptor == self._parent for descriptor, _ in self._poll.poll()):
                return None
            answer = self._codec.receive(self._socket)
        except OSError:
            return None  # the training process has left the loop
        if not isinstance(answer, Given):
            return None
        self._turn = answer.turn
        return answer

    def fail(self, number: int, reason: str) -> None:
        """Say that a shard cannot be read."""
        with contextlib.suppress(OSError):
            self._codec.send(self._socket, Failed(number, reason))

    def close(self) -> None:
        self._socket.close()
        os.close(self._parent)


class Relay:
    """The training process's end: a thread for each loader process. It ends with `owner`."""

    def __init__(self, desk: Desk, owner: object) -> None:
        self._desk = desk
        # The garbage collector may close a loop, and so break off, in a thread that holds it.
        self._lock = threading.RLock()
        self._open: dict[socket.socket, int] = {}
        """Connections, and of which loop they are; -1: that is not known yet."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = RelayAddress(f"stoker-shards-{os.getpid()}-{new_token()}", os.getpid())
        self._socket.bind(f"\0{self.address.name}")
        self._socket.listen(128)
        weakref.finalize(owner, self._socket.shutdown, socket.SHUT_RDWR).atexit = False
        threading.Thread(target=self._accept, name="stoker-shard-relay", daemon=True).start()

    def break_off(self, turn: int) -> None:
        """That loop is over, and those before: who waits need not wait any longer."""
        is_newest = turn == self._desk.turn
        with self._lock:
            for sock, of in list(self._open.items()):
                if is_newest or 0 <= of <= turn:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    sock, _ = self._socket.accept()
                except OSError:
                    return
                if not _is_ours(sock):
                    sock.close()
                    continue
                with self._lock:
                    self._open[sock] = -1
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="stoker-shard-relay", daemon=True
                )
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        codec: FrameCodec[Ask | Failed] = FrameCodec(Ask | Failed)
        turn = -1
        try:
            while (message := _heard(codec, sock)) is not None:
                if isinstance(message, Failed):
                    self._desk.fail(message.number, message.reason, turn)
                    continue
                turn = self._desk.turn if message.turn < 0 else message.turn
                with self._lock:
                    self._open[sock] = turn
                answer = self._shard(message, turn)
                with contextlib.suppress(OSError):  # who has asked is gone, and is heard no more
                    codec.send(sock, answer)
        except BaseException as error:  # noqa: BLE001 (raised in the training thread)
            self._desk.break_off(error, turn)
        finally:
            with self._lock:
                del self._open[sock]
            sock.close()

    def _shard(self, ask: Ask, turn: int) -> Given | Over:
        held = self._desk.next(turn, ask.finished, is_empty=ask.is_empty, is_ahead=True)
        if held is None:
            return Over()
        return Given(turn, held.shard.shard, self._desk.source.split, held.given)


def _heard(codec: FrameCodec[Ask | Failed], sock: socket.socket) -> Ask | Failed | None:
    """None: it is gone, broken off, or no loader process of ours."""
    try:
        return codec.receive(sock)
    except (OSError, WireError):
        return None


def _is_ours(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.getuid())
