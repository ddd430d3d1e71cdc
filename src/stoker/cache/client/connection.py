"""One connection to a cache server, on a raw socket."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterable
from typing import BinaryIO
from urllib.parse import urlsplit

from stoker.cache.client.descriptors import Descriptor
from stoker.errors import ConfigError, WireError, WrongBodyLength
from stoker.wire.http import HEAD_BYTES_MAX, ResponseHead, parse_response_head
from stoker.wire.lost_peers import give_up_when_unheard
from stoker.wire.tls import ClientTls

_RECEIVE_BYTES = 256 * 1024
_SENT_BYTES = 1024 * 1024
_SIZE_BYTES_MAX = 64
"""Of the line that says how long a chunk is."""
UNHEARD_S = 10.0
"""So long may pass before the server's machine says that it has a request."""
_CONTROL_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)
"""As many descriptors as the kernel lets go with one message."""


class BrokenOff(ConnectionResetError):
    """An answer that had begun was not ended."""


class Endpoint:
    """Where a server listens: `http://host:port`, `https://host:port` or `unix:///path`. Raises ConfigError."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.is_tls = parts.scheme == "https"
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a cache endpoint: {error}") from error
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            self.path: str | None = parts.path
            self.host, self.port = "localhost", 0
        elif parts.scheme in ("http", "https") and parts.hostname and port and parts.path in ("", "/"):
            self.path = None
            self.host, self.port = parts.hostname, port
        else:
            raise ConfigError(
                f"{url!r} is not a cache endpoint: write http://HOST:PORT, https://HOST:PORT or unix:///PATH"
            )

    def connect(self, timeout_s: float, tls: ClientTls | None = None) -> socket.socket:
        """A connected socket; `tls`: whom to trust, of `https://`. Raises OSError, ConfigError."""
        if self.path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_s)
                sock.connect(self.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.host, self.port), timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            give_up_when_unheard(sock, min(UNHEARD_S, timeout_s))
            if not self.is_tls:
                return sock
            assert tls is not None
            return tls.context().wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


class Connection:
    """Sends a request and reads its response; not for two threads at once. All methods may raise OSError.

    `arrived`: descriptors that came since it was taken out of the pool, where they are taken.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self.arrived: list[Descriptor] = []
        self._buffer = b""
        self.is_reusable = True
        self.was_used = False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, request: bytes, timeout_s: float) -> None:
        """Send a request, or several at once. No silence from here on is longer than `timeout_s`."""
        self.is_reusable = False
        self._socket.settimeout(timeout_s)
        self._socket.sendall(request)

    def send_file(self, file: BinaryIO, size_bytes: int) -> None:
        """Send so many bytes of a file, from where it is read next. Raises WrongBodyLength where it ends before."""
        left = size_bytes
        while left:
            part = file.read(min(left, _SENT_BYTES))
            if not part:
                raise WrongBodyLength(
                    f"{size_bytes} bytes are to be written, and the file ends {left} before"
                )
            self._socket.sendall(part)
            left -= len(part)

    def wait_for(self, timeout_s: float) -> None:
        """No silence from here on is longer than that."""
        self._socket.settimeout(timeout_s)

    def head(self) -> ResponseHead:
        """Read the head of the next response."""
        self.is_reusable = False
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise WireError("the server's response head is too large")
            self._buffer += self._receive()
        head = parse_response_head(self._buffer[:end])
        self._buffer = self._buffer[end + 4 :]
        return head

    def body(self, head: ResponseHead, *, has_any: bool = True) -> bytes | bytearray:
        """The whole body; of an answer that can have one. Raises BrokenOff where it is not ended."""
        length = head.content_length if has_any else 0
        try:
            body = self._chunks() if length is None else self._exactly(length)
        except BrokenOff:
            raise
        except (ConnectionResetError, ConnectionAbortedError) as error:
            raise BrokenOff(f"the connection ended in the middle of an answer: {error}") from error
        self.is_reusable = not head.closes
        self.was_used = True
        return body

    def _receive(self) -> bytes:
        if self._takes_descriptors:
            data, control, _, _ = self._socket.recvmsg(
                _RECEIVE_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            self._take(control)
        else:
            data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def _receive_into(self, view: memoryview) -> int:
        if not self._takes_descriptors:
            return self._socket.recv_into(view)
        received, control, _, _ = self._socket.recvmsg_into([view], _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        self._take(control)
        return received

    def _take(self, control: Iterable[tuple[int, int, bytes]]) -> None:
        """Some may be missing, where too many are open: who needs them finds that out."""
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.arrived += [Descriptor(number) for number in numbers]

    def _exactly(self, size_bytes: int) -> bytes | bytearray:
        have = len(self._buffer)
        if have >= size_bytes:
            body = self._buffer[:size_bytes]
            self._buffer = self._buffer[size_bytes:]
            return body
        buffer = bytearray(size_bytes)
        buffer[:have] = self._buffer
        self._buffer = b""
        view = memoryview(buffer)
        while have < size_bytes:
            received = self._receive_into(view[have:])
            if not received:
                raise BrokenOff("the server closed the connection in the middle of an object")
            have += received
        return buffer

    def _chunks(self) -> bytearray:
        body = bytearray()
        while True:
            while (end := self._buffer.find(b"\r\n", 0, _SIZE_BYTES_MAX)) < 0:
                if len(self._buffer) >= _SIZE_BYTES_MAX:
                    raise WireError("the server sent a chunk without a size")
                self._buffer += self._receive()
            try:
                if (size_bytes := int(self._buffer[:end], 16)) < 0:
                    raise ValueError(f"{size_bytes} is no size")
            except ValueError as error:
                raise WireError("the server sent a chunk without a size") from error
            self._buffer = self._buffer[end + 2 :]
            body += self._exactly(size_bytes)
            if self._exactly(2) != b"\r\n":
                raise WireError("the server sent a chunk of another size than it said")
            if size_bytes == 0:
                return body
