"""Requests over pooled keep-alive connections, safe between threads and across forks."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import BinaryIO

from stoker.cache.client.connection import BrokenOff, Connection, Endpoint
from stoker.cache.client.descriptors import Descriptor
from stoker.cache.client.waited import waited
from stoker.errors import CacheUnavailable, ConfigError, ShortBody
from stoker.settings import ClientTlsFiles, cache_settings
from stoker.wire.cache_api import (
    MSGPACK,
)
from stoker.wire.cache_errors import failure_of
from stoker.wire.http import ResponseHead
from stoker.wire.lost_peers import is_lost
from stoker.wire.tls import ClientTls, explained

_TRIES = 2
WRITTEN_S = 300.0
"""So long at least it is waited for a server that writes to its origin: that may take its time."""

Answered = tuple[bytes | bytearray, list[Descriptor]]
"""A body, and the descriptors that have come so far."""


class Transport:
    """Asks one server; connects when first used. A pickled copy has connections of its own.

    `takes_descriptors`: at a Unix socket, those that the server passes are taken, for `post_all`. `tls`: whom to trust,
    of `https://`; None: what the settings say.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        timeout_s: float,
        *,
        takes_descriptors: bool = False,
        tls: ClientTlsFiles | None = None,
    ) -> None:
        self.endpoint = Endpoint(endpoint)
        self._given_tls = tls
        self._tls = None
        if self.endpoint.is_tls:
            self._tls = ClientTls(cache_settings().tls if tls is None else tls)
        self._token = token
        self.takes_descriptors = takes_descriptors and self.endpoint.path is not None
        self._timeout_s = timeout_s
        headers = f"Host: {self.endpoint.host}\r\nAccept: {MSGPACK}\r\n"
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise ConfigError("a token has only printable ASCII characters")
            headers += f"Authorization: Bearer {token}\r\n"
        self._headers = headers.encode("ascii")
        self._pool: deque[Connection] = deque()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        target: str,
        headers: bytes = b"",
        body: bytes | None = None,
        accept: tuple[int, ...] = (),
    ) -> tuple[ResponseHead, bytes | bytearray]:
        """The head and body of the answer. Raises CacheUnavailable, WireError, and what the server says."""
        request = self._encode(method, target, headers, body)
        head, answer, _ = self._ask(request)
        if head.status >= 400 and head.status not in accept:
            raise failure_of(head.status, answer)
        return head, answer

    def head(self, target: str) -> ResponseHead:
        """What a GET would be answered with, without the body; its status says whether it is an error, and nothing says
        which. Raises CacheUnavailable, WireError."""
        connection, head, _ = self._exchange(self._encode("HEAD", target, b"", None), has_body=False)
        self._give(connection)
        return head

    def passed(self, target: str) -> Answered:
        """What is answered to a GET, and the descriptors that came with it. Raises as `request`."""
        head, answer, arrived = self._ask(self._encode("GET", target, b"", None))
        if head.status >= 400:
            raise failure_of(head.status, answer)
        return answer, arrived

    def send(self, target: str, headers: bytes, file: BinaryIO, size_bytes: int) -> bytes | bytearray:
        """What is answered to a PUT of so many bytes of a file, which are sent once the server says that it takes them.
        Raises as `request`, and WrongBodyLength."""
        if not size_bytes:
            return self.write("PUT", target, headers)
        headers += b"Expect: 100-continue\r\nContent-Length: %d\r\n" % size_bytes
        return self._write(self._encode("PUT", target, headers, None), file, size_bytes)

    def write(self, method: str, target: str, headers: bytes) -> bytes | bytearray:
        """What is answered to what changes something and has no body; that may take long. Raises as `request`."""
        if method == "PUT":
            headers += b"Content-Length: 0\r\n"
        return self._write(self._encode(method, target, headers, None), None, 0)

    def _write(self, request: bytes, file: BinaryIO | None, size_bytes: int) -> bytes | bytearray:
        """On a connection of its own: what was kept may be closed by now, and what was sent would be sent anew."""
        connection = None
        try:
            connection = self._new_connection()
            connection.send(request, self._timeout_s)
            head = connection.head()
            if head.status == 100 and file is not None:
                connection.wait_for(max(self._timeout_s, WRITTEN_S))
                connection.send_file(file, size_bytes)
                head = connection.head()
            answer = connection.body(head)
        except OSError as error:
            raise self._unavailable(error) from error
        finally:
            if connection is not None:
                connection.close()
        if head.status >= 400:
            raise failure_of(head.status, answer)
        return answer

    def post_all(self, target: str, bodies: Sequence[bytes]) -> Generator[Answered, None, None]:
        """The answers to requests that are sent together, as they come, so that server and reader work at once.

        Raises as `request`. The requests must be few and short: nothing is read before all are sent.
        Close the generator when leaving early.
        """
        if len(bodies) == 1:
            yield self._post(target, bodies[0])
            return
        together = b"".join([self._encode("POST", target, b"", body) for body in bodies])
        connection, head, answer = self._exchange(together)
        arrived = connection.arrived
        done = 0
        try:
            while head.status < 400:
                done += 1
                if done == len(bodies):
                    self._give(connection)
                yield answer, arrived
                if done == len(bodies):
                    return
                began_s = time.perf_counter()
                head = connection.head()
                answer = connection.body(head)
                waited().answered(began_s, is_whole=head.content_length is not None)
            raise failure_of(head.status, answer)
        except OSError as error:
            if isinstance(error, TimeoutError) and not is_lost(error):
                raise self._unavailable(error) from error
        finally:
            if done < len(bodies):
                connection.close()
        for body in bodies[done:]:
            yield self._post(target, body)

    def _post(self, target: str, body: bytes) -> Answered:
        head, answer, arrived = self._ask(self._encode("POST", target, b"", body))
        if head.status >= 400:
            raise failure_of(head.status, answer)
        return answer, arrived

    def _ask(self, request: bytes) -> tuple[ResponseHead, bytes | bytearray, list[Descriptor]]:
        connection, head, answer = self._exchange(request)
        arrived = connection.arrived
        self._give(connection)
        return head, answer, arrived

    def _encode(self, method: str, target: str, headers: bytes, body: bytes | None) -> bytes:
        lines = f"{method} {target} HTTP/1.1\r\n".encode("ascii") + self._headers + headers
        if body is not None:
            lines += b"Content-Length: %d\r\n" % len(body)
        return lines + b"\r\n" + (body or b"")

    def _exchange(
        self, request: bytes, *, has_body: bool = True
    ) -> tuple[Connection, ResponseHead, bytes | bytearray]:
        """Send it and read one response; once more if the connection fails."""
        failed = 0
        while True:
            connection = None
            try:
                connection = self._take()
                began_s = time.perf_counter()
                connection.send(request, self._timeout_s)
                head = connection.head()
                body = connection.body(head, has_any=has_body)
                waited().answered(began_s, is_whole=not has_body or head.content_length is not None)
                return connection, head, body
            except OSError as error:
                was_used = connection is not None and connection.was_used
                if connection is not None:
                    connection.close()
                if was_used and is_lost(error):
                    # On the way, while it was kept, and so are those that went the same way; the server may be well.
                    self.close()
                    continue
                # A kept connection that the server has closed meanwhile is no failure of the server.
                failed += 0 if was_used and not isinstance(error, TimeoutError) else 1
                if failed >= _TRIES and isinstance(error, BrokenOff):
                    raise ShortBody(
                        f"{self.endpoint.url} broke off its answer, and again: its origin failed meanwhile, or the "
                        "object was overwritten; read it once more"
                    ) from error
                if failed >= _TRIES or isinstance(error, TimeoutError):
                    raise self._unavailable(error) from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise

    def close(self) -> None:
        """Close the pooled connections. It may be used again."""
        with self._lock:
            pool, self._pool = self._pool, deque()
        for connection in pool:
            connection.close()

    def __del__(self) -> None:
        for connection in getattr(self, "_pool", ()):
            connection.close()

    def __reduce__(self) -> tuple[Callable[..., Transport], tuple[object, ...]]:
        return _again, (
            self.endpoint.url,
            self._token,
            self._timeout_s,
            self.takes_descriptors,
            self._given_tls,
        )

    def _take(self) -> Connection:
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            if self._pool:
                return self._pool.pop()
        return self._new_connection()

    def _new_connection(self) -> Connection:
        sock = self.endpoint.connect(self._timeout_s, self._tls)
        return Connection(sock, takes_descriptors=self.takes_descriptors)

    def _give(self, connection: Connection) -> None:
        connection.arrived = []  # who asked has the others
        if not connection.is_reusable:
            connection.close()
            return
        with self._lock:
            self._pool.append(connection)

    def _after_fork(self) -> None:
        """The parent's sockets are closed here, which the parent does not notice; its lock may be held."""
        self._lock = threading.Lock()
        pool, self._pool = self._pool, deque()
        self._pid = os.getpid()
        for connection in pool:
            connection.close()

    def _unavailable(self, error: OSError) -> CacheUnavailable:
        what = (
            f"no answer within {self._timeout_s:g} s"
            if isinstance(error, TimeoutError) and not is_lost(error)
            else explained(error)
        )
        return CacheUnavailable(
            f"no cache server answers at {self.endpoint.url} ({what}); "
            "start one with `stoker cache serve`, or check the endpoint"
        )


def _again(
    endpoint: str, token: str | None, timeout_s: float, takes_descriptors: bool, tls: ClientTlsFiles | None
) -> Transport:
    return Transport(endpoint, token, timeout_s, takes_descriptors=takes_descriptors, tls=tls)
