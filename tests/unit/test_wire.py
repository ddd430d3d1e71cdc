"""Frames, and a master that is spoken to wrongly."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from stoker.base.clock import SystemClock
from stoker.errors import AccessDenied, EnvironmentProblem, MasterUnreachable, WireError
from stoker.job.journal.memory import MemoryJournal
from stoker.job.machine import JobConfig
from stoker.job.master import Master, MasterConfig, listen
from stoker.job.meeting import Meetings
from stoker.job.overview import Overview
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Directive, Hello, Join, NodeReport, Order, ToAgent, ToMaster, ToWorker
from stoker.wire.stream import open_stream


def test_frames_over_a_socket() -> None:
    codec: FrameCodec[ToWorker] = FrameCodec(ToWorker)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        codec.send(ours, Order(generation=3))
        codec.send(ours, Order(generation=4, released=True))
        assert codec.receive(theirs) == Order(generation=3)
        assert codec.receive(theirs) == Order(generation=4, released=True)
        ours.shutdown(socket.SHUT_WR)
        assert codec.receive(theirs) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x00\x02\xc1\xc1",
        struct.pack(">I", 2**31) + b"x",
        FrameCodec[ToWorker](ToWorker).encode(Hello(worker="w", pid=1)),
    ],
)
def test_what_is_no_message_is_a_typed_error(raw: bytes) -> None:
    codec: FrameCodec[ToWorker] = FrameCodec(ToWorker)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        with pytest.raises(WireError):
            codec.receive(theirs)


async def master_on_a_free_port() -> tuple[Master, int]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = MasterConfig(JobConfig(max_nodes=2), "secret", f"127.0.0.1:{port}", tick_s=0.05)
    master = Master(
        config,
        clock=SystemClock(),
        journal=MemoryJournal(),
        services=lambda _: {"meeting": Meetings()},
        control=Overview,
    )
    await master.start(listener)
    return master, port


async def answer(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    writer.write_eof()
    got = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await writer.wait_closed()
    return got


def test_a_master_that_is_spoken_to_wrongly_goes_on() -> None:
    async def story() -> None:
        master, port = await master_on_a_free_port()
        auth = b"Authorization: Bearer secret\r\n"
        assert (await answer(port, b"GET /v1/status HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 401")
        assert (await answer(port, b"GET /v1/x HTTP/1.1\r\n" + auth + b"\r\n")).startswith(b"HTTP/1.1 404")
        assert (await answer(port, b"\x00\x01\x02" * 100)).startswith((b"HTTP/1.1 400", b""))
        assert (await answer(port, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")).startswith(
            b"HTTP/1.1 431"
        )
        assert await answer(port, b"") == b""
        upgrade = b"Upgrade: stoker-frames/1\r\nConnection: Upgrade\r\n"
        stream = b"GET /v1/stream HTTP/1.1\r\n" + auth + upgrade + b"\r\n"
        assert (await answer(port, stream + b"\xff\xff\xff\xff")).startswith(b"HTTP/1.1 101")
        assert (await answer(port, stream + b"\x00\x00\x00\x01\xc1")).startswith(b"HTTP/1.1 101")
        with pytest.raises(AccessDenied, match="refuses the job token"):
            await open_stream("127.0.0.1", port, "wrong", timeout_s=30)
        status = await answer(port, b"GET /v1/status HTTP/1.1\r\n" + auth + b"\r\n")
        assert b'"phase":"waiting"' in status
        await master.close()

    asyncio.run(story())


def test_one_stream_speaks_for_one_node() -> None:
    async def story() -> None:
        master, port = await master_on_a_free_port()
        to_master: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        to_agent: FrameCodec[ToAgent] = FrameCodec(ToAgent)
        reader, writer = await open_stream("127.0.0.1", port, "secret", timeout_s=30)
        writer.write(to_master.encode(Join(node="a", job="none", host="h", address="h", slots=1)))
        assert isinstance(await to_agent.read(reader), Directive)
        writer.write(to_master.encode(NodeReport(node="b", seq=1, workers=())))
        while await to_agent.read(reader) is not None:
            pass
        assert "a" not in master.machine.roster.nodes, "its stream is closed, so it is lost"
        writer.close()
        await writer.wait_closed()
        await master.close()

    asyncio.run(story())


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(MasterUnreachable, match=f"no master answers at 127.0.0.1:{port}"):
        asyncio.run(open_stream("127.0.0.1", port, "t", timeout_s=30))


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 101 Switch"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_master_that_dies_as_it_is_called_is_one_that_cannot_be_reached(
    said: bytes, is_reset: bool
) -> None:
    """And not one that talks nonsense: the agent goes on looking for its successor."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        if is_reset:
            writer.transport.abort()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            with pytest.raises(MasterUnreachable, match="hung up"):
                await open_stream("127.0.0.1", server.sockets[0].getsockname()[1], "t", timeout_s=30)

    asyncio.run(story())


def test_a_port_in_use_names_the_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentProblem, match="choose another port with --rdzv-endpoint"):
            listen("127.0.0.1", taken.getsockname()[1])
