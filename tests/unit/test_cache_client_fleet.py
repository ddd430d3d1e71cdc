"""Which servers a client of a fleet is connected to, as members come and go."""

from __future__ import annotations

import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from stoker.cache.client.fleet import FleetClient
from stoker.wire.cache_api import FleetMember, FleetStatus

WAIT_S = 60.0


class SlowServer:
    """Answers one request with a number, once it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.is_asked = threading.Event()
        self.is_left = threading.Event()
        """The connection was closed at its other end."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._socket, self._socket.accept()[0] as connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            self.is_asked.set()
            assert self.may_answer.wait(WAIT_S)
            body = msgspec.msgpack.encode(7)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if not connection.recv(1):
                self.is_left.set()


def test_who_is_no_member_any_more_is_left_once_its_calls_have_ended() -> None:
    gone, given = SlowServer(), "http://127.0.0.1:9"
    both = [FleetMember("a", given), FleetMember("b", gone.url)]
    with FleetClient([given]) as client, ThreadPoolExecutor(1) as threads:
        client._take(FleetStatus("a", both), given)
        client._lost(given)
        client._lost(gone.url)
        answer = threads.submit(lambda: client._at(gone.url).call("GET", "/-/status", int))
        assert gone.is_asked.wait(WAIT_S)
        client._take(FleetStatus("a", both), given)
        assert gone.url in client._clients, "it is a member"
        client._take(FleetStatus("a", both[:1]), given)
        assert (list(client._clients), list(client._down)) == ([], [given])
        assert not gone.is_left.is_set()
        gone.may_answer.set()
        assert answer.result(WAIT_S) == 7
        gc.collect()
        assert gone.is_left.wait(WAIT_S)
