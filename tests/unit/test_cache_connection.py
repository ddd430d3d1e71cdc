"""The client's side of one connection: answers that are whole, and answers that are broken off."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from stoker.cache.client.connection import BrokenOff, Connection
from stoker.errors import WireError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"5\r\nhello\r\n10\r\n, and 16 at most\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    mine.settimeout(20)
    connection = Connection(mine)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_an_answer_in_chunks_is_read_whole(pair: tuple[Connection, socket.socket]) -> None:
    connection, server = pair
    server.sendall(WHOLE + SIZED)
    assert connection.body(connection.head()) == b"hello, and 16 at most"
    assert connection.is_reusable
    assert connection.body(connection.head()) == b"hello"


@pytest.mark.parametrize("answer", [WHOLE, SIZED])
def test_wherever_a_body_ends_too_early_it_is_broken_off(answer: bytes) -> None:
    begins = answer.index(b"\r\n\r\n") + 4
    for end in range(begins, len(answer)):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.settimeout(20)
            connection = Connection(mine)
            theirs.sendall(answer[:end])
            theirs.close()
            head = connection.head()
            with pytest.raises(BrokenOff):
                connection.body(head)
            assert not connection.is_reusable


@pytest.mark.parametrize("answer", [HEAD, HEAD + b"5\r\nhel", SIZED[:-2]])
def test_a_connection_that_is_reset_in_a_body_is_broken_off(
    pair: tuple[Connection, socket.socket], answer: bytes
) -> None:
    connection, server = pair
    server.sendall(answer)
    head = connection.head()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    with pytest.raises(BrokenOff):
        connection.body(head)


def test_without_a_head_nothing_had_begun(pair: tuple[Connection, socket.socket]) -> None:
    connection, server = pair
    server.sendall(HEAD[:-2])
    server.close()
    with pytest.raises(ConnectionResetError) as caught:
        connection.head()
    assert not isinstance(caught.value, BrokenOff)


@pytest.mark.parametrize("chunk", [b"x\r\nhello\r\n", b"5\r\nhello world\r\n", b"-1\r\nhello\r\n"])
def test_chunks_that_are_none_are_no_answer(pair: tuple[Connection, socket.socket], chunk: bytes) -> None:
    connection, server = pair
    server.sendall(HEAD + chunk)
    head = connection.head()
    with pytest.raises(WireError):
        connection.body(head)


def test_a_chunk_whose_size_does_not_end_is_not_gathered(pair: tuple[Connection, socket.socket]) -> None:
    connection, server = pair
    server.sendall(HEAD + b"1" * 200_000)
    with pytest.raises(WireError, match="a chunk without a size"):
        connection.body(connection.head())
