"""Frames of one connection without asyncio's streams between: no task is woken for a frame, no future made."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from stoker.errors import WireError
from stoker.wire.frames import FrameCodec

_LENGTH = struct.Struct(">I")
T = TypeVar("T")


class FrameStream(asyncio.Protocol, Generic[T]):
    """Takes over the receiving side of a connection from an `asyncio.StreamReader`, for good.

    What the reader had received and not handed out is lost: take over where the peer waits for an answer. Its
    StreamWriter goes on working. `first` waits for one message, then `listen` hands over each as it comes.
    """

    def __init__(self, codec: FrameCodec[T], transport: asyncio.WriteTransport) -> None:
        self._codec = codec
        self._transport: Any = transport
        self._before: Any = self._transport.get_protocol()
        self._take: Callable[[T], None] | None = None
        self._early: list[T] = []
        self._came = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._needed = 0
        """Bytes that the buffer must have before it is worth a look."""
        self._transport.set_protocol(self)

    async def first(self) -> T | None:
        """The first message; None when the connection ends without one. Raises WireError."""
        await self._came.wait()
        if self._early:
            return self._early.pop(0)
        with contextlib.suppress(OSError):
            await self._ended
        return None

    async def listen(self, take: Callable[[T], None]) -> None:
        """Hand each message to `take` until the peer closes the connection.

        Raises OSError when something else ends it, WireError for what is no message, and what `take` raises.
        """
        self._take = take
        early, self._early = self._early, []
        for message in early:
            take(message)
        await self._ended

    # -- called by the transport --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        try:
            left = self._read(data)
        except WireError as error:
            self._end(error)
            self._transport.abort()
            return
        self._buffer += left

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    # -- helpers ------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> bytes:
        """Hand over all whole frames; returns what is left."""
        at, size = 0, len(data)
        while size - at >= _LENGTH.size:
            end = at + _LENGTH.size + self._codec.checked_length(data[at : at + _LENGTH.size])
            if end > size:
                self._needed = end - at
                return data[at:]
            message = self._codec.decode(data[at + _LENGTH.size : end])
            at = end
            if self._take is not None and not self._ended.done():
                self._take(message)
            else:
                self._early.append(message)
                self._came.set()
        self._needed = _LENGTH.size
        return data[at:]

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
                self._ended.exception()  # who listens raises it; nobody may
        self._came.set()
