"""A mount's daemon with its threads, and a test that is the kernel at the other end of its device."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker._native import PlainFiles
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.daemon import Daemon
from stoker.cache.mount.questions import Question
from stoker.cache.mount.requests import ROOT, Opcode
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.state_log import StateLog
from tests.mount.kernel import Asked, init, packed, unpacked_entry

WAIT_S = 30.0
NUMBER = "0:4711"
_OUT = struct.Struct("=IiQ")
_KEPT: list[socket.socket] = []
"""Ends of devices: what no test needs any more has nobody at the other end who closes it."""


class FakeFinding:
    """`answer`: what is found out, in a thread of the daemon."""

    def __init__(self, answer: Callable[[Question], object]) -> None:
        self.find = answer
        self.facts: object = dict

    def tell_left(self) -> None:
        """Nothing is left."""


class DaemonAtWork:
    """INIT is answered. Its threads end with the tests: none of them does anything any more by itself."""

    def __init__(self, folder: Path, settings: MountSettings, answer: Callable[[Question], object]) -> None:
        self._kernel, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _KEPT.extend((self._kernel, self._device))
        self._kernel.settimeout(WAIT_S)
        self._unique = 0
        plain = PlainFiles()
        self.core = MountCore(settings, plain)
        finding: Any = FakeFinding(answer)
        self.daemon = Daemon(
            self._device.fileno(), NUMBER, self.core, finding, StateLog(folder / "state"), plain=plain
        )
        threading.Thread(target=self.daemon.run, args=(lambda: None,), daemon=True).start()
        code, _ = self.said(self.asks(init()))
        assert not code

    def asks(self, asked: Asked) -> int:
        """A program waits from now on; the number of the request."""
        self._unique += 2
        self._kernel.send(packed(self._unique, asked))
        return self._unique

    def said(self, unique: int) -> tuple[int, bytes]:
        """What the next answer is, which must be that to this one: a reason out of `errno`, and a body."""
        while True:
            data = self._kernel.recv(1 << 21)
            _, code, of = _OUT.unpack_from(data)
            if of:  # else it is a notice
                assert of == unique
                return -code, data[_OUT.size :]

    def look_up(self, name: str) -> tuple[int, int]:
        """A name of the root: a reason out of `errno`, or the number of the node."""
        code, body = self.said(self.asks(Asked(Opcode.LOOKUP, ROOT, name.encode() + b"\0")))
        return code, 0 if code else unpacked_entry(body).node


def reading(offset: int, size_bytes: int) -> bytes:
    """The body of READ, of a file that was never opened."""
    return struct.pack("=QQIIQII", 0, offset, size_bytes, 0, 0, 0, 0)
