"""Frames, and a master that is spoken to wrongly."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from stoker.base.clock import SystemClock
from stoker.errors import AccessDenied, EnvironmentProblem, MasterUnreachable, WireError
from stoker.job.journal.port import NullJournal
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.master import Master, listen
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
    master = Master(
        JobMachine(JobConfig(max_nodes=2)),
        clock=SystemClock(),
        journal=NullJournal(),
        token="secret",
        tick_s=0.05,
    )
    await master.start(listener)
    return master, listener.getsockname()[1]


async def answer(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    writer.write_eof()
    got = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return got


def test_a_master_that_is_spoken_to_wrongly_goes_on() -> None:
    async def story() -> None:
        master, port = await master_on_a_free_port()
        auth = b"Authorization: Bearer secret\r\n"
        assert (await answer(port, b"GET /v1/status HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 401")
        assert (await answer(port, b"GET /v1/x HTTP/1.1\r\n" + auth + b"\r\n")).startswith(b"HTTP/1.1 404")
        assert await answer(port, b"\x00\x01\x02" * 100) == b""
        assert await answer(port, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n") == b""
        assert await answer(port, b"") == b""
        stream = b"GET /v1/stream HTTP/1.1\r\n" + auth + b"\r\n"
        assert (await answer(port, stream + b"\xff\xff\xff\xff")).startswith(b"HTTP/1.1 101")
        assert (await answer(port, stream + b"\x00\x00\x00\x01\xc1")).startswith(b"HTTP/1.1 101")
        with pytest.raises(AccessDenied, match="refuses the job token"):
            await open_stream("127.0.0.1", port, "wrong", timeout_s=5)
        status = await answer(port, b"GET /v1/status HTTP/1.1\r\n" + auth + b"\r\n")
        assert b'"phase":"waiting"' in status
        await master.close()

    asyncio.run(story())


def test_one_stream_speaks_for_one_node() -> None:
    async def story() -> None:
        master, port = await master_on_a_free_port()
        to_master: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        to_agent: FrameCodec[ToAgent] = FrameCodec(ToAgent)
        reader, writer = await open_stream("127.0.0.1", port, "secret", timeout_s=5)
        writer.write(to_master.encode(Join(node="a", job="none", host="h", address="h", slots=1)))
        assert isinstance(await to_agent.read(reader), Directive)
        writer.write(to_master.encode(NodeReport(node="b", seq=1, workers=())))
        while await to_agent.read(reader) is not None:
            pass
        assert "a" in master.machine.roster.gone, "its stream is closed, so it is lost"
        writer.close()
        await writer.wait_closed()
        await master.close()

    asyncio.run(story())


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(MasterUnreachable, match=f"no master answers at 127.0.0.1:{port}"):
        asyncio.run(open_stream("127.0.0.1", port, "t", timeout_s=2))


def test_a_port_in_use_names_the_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentProblem, match="choose another port with --rdzv-endpoint"):
            listen("127.0.0.1", taken.getsockname()[1])
