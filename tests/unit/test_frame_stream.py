"""Frames straight from a transport, over real sockets: cut anywhere, too large, broken off."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from stoker.errors import WireError
from stoker.wire.frame_stream import FrameStream
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Beat

CODEC: FrameCodec[Beat] = FrameCodec(Beat, max_bytes=2000)
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def frames(count: int) -> bytes:
    return b"".join(CODEC.encode(Beat("n" * (number % 40), number)) for number in range(count))


def serve(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    take: Callable[[Beat], None] = lambda beat: None,
) -> tuple[list[int], BaseException | None]:
    """Let `peer` speak to a stream: the numbers that arrived (the first too), and what ended it."""
    heard: list[int] = []

    async def both() -> BaseException | None:
        done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def hear(beat: Beat) -> None:
            heard.append(beat.seq)
            take(beat)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"go\n")
            stream = FrameStream(CODEC, writer.transport)
            try:
                first = await stream.first()
                if first is not None:
                    heard.append(first.seq)
                    await asyncio.sleep(0.02)  # what comes before `listen` waits for it
                    await stream.listen(hear)
                done.set_result(None)
            except (OSError, WireError) as error:
                done.set_result(error)
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        await reader.readline()
        await peer(reader, writer)
        async with asyncio.timeout(60):
            end = await done
        writer.close()
        server.close()
        return end

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        end = runner.run(both())
    return heard, end


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("piece", [1, 3, 7, 50, 100_000])
def test_frames_arrive_whole_and_in_order_however_they_are_cut(loop_factory: Any, piece: int) -> None:
    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = frames(60)
        for at in range(0, len(raw), piece):
            writer.write(raw[at : at + piece])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    assert serve(loop_factory, peer) == (list(range(60)), None)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_peer_that_closes_without_a_word_gives_no_message(loop_factory: Any) -> None:
    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    assert serve(loop_factory, peer) == ([], None)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_peer_that_closes_within_a_frame_ends_the_stream(loop_factory: Any) -> None:
    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames(3) + frames(1)[:-1])
        writer.close()

    assert serve(loop_factory, peer) == ([0, 1, 2], None)


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize(
    ("junk", "what"),
    [(struct.pack(">I", 2001), "2001 bytes"), (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "not a message")],
)
def test_nonsense_ends_the_stream_and_is_named(loop_factory: Any, junk: bytes, what: str) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames(2) + junk + frames(1))
        await writer.drain()

    heard, end = serve(loop_factory, peer)
    assert heard == [0, 1]
    assert isinstance(end, WireError)
    assert what in str(end)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_broken_connection_is_told_from_a_closed_one(loop_factory: Any) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames(2))
        await writer.drain()
        await asyncio.sleep(0.1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        writer.transport.abort()

    heard, end = serve(loop_factory, peer)
    assert heard == [0, 1]
    assert isinstance(end, ConnectionResetError)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_who_listens_may_refuse_a_message(loop_factory: Any) -> None:
    def take(beat: Beat) -> None:
        if beat.seq == 3:
            raise WireError("no threes")

    async def peer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames(1))
        await asyncio.sleep(0.1)
        writer.write(frames(6)[len(frames(1)) :])
        await writer.drain()

    heard, end = serve(loop_factory, peer, take=take)
    assert heard == [0, 1, 2, 3]
    assert isinstance(end, WireError)
    assert "no threes" in str(end)
