"""The shell around `JobMachine`: reads sockets and clocks, feeds events, carries effects out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.base.clock import Clock
from stoker.errors import EnvironmentProblem, WireError
from stoker.job.events import (
    End,
    Event,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Refuse,
    Send,
    StopRequested,
    Tick,
)
from stoker.job.journal.port import Journal
from stoker.job.machine import JobMachine
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Join, NodeReport, Outcome, Refused, ToMaster
from stoker.wire.stream import STREAM_PATH, SWITCHING, ConnectionClosed, bearer_matches, read_head, response

log = logging.getLogger("stoker.master")
QUIET = frozenset({"worker-started", "node-joined", "waiting"})


@dataclass
class _Stream:
    writer: asyncio.StreamWriter
    node: str = ""


class Master:
    """One job's coordinator. It holds decisions, never data.

    `start` listens and begins to tick; `wait` returns the job's outcome; `close` ends the streams.
    """

    def __init__(
        self, machine: JobMachine, *, clock: Clock, journal: Journal, token: str, tick_s: float = 0.5
    ) -> None:
        self.machine = machine
        self.clock = clock
        self.journal = journal
        self._token = token
        self._tick_s = tick_s
        self._codec: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        self._streams: dict[str, _Stream] = {}
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._deserted = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound, listening socket."""
        self._server = await asyncio.start_server(self._serve, sock=listener)
        self._ticking = asyncio.create_task(self._tick_forever(), name="master-tick")

    async def wait(self) -> Outcome:
        """The outcome, once there is one."""
        return await asyncio.shield(self._ended)

    def stop(self, why: str, exit_code: int) -> None:
        """End the job now."""
        self.feed(StopRequested(why, exit_code))

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` for the agents to hang up, then close everything."""
        if self._streams:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deserted.wait(), grace_s)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams.values()):
            stream.writer.close()
        self.journal.close()

    def feed(self, event: Event) -> None:
        """Give the machine one event and carry out what it asks for."""
        for effect in self.machine.step(event, self.clock.now()):
            match effect:
                case Send(node, directive):
                    self._send(node, directive)
                case Refuse(node, why):
                    self._send(node, Refused(why))
                    self._streams[node].writer.close()
                case Record(kind, why, details):
                    self._record(kind, why, details)
                case End(outcome):
                    if not self._ended.done():
                        self._ended.set_result(outcome)
        for node, stream in list(self._streams.items()):
            if node not in self.machine.roster.nodes and not stream.writer.is_closing():
                stream.writer.transport.abort()  # given up as silent: should it still be there, it has to join anew

    def status(self) -> dict[str, Any]:
        """What `GET /v1/status` answers."""
        machine = self.machine
        return {
            "phase": machine.phase,
            "generation": machine.generation,
            "world_size": len(machine.world.members) if machine.world is not None else 0,
            "world": machine.world,
            "restarts_used": machine.restarts_used,
            "commits": machine.roster.highest_commit,
            "outcome": machine.outcome,
            "nodes": {
                node.node: [
                    {"worker": w.worker, "slot": w.spec.slot, "state": w.state, "ended": w.ended}
                    for w in machine.roster.on_node(node.node)
                ]
                for node in machine.roster.nodes.values()
            },
        }

    # -- streams ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = _Stream(writer)
        try:
            head = await asyncio.wait_for(read_head(reader), timeout=10.0)
            if not bearer_matches(head, self._token):
                writer.write(response("401 Unauthorized", b'{"error":"wrong or missing job token"}'))
            elif head.path == STREAM_PATH:
                writer.write(SWITCHING)
                await self._read_stream(reader, stream)
            elif head.path == "/v1/status":
                writer.write(response("200 OK", msgspec.json.encode(self.status())))
            elif head.path == "/v1/events":
                writer.write(response("200 OK", msgspec.json.encode(self.journal.entries())))
            else:
                writer.write(response("404 Not Found", b'{"error":"no such route"}'))
        except ConnectionClosed:
            pass
        except (WireError, TimeoutError) as error:
            log.warning("closing a connection: %s", error)
        finally:
            if stream.node:
                self._streams.pop(stream.node, None)
                if not self._streams:
                    self._deserted.set()
                self.feed(NodeLost(stream.node, "its stream to the master broke"))
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    async def _read_stream(self, reader: asyncio.StreamReader, stream: _Stream) -> None:
        first = await asyncio.wait_for(self._codec.read(reader), timeout=10.0)
        if not isinstance(first, Join):
            raise WireError("the first message of a stream must be a join")
        if first.node in self._streams:
            raise WireError(f"node {first.node} already has a stream")
        stream.node = first.node
        self._streams[first.node] = stream
        self._deserted.clear()
        self.feed(NodeJoined(first))
        while (message := await self._codec.read(reader)) is not None:
            if not isinstance(message, NodeReport) or message.node != stream.node:
                raise WireError(f"{stream.node} may only send its own reports")
            self.feed(NodeReported(message))

    def _send(self, node: str, message: msgspec.Struct) -> None:
        stream = self._streams.get(node)
        if stream is not None and not stream.writer.is_closing():
            stream.writer.write(self._codec.encode(message))

    # -- time and log -------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        """A late tick is left out: this process itself was stopped (Ctrl-Z) or stuck, and what the nodes said
        meanwhile is still to be read. The next one comes in any case."""
        left_out = False
        while True:
            before = self.clock.now()
            await asyncio.sleep(self._tick_s)
            left_out = not left_out and self.clock.now() - before >= 2 * self._tick_s
            if not left_out:
                self.feed(Tick())

    def _record(self, kind: str, why: str, details: dict[str, Any]) -> None:
        quiet = kind in QUIET or (kind == "node-lost" and self.machine.phase == "ended")
        log.log(logging.DEBUG if quiet else logging.INFO, "%s", _sentence(kind, why, details))
        try:
            self.journal.append(self.clock.wall(), kind, why, details)
        except EnvironmentProblem as error:
            log.error("the event log is incomplete: %s", error)


def _sentence(kind: str, why: str, details: dict[str, Any]) -> str:
    """An entry of the event log for people."""
    if kind == "generation":
        return f"generation {details['generation']} forms: {why}"
    if kind == "world":
        return f"generation {details['generation']} runs: {why}"
    if "worker" in details:
        rank = f" (rank {details['rank']})" if "rank" in details else ""
        return f"{details['worker']}{rank}: {why}"
    return f"{details['node']}: {why}" if "node" in details else f"{kind}: {why}"


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen. Raises EnvironmentProblem, naming the address and the mend, when that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --rdzv-endpoint"
        ) from None
    return listener
