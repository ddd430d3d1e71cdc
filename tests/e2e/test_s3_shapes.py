"""Requests that two readers could take for different ones, and bodies that nobody wants, at a running server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.e2e.cache_helpers import ServerProcess, fill, served

pytestmark = pytest.mark.real
TOKEN = "token-of-the-test"
AUTH = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
HOST = b"Host: h\r\n"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("shapes")
    fill(folder / "o", ["k"], 1000)
    options = ("--token", TOKEN, "--key", "AKIDKEY:secret-of-key:data")
    with served(folder / "d", {"data": str(folder / "o")}, *options) as server:
        yield server


def sent(server: ServerProcess, data: bytes) -> bytes:
    """All that is answered to what is sent on one connection, until the server ends it."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while data := link.recv(65536):
            answer += data
        return answer


GET = b"GET /data/k HTTP/1.1\r\n" + HOST + AUTH
PUT = b"PUT /data/k HTTP/1.1\r\n" + HOST + AUTH


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /data/k HTTP/1.1\r\n" + AUTH + b"\r\n",
        GET + b"Host: h\r\n\r\n",
        GET + b"Host: other\r\n\r\n",
        GET + b" Host: folded\r\n\r\n",
        GET + b"X: a\r\n folded\r\n\r\n",
        GET + b"X: a\r\n\tfolded\r\n\r\n",
        GET + b"X : a\r\n\r\n",
        GET + b"X\t: a\r\n\r\n",
        GET + b"X: a\nY: b\r\n\r\n",
        GET + b"X: a\rY: b\r\n\r\n",
        GET + b"X: a\x00b\r\n\r\n",
        GET + b": a\r\n\r\n",
        GET + b"X\r\n\r\n",
        PUT + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
        PUT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        PUT + b"Content-Length: 1,1\r\n\r\nx",
        PUT + b"Content-Length: +1\r\n\r\nx",
        PUT + b"Content-Length: 0x1\r\n\r\nx",
        PUT + b"Content-Length: 1 1\r\n\r\nx",
        PUT + b"Content-Length: \xb2\r\n\r\nx",
        PUT + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        PUT + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        PUT.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET.replace(b"1.1", b"1.2") + b"\r\n",
        GET.replace(b"1.1", b"2.0") + b"\r\n",
        GET.replace(b" HTTP/1.1", b"") + b"\r\n",
        GET.replace(b"GET ", b"GET\t") + b"\r\n",
        GET.replace(b"\r\n", b"\n") + b"\n\r\n\r\n",
    ],
)
def test_what_could_be_understood_in_two_ways_is_not_understood(
    server: ServerProcess, request_bytes: bytes
) -> None:
    """It is refused as a whole, and what follows is no request: it may be a part of it."""
    answer = sent(server, request_bytes + GET + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert b"Connection: close\r\n" in answer


def test_lines_before_a_request_and_old_versions_are_understood(server: ServerProcess) -> None:
    for request in (
        b"\r\n" + GET,
        GET.replace(b"1.1", b"1.0"),
        GET.replace(b"1.1", b"1.0").replace(HOST, b""),
    ):
        assert sent(server, request + b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_an_answer_without_a_body_says_no_length_that_it_has_not(server: ServerProcess) -> None:
    whole = sent(server, GET + b"\r\n")
    (etag,) = [line for line in whole.split(b"\r\n") if line.startswith(b"ETag: ")]
    same = GET + b"If-None-Match: " + etag.removeprefix(b"ETag: ") + b"\r\n"
    for request in (same, same + b"x-amz-date: none\r\n"):
        answer = sent(server, request + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 304 ")
        assert b"Content-Length" not in answer
        assert answer.endswith(b"\r\n\r\n")
        # The next request on the connection is answered.
        assert sent(server, request + b"\r\n" + GET + b"\r\n").count(b"HTTP/1.1 ") == 2


def test_who_asks_beyond_the_end_is_told_where_it_is(server: ServerProcess) -> None:
    for more in (b"", b"x-amz-date: none\r\n"):
        answer = sent(server, GET + more + b"Range: bytes=1000-\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 416 ")
        assert b"Content-Range: bytes */1000\r\n" in answer


@pytest.mark.parametrize(
    ("line", "fields", "is_s3"),
    [
        (b"GET /data/k", b"", False),
        (b"GET /data/k", b"Authorization: Bearer wrong\r\nx-amz-date: x\r\n", False),
        (b"GET /-/status", b"x-amz-date: x\r\n", False),
        (b"GET /blob/b/k", b"x-amz-date: x\r\n", False),
        (b"GET /data/k", b"x-amz-checksum-mode: ENABLED\r\n", True),
        (b"GET /data/k", b"amz-sdk-request: attempt=1\r\n", True),
        (b"GET /data?list-type=2", b"", True),
        (b"GET /", b"", True),
        (b"PUT /data/k", b"Content-Length: 1\r\n", True),
        (b"DELETE /data/k", b"", True),
    ],
)
def test_who_shows_nothing_is_refused_in_the_words_of_its_dialect(
    server: ServerProcess, line: bytes, fields: bytes, is_s3: bool
) -> None:
    body = b"x" if b"Content-Length" in fields else b""
    answer = sent(server, line + b" HTTP/1.1\r\n" + HOST + fields + b"\r\n" + body)
    if is_s3:
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"<Error><Code>AccessDenied</Code>" in answer
    else:
        assert answer.startswith(b"HTTP/1.1 401 ")
    # Nor is who has asked so taken for somebody then.
    again = line + b" HTTP/1.1\r\n" + HOST + fields.replace(b"Content-Length: 1\r\n", b"") + b"\r\n"
    answer = sent(server, again + b"GET /data/k HTTP/1.1\r\n" + HOST + b"\r\n")
    assert b" 200 " not in answer


def test_who_sends_a_body_that_is_not_wanted_reads_why(server: ServerProcess) -> None:
    """Large enough to fill all buffers on the way, and sent before anything is read."""
    for key, status, why in ((AUTH, b"403", b"read_only"), (b"", b"403", b"<Code>AccessDenied</Code>")):
        head = b"PUT /data/new HTTP/1.1\r\n" + HOST + key + b"Content-Length: %d\r\n\r\n" % (40 * MIB)
        answer = sent(server, head + bytes(40 * MIB))
        assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
        assert why in answer
        assert b"Connection: close\r\n" in answer


def test_who_goes_on_sending_for_a_while_is_not_cut_off(server: ServerProcess) -> None:
    for _ in range(20):
        longest_s, answer = goes_on_sending(server)
        if longest_s < 0.9:
            break
    assert answer.startswith(b"HTTP/1.1 403 ")


def goes_on_sending(server: ServerProcess) -> tuple[float, bytes]:
    """The longest pause, in seconds, of a second in which one may be cut off; and what is answered."""
    parts, longest_s = urlsplit(server.url), 0.0
    with socket.create_connection((parts.hostname or "", parts.port or 0), 60) as link:
        link.sendall(b"PUT /data/new HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % MIB)
        sent = time.monotonic()
        try:
            for _ in range(8):
                time.sleep(0.3)
                link.sendall(bytes(1000))
                longest_s, sent = max(longest_s, time.monotonic() - sent), time.monotonic()
            return longest_s, link.recv(65536)
        except ConnectionError as error:
            return max(longest_s, time.monotonic() - sent), repr(error).encode()
