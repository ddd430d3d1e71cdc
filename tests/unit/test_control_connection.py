"""HTTP/1.1 on the master's port, over real sockets: what a good client gets, and what a bad one cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import re
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.job.control.connection import Limits, serve_connection
from stoker.job.control.router import ControlRouter
from stoker.wire.control import (
    JobEvent,
)
from stoker.wire.control_errors import ErrorBody
from stoker.wire.stream import open_stream
from tests.unit.control_fake import TOKEN, FakeJob, Served, served

BEARER = f"Authorization: Bearer {TOKEN}\r\n".encode()
STATUS = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + BEARER + b"\r\n"
HURRIED = Limits(first_s=0.3, idle_s=0.3, request_s=0.3, send_s=0.3)


def say(server: Served, data: bytes, *, hang_up: bool = True) -> bytes:
    """Send bytes, and read until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            said += data
    return said


def statuses(said: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", said)]


def error_in(said: bytes) -> ErrorBody:
    return msgspec.json.decode(said.partition(b"\r\n\r\n")[2], type=ErrorBody)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(FakeJob()) as server:
        yield server


def test_a_connection_is_kept_and_requests_are_answered_in_order(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    sockets = set()
    for path in ("/v1/status", "/v1/nothing", "/v1/shards", "/v1/healthz"):
        connection.request("GET", path, headers=headers)
        sockets.add(connection.sock)
        response = connection.getresponse()
        assert json.loads(response.read())
        assert response.status == (404 if path == "/v1/nothing" else 200)
    assert len(sockets) == 1
    connection.close()


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    ask = b"GET %s HTTP/1.1\r\n" + BEARER + b"\r\n"
    paths = [b"/v1/status", b"/v1/none", b"/v1/shards", b"/v1/scale", b"/v1/healthz"]
    assert statuses(say(server, b"".join(ask % path for path in paths))) == [200, 404, 200, 405, 200]


def test_http_1_0_and_connection_close_end_the_connection(server: Served) -> None:
    assert statuses(say(server, STATUS.replace(b"1.1", b"1.0") + STATUS, hang_up=False)) == [200]
    closing = STATUS.replace(b"Host: x", b"Connection: close")
    assert statuses(say(server, closing + STATUS, hang_up=False)) == [200]


def test_a_body_in_small_pieces_and_one_that_asks_first(server: Served) -> None:
    body = b'{"nodes": 2}'
    head = b"POST /v1/scale HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        for byte in head % (BEARER, b"", len(body)) + body:
            sock.sendall(bytes([byte]))
        sock.shutdown(socket.SHUT_WR)
        assert statuses(read_all(sock)) == [202]
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(head % (BEARER, b"Expect: 100-continue\r\n", len(body)))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        assert statuses(read_all(sock)) == [202]


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "bad_request"),
        (b"GET http://x/v1/status HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400, "bad_request"),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "bad_request"),
        (b"POST /v1/stop HTTP/1.1\r\nContent-Length: 9" + b"9" * 5000 + b"\r\n\r\n", 400, "bad_request"),
        (
            b"POST /v1/stop HTTP/1.1\r\n" + BEARER + b"Transfer-Encoding: chunked\r\n\r\n",
            411,
            "length_required",
        ),
        (b"POST /v1/stop HTTP/1.1\r\n" + BEARER + b"Content-Length: 65537\r\n\r\n", 413, "too_large"),
        (b"POST /v1/stop HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 401, "unauthorized"),
        (b"GET /v1/status HTTP/1.1\r\n" + b"X: y\r\n" * 4000 + b"\r\n", 431, "head_too_large"),
        (b"GET /" + b"x" * 200_000, 431, "head_too_large"),
        (b"GET /v1/stream HTTP/1.1\r\n\r\n", 401, "unauthorized"),
        (b"GET /v1/stream HTTP/1.1\r\n" + BEARER + b"\r\n", 426, "upgrade_required"),
    ],
)
def test_nonsense_is_told_so_and_the_connection_ends(
    server: Served, request_bytes: bytes, status: int, code: str
) -> None:
    said = say(server, request_bytes + STATUS, hang_up=False)
    assert statuses(said) == [status]
    assert error_in(said).error == code
    assert b"Connection: close" in said


def test_an_offer_to_upgrade_to_something_else_is_not_taken(server: Served) -> None:
    offer = STATUS.replace(
        b"Host: x", b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA"
    )
    assert statuses(say(server, offer + STATUS)) == [200, 200]


def test_the_agents_stream_is_handed_over_with_all_its_bytes(server: Served) -> None:
    async def story() -> bytes:
        reader, writer = await open_stream("127.0.0.1", server.port, TOKEN, timeout_s=20)
        writer.write(b"hello")
        said = await reader.read()
        writer.close()
        return said

    assert asyncio.run(story()) == b"frame"
    head, first = server.upgraded[-1]
    assert (head.method, head.path, first) == ("GET", "/v1/stream", b"hello")
    assert head.headers["authorization"] == f"Bearer {TOKEN}"
    eager = (
        b"GET /v1/stream HTTP/1.1\r\n"
        + BEARER
        + b"Upgrade: stoker-frames/1\r\nConnection: upgrade\r\n\r\neager"
    )
    assert say(server, eager).endswith(b"\r\n\r\nframe"), "bytes sent along with the head are not lost"
    assert server.upgraded[-1][1] == b"eager"


def test_followed_events_are_lines_until_the_job_ends() -> None:
    job = FakeJob()
    with served(job) as server:
        server.do(lambda: job.record("generation", "first", generation=1))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/x-ndjson"}
        connection.request("GET", "/v1/events", headers=headers)
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "application/x-ndjson"
        assert msgspec.json.decode(response.readline(), type=JobEvent).why == "first"
        server.do(lambda: job.record("world", "second"))
        assert msgspec.json.decode(response.readline(), type=JobEvent).why == "second"
        server.do(job.end)
        assert msgspec.json.decode(response.readline(), type=JobEvent).kind == "ended"
        assert response.read() == b""
        connection.request("GET", "/v1/events?follow=1&after=2", headers={"Authorization": f"Bearer {TOKEN}"})
        assert json.loads(connection.getresponse().read())["seq"] == 3, "the connection was kept"
        connection.close()
        old = b"GET /v1/events?follow=1 HTTP/1.0\r\n" + BEARER + b"\r\n"
        lines = say(server, old).partition(b"\r\n\r\n")[2].splitlines()
        assert len(lines) == 3, "HTTP/1.0 knows no chunks"


def test_slow_clients_are_let_go() -> None:
    with served(FakeJob(), limits=HURRIED) as server:
        assert say(server, b"", hang_up=False) == b""
        slow = say(server, b"GET /v1/st", hang_up=False)
        assert (statuses(slow), error_in(slow).error) == ([408], "slow_request")
        body = b"POST /v1/stop HTTP/1.1\r\n" + BEARER + b"Content-Length: 50\r\n\r\n{"
        assert statuses(say(server, body, hang_up=False)) == [408]
        assert statuses(say(server, STATUS, hang_up=False)) == [200], (
            "and a kept connection does not idle for ever"
        )


def test_a_reader_who_takes_nothing_is_let_go() -> None:
    job = FakeJob()
    for _ in range(3000):
        job.record("noise", "x" * 3000)
    with (
        served(job, limits=HURRIED) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as sock,
    ):
        sock.sendall(b"GET /v1/events?limit=10000 HTTP/1.1\r\n" + BEARER + b"\r\n")
        assert server.hung_up.wait(20)
        head, _, part = read_all(sock).partition(b"\r\n\r\n")
        announced = int(re.findall(rb"Content-Length: (\d+)", head)[0])
        assert 0 < len(part) < announced, "the rest never comes, and nobody waits for it"


METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"BREW", b"get", b""])
TARGETS = st.sampled_from(
    [b"/v1/status", b"/v1/events?after=1", b"/v1/scale", b"/v1/stop", b"/v1/nodes/%ff/leave", b"/v1/stacks",
     b"/v1/stream", b"*", b"//[", b"/%", b"/v1/events?wait_s=1e400", b"/v1/events?\xff"]
)  # fmt: skip
HEADERS = st.lists(
    st.sampled_from(
        [BEARER, b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: 70000\r\n", b"Connection: close\r\n",
         b"Transfer-Encoding: chunked\r\n", b"Upgrade: stoker-frames/1\r\nConnection: upgrade\r\n", b": \r\n",
         b"Expect: 100-continue\r\n", b"X\x00: 1\r\n", b"A: " + b"b" * 20_000 + b"\r\n"]
    ),
    max_size=5,
)  # fmt: skip
BODIES = st.sampled_from([b"", b"{}", b'{"nodes": 2}', b"hello", b"5\r\nhello\r\n0\r\n\r\n"]) | st.binary(
    max_size=30
)
REQUESTS = st.builds(
    lambda method, target, headers, body: (
        b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, target, b"".join(headers), body)
    ),
    METHODS,
    TARGETS,
    HEADERS,
    BODIES,
)


async def converse(parts: list[bytes]) -> tuple[bytes, FakeJob]:
    """One connection over a socket pair: all parts, then the end; what the server says before it hangs up."""
    job = FakeJob()
    router = ControlRouter(job, TOKEN)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    limits = Limits(first_s=5, idle_s=5, request_s=5, send_s=5)

    async def swallow(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        await reader.read()

    serving = asyncio.create_task(serve_connection(reader, writer, router, on_upgrade=swallow, limits=limits))
    client_reader, client_writer = await asyncio.open_connection(sock=ours)
    said = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            client_writer.write(part)
            await client_writer.drain()
            await asyncio.sleep(0)
        client_writer.write_eof()
    with contextlib.suppress(ConnectionError):
        said = await asyncio.wait_for(client_reader.read(), 20)
    client_writer.close()
    await asyncio.wait_for(serving, 20)
    return said, job


@given(st.lists(REQUESTS | st.binary(max_size=60), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_comes_is_answered_or_hung_up_on(messages: list[bytes], seed: int) -> None:
    data, rng = b"".join(messages), random.Random(seed)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    said, job = asyncio.run(
        converse([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    )
    assert not said or said.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in said
    if TOKEN.encode() not in data:
        assert not job.asked
        assert not {200, 202} & set(statuses(said)), "nothing is told or done without the token"


@given(st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_random_bytes(data: bytes) -> None:
    said, job = asyncio.run(converse([data]))
    assert statuses(said) in ([], [400], [431])
    assert not job.asked


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_flipped_bytes_in_a_good_request(data: st.DataObject) -> None:
    good = bytearray(
        b"POST /v1/scale HTTP/1.1\r\nHost: x\r\n" + BEARER + b'Content-Length: 12\r\n\r\n{"nodes": 3}'
    )
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    said, job = asyncio.run(converse([bytes(good)]))
    assert not {500} & set(statuses(said))
    assert len(job.asked) <= 1
