"""Requests over pooled keep-alive connections, safe between threads and across forks."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

from stoker.cache.client.connection import BrokenOff, Connection, Endpoint
from stoker.cache.client.descriptors import Descriptor
from stoker.cache.client.waited import waited
from stoker.errors import CacheUnavailable, ConfigError, ShortBody
from stoker.wire.cache_api import MSGPACK, failure_of
from stoker.wire.http import ResponseHead

_TRIES = 2

Answered = tuple[bytes | bytearray, list[Descriptor]]
"""A body, and the descriptors that have come so far."""


class Transport:
    """Asks one server; connects when first used. A pickled copy has connections of its own.

    `takes_descriptors`: at a Unix socket, those that the server passes are taken, for `post_all`.
    """

    def __init__(
        self, endpoint: str, token: str | None, timeout_s: float, *, takes_descriptors: bool = False
    ) -> None:
        self.endpoint = Endpoint(endpoint)
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
        except TimeoutError as error:
            raise self._unavailable(error) from error
        except OSError:
            pass
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

    def _exchange(self, request: bytes) -> tuple[Connection, ResponseHead, bytes | bytearray]:
        """Send it and read one response; once more if the connection fails."""
        failed = 0
        while True:
            connection = None
            try:
                connection = self._take()
                began_s = time.perf_counter()
                connection.send(request, self._timeout_s)
                head = connection.head()
                body = connection.body(head)
                waited().answered(began_s, is_whole=head.content_length is not None)
                return connection, head, body
            except OSError as error:
                was_used = connection is not None and connection.was_used
                if connection is not None:
                    connection.close()
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

    def __reduce__(self) -> tuple[Callable[..., Transport], tuple[str, str | None, float, bool]]:
        return _again, (self.endpoint.url, self._token, self._timeout_s, self.takes_descriptors)

    def _take(self) -> Connection:
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            if self._pool:
                return self._pool.pop()
        sock = self.endpoint.connect(self._timeout_s)
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
        what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return CacheUnavailable(
            f"no cache server answers at {self.endpoint.url} ({what}); "
            "start one with `stoker cache serve`, or check the endpoint"
        )


def _again(endpoint: str, token: str | None, timeout_s: float, takes_descriptors: bool) -> Transport:
    return Transport(endpoint, token, timeout_s, takes_descriptors=takes_descriptors)
