"""The Unix socket through which an agent and its workers speak."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from stoker.errors import WireError
from stoker.wire.frames import FrameCodec
from stoker.wire.job import PROTOCOL, Failure, FromWorker, Hello, Order, WorkerState

log = logging.getLogger("stoker.agent")


class WorkerChannel:
    """Accepts workers; what they say goes to the callbacks, orders go back."""

    def __init__(
        self,
        path: Path,
        *,
        on_hello: Callable[[str], None],
        on_state: Callable[[str, WorkerState], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        self.path = path
        self._on_hello, self._on_state, self._on_failure = on_hello, on_state, on_failure
        self._codec: FrameCodec[FromWorker] = FrameCodec(FromWorker, max_bytes=4 * 1024 * 1024)
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))
        self.path.chmod(0o600)

    def give(self, worker: str, order: Order) -> None:
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(self._codec.encode(order))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = ""
        try:
            first = await self._codec.read(reader)
            if not isinstance(first, Hello):
                raise WireError("a worker's first message must be a hello")
            if first.protocol != PROTOCOL:
                raise WireError(f"a worker speaks protocol {first.protocol}, this agent {PROTOCOL}")
            worker = first.worker
            self._writers[worker] = writer
            self._on_hello(worker)
            while (message := await self._codec.read(reader)) is not None:
                if isinstance(message, WorkerState):
                    self._on_state(worker, message)
                elif isinstance(message, Failure):
                    self._on_failure(worker, message.message)
        except WireError as error:
            log.warning("worker %s: %s", worker or "?", error)
        finally:
            if self._writers.get(worker) is writer:
                del self._writers[worker]
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()
