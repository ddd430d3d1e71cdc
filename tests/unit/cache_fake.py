"""A server for tests of what asks one: it answers as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from stoker.wire.cache_api import (
    BucketStatus,
    CacheStatus,
)
from stoker.wire.cache_errors import ERROR_CODES, ErrorBody

Answers = dict[tuple[str, str], Callable[[bytes], Any]]
"""By method and route (`evict` of `/-/evict/b?prefix=`); an ErrorBody is an error."""
BUCKET = BucketStatus("b", "/data/b", "lru", 500, 1, 0, 0, 0, 0, 0)
STATUS = CacheStatus("0", "ok", 10.0, 10_000, 500, 1, 0, 0, 0, 0, 0, [BUCKET])


class FakeServer:
    """Answers as it is told to, and remembers what it was asked."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                fake.asked.append((self.command, self.path))
                route = self.path.split("/")[2].split("?")[0]
                make = fake.answers.get((self.command, route))
                said = ErrorBody("not_found", f"there is no {route}") if make is None else make(body)
                failed = isinstance(said, ErrorBody)
                data = msgspec.json.encode(said) if failed else msgspec.msgpack.encode(said)
                self.send_response(ERROR_CODES[said.code].status if failed else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(ConnectionError):  # who asked has gone
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def faked(**answers: Any) -> Iterator[FakeServer]:
    """`GET_status=…` and so on: a value, or a function of the body."""
    made: Answers = {}
    for name, value in ({"GET_status": STATUS} | answers).items():
        method, _, route = name.partition("_")
        made[method, route] = value if callable(value) else lambda _, value=value: value
    server = FakeServer(made)
    try:
        yield server
    finally:
        server.stop()
