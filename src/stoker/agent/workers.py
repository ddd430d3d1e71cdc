"""The Unix socket through which an agent and its workers speak."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.agent.resources import process_state
from stoker.base.ids import new_id
from stoker.base.units import format_bytes
from stoker.errors import WireError
from stoker.wire.frames import FrameCodec
from stoker.wire.job import (
    PROTOCOL,
    REFUSAL,
    Answer,
    Call,
    Failure,
    FromWorker,
    Hello,
    Order,
    WorkerState,
)

log = logging.getLogger("stoker.agent")
CALL_BYTES_MAX = 4 * 1024 * 1024
"""A longer call is refused: all that a service is asked passes through the one master."""
SOCKET_PATH_BYTES_MAX = 100
"""The kernel takes 107."""


def socket_path(folder: Path) -> Path:
    """A new socket's path in this folder, or in one of its own where that name would be too long for a socket."""
    name = f"agent-{os.getpid()}-{new_id('s')[2:]}.sock"
    if len(os.fsencode(folder / name)) > SOCKET_PATH_BYTES_MAX:
        folder = Path(tempfile.mkdtemp(prefix="stoker-", dir="/tmp"))
    return folder / name


@dataclass(frozen=True)
class _Speaker:
    """The process that speaks for a worker."""

    pid: int
    writer: asyncio.StreamWriter


class WorkerChannel:
    """Accepts workers; what they say goes to the callbacks, orders go back.

    One process speaks for each worker. Those that it starts inherit its environment, and import its script again where
    they are spawned, so that they say hello as well: they are refused.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_hello: Callable[[str, int], None],
        on_state: Callable[[str, WorkerState], None],
        on_failure: Callable[[str, str], None],
        on_call: Callable[[str, Call], None],
    ) -> None:
        """`on_hello(worker, pid)`: a process has come to speak for a worker."""
        self.path = path
        self._on_hello, self._on_state = on_hello, on_state
        self._on_failure, self._on_call = on_failure, on_call
        self._codec: FrameCodec[FromWorker] = FrameCodec(FromWorker)
        self._speakers: dict[str, _Speaker] = {}
        self._streams: set[asyncio.StreamWriter] = set()
        """All that are open, also of those who have said nothing yet."""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))
        self.path.chmod(0o600)

    def give(self, worker: str, message: Order | Answer) -> None:
        speaker = self._speakers.get(worker)
        if speaker is not None and not speaker.writer.is_closing():
            speaker.writer.write(self._codec.encode(message))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for stream in self._streams:
            stream.close()
        self.path.unlink(missing_ok=True)
        if self.path.parent.name.startswith("stoker-"):
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # its own; another holds more than this

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = ""
        self._streams.add(writer)
        try:
            first = await self._codec.read(reader)
            if not isinstance(first, Hello):
                raise WireError("a worker's first message must be a hello")
            if first.protocol != PROTOCOL:
                raise WireError(f"a worker speaks protocol {first.protocol}, this agent {PROTOCOL}")
            if refusal := self._refusal(first):
                log.debug("%s", refusal)
                writer.write(self._codec.encode(Answer(number=REFUSAL, error=refusal)))
                return
            worker = first.worker
            before, self._speakers[worker] = self._speakers.get(worker), _Speaker(first.pid, writer)
            if before is not None:
                before.writer.close()
            self._on_hello(worker, first.pid)
            while (message := await self._codec.read(reader)) is not None:
                if isinstance(message, WorkerState):
                    self._on_state(worker, message)
                elif isinstance(message, Failure):
                    self._on_failure(worker, message.message)
                elif isinstance(message, Call):
                    self._take_call(worker, message)
        except WireError as error:
            log.warning("worker %s: %s", worker or "?", error)
            writer.write(self._codec.encode(Answer(number=REFUSAL, error=str(error))))
        finally:
            self._streams.discard(writer)
            known = self._speakers.get(worker)
            if known is not None and known.writer is writer:
                del self._speakers[worker]
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    def _take_call(self, worker: str, call: Call) -> None:
        if len(call.body) > CALL_BYTES_MAX:
            size, most = format_bytes(len(call.body)), format_bytes(CALL_BYTES_MAX)
            self.give(
                worker, Answer(call.number, error=f"a call of {size} to {call.service!r}: {most} is the most")
            )
        else:
            self._on_call(worker, call)

    def _refusal(self, hello: Hello) -> str:
        """Why this process cannot speak for the worker that it names; empty: it can.

        A process that was started in place of another one takes over, even if something that the other left behind
        holds its end of the channel open.
        """
        known = self._speakers.get(hello.worker)
        if known is None or known.pid == hello.pid or process_state(known.pid) in ("", "Z"):
            return ""
        return (
            f"process {hello.pid} cannot be {hello.worker}, as process {known.pid} is: a process that a worker starts "
            "has no part in the job of its own"
        )
