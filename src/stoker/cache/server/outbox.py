"""What one connection has yet to send: bytes and pieces of files, in order, without copying the files.

uvloop's transports cannot send files, so this writes to a duplicate of their socket and the transport
only reads.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from stoker.cache.store.port import OpenFile

_LOW_WATER_BYTES = 1024 * 1024
_SENDFILE_BYTES_MAX = 8 * 1024 * 1024


class _Piece:
    __slots__ = ("done", "file", "offset", "size_bytes")

    def __init__(self, file: OpenFile, offset: int, size_bytes: int, done: Callable[[], None]) -> None:
        self.file = file
        self.offset = offset
        self.size_bytes = size_bytes
        self.done = done


class Outbox:
    """Sends on a socket of its own, which it closes. `on_error` is called once if the peer is gone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_error: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._send = sock.send
        self._fd = sock.fileno()
        self._on_error = on_error
        self._queue: deque[memoryview | _Piece] = deque()
        self._is_watching = False
        self._waiter: asyncio.Future[None] | None = None
        self.pending_bytes = 0
        self.is_closed = False

    def send(self, data: bytes, more: bool = False) -> None:
        """Send bytes, now if possible. `more` says that something follows at once."""
        if self.is_closed:
            return
        sent = 0
        if not self._queue:
            try:
                sent = self._send(data, socket.MSG_MORE if more else 0)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._fail()
                return
            if sent == len(data):
                return
        self._queue.append(memoryview(data)[sent:])
        self.pending_bytes += len(data) - sent
        self._watch()

    def send_file(self, file: OpenFile, offset: int, size_bytes: int, done: Callable[[], None]) -> None:
        """Send a piece of a file, now if possible; `done` is called when it is sent or given up."""
        if self.is_closed:
            done()
            return
        piece = _Piece(file, offset, size_bytes, done)
        self._queue.append(piece)
        self.pending_bytes += size_bytes
        if not self._is_watching:
            self._flush()

    async def drain(self) -> None:
        """Wait until little is pending. Raises ConnectionError once closed."""
        while self.pending_bytes > _LOW_WATER_BYTES and not self.is_closed:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.is_closed:
            raise ConnectionResetError("the reader is gone")

    def end(self) -> None:
        """Tell the peer that nothing follows."""
        if not self.is_closed and not self._queue:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def close(self) -> None:
        """Give up what is not sent and close."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._is_watching:
            self._loop.remove_writer(self._fd)
            self._is_watching = False
        self._socket.close()
        for item in self._queue:
            if isinstance(item, _Piece):
                item.done()
        self._queue.clear()
        self.pending_bytes = 0
        self._wake()

    def _fail(self) -> None:
        self.close()
        self._on_error()

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._loop.add_writer(self._fd, self._flush)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _flush(self) -> None:
        try:
            while self._queue:
                item = self._queue[0]
                if isinstance(item, _Piece):
                    if not self._flush_piece(item):
                        break
                    self._queue.popleft()
                    item.done()
                    continue
                sent = self._send(item)
                self.pending_bytes -= sent
                if sent < len(item):
                    self._queue[0] = item[sent:]
                    break
                self._queue.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._fail()
            return
        if self._queue:
            self._watch()
        elif self._is_watching:
            self._loop.remove_writer(self._fd)
            self._is_watching = False
        if self.pending_bytes <= _LOW_WATER_BYTES:
            self._wake()

    def _flush_piece(self, piece: _Piece) -> bool:
        """Send once; whether the piece is complete. A socket that takes less must be waited for."""
        sent = os.sendfile(self._fd, piece.file.fd, piece.offset, min(piece.size_bytes, _SENDFILE_BYTES_MAX))
        if sent == 0:
            raise ConnectionAbortedError("the cached file is shorter than it was")
        piece.offset += sent
        piece.size_bytes -= sent
        self.pending_bytes -= sent
        return piece.size_bytes == 0
