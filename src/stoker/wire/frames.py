"""Length-prefixed MessagePack frames, for blocking sockets and for asyncio streams."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from stoker.errors import WireError

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
T = TypeVar("T")


class FrameCodec(Generic[T]):
    """Encodes messages and decodes one union of message types.

    Raises WireError, naming what is wrong, for anything that is not such a message.
    """

    def __init__(self, message_type: Any, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)
        self._encoder = msgspec.msgpack.Encoder()
        self.max_bytes = max_bytes

    def encode(self, message: msgspec.Struct) -> bytes:
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(f"not a message of this protocol: {error}") from None

    def checked_length(self, head: bytes) -> int:
        (length,) = _LENGTH.unpack(head)
        if length > self.max_bytes:
            raise WireError(f"a frame of {length} bytes is over the limit of {self.max_bytes}")
        return int(length)

    async def read(self, reader: asyncio.StreamReader) -> T | None:
        """The next message, or None at the end of the stream, whatever ended it."""
        try:
            return await self.read_or_break(reader)
        except OSError:
            return None

    async def read_or_break(self, reader: asyncio.StreamReader) -> T | None:
        """The next message, or None when the peer has closed the stream; OSError when something else broke it."""
        try:
            head = await reader.readexactly(_LENGTH.size)
            body = await reader.readexactly(self.checked_length(head))
        except asyncio.IncompleteReadError:
            return None
        return self.decode(body)

    def receive(self, sock: socket.socket) -> T | None:
        """The next message from a blocking socket, or None at its end."""
        head = _receive_exactly(sock, _LENGTH.size)
        if head is None:
            return None
        body = _receive_exactly(sock, self.checked_length(head))
        return None if body is None else self.decode(body)

    def send(self, sock: socket.socket, message: msgspec.Struct) -> None:
        sock.sendall(self.encode(message))


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
