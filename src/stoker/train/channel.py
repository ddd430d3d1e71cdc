"""The worker's end of the socket to its agent, read by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import msgspec

from stoker.errors import ConfigError, WireError
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Failure, Hello, Order, ToWorker, WorkerState


class AgentChannel:
    """Sends states, receives orders. `on_order` and `on_lost` are called in the reading thread."""

    def __init__(self, path: str, worker: str) -> None:
        self._codec: FrameCodec[ToWorker] = FrameCodec(ToWorker)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"no agent answers at STOKER_AGENT_SOCKET={path} ({error.strerror}): start the script with "
                "`stoker run`, or unset that variable to run it alone"
            ) from None
        self._send(Hello(worker=worker, pid=os.getpid()))

    def start(self, on_order: Callable[[Order], None], on_lost: Callable[[], None]) -> None:
        """Begin to listen."""
        thread = threading.Thread(
            target=self._listen, args=(on_order, on_lost), name="stoker-orders", daemon=True
        )
        thread.start()

    def say(self, state: WorkerState) -> None:
        """Tell the agent what this worker is."""
        self._send(state)

    def fail(self, message: str) -> None:
        """Tell the agent why this worker is about to end."""
        self._send(Failure(message=message))

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reading thread reports a lost agent
            self._codec.send(self._socket, message)

    def _listen(self, on_order: Callable[[Order], None], on_lost: Callable[[], None]) -> None:
        with contextlib.suppress(WireError, OSError):
            while (order := self._codec.receive(self._socket)) is not None:
                on_order(order)
        on_lost()
