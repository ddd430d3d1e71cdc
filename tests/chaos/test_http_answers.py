"""The fuzzer's judge sees what it is to see, and what it draws can be drawn again."""

from __future__ import annotations

import random

import pytest

from tests.chaos.http_answers import Judge, Reader, WrongAnswerError
from tests.chaos.http_shapes import CANARY, Expected, Shapes, Shot

CONTENTS = {'"3-1"': b"abc", '"9-1"': b"123456789"}
JUDGE = Judge(CONTENTS, canary=b"canary-bytes")
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nETag: "3-1"\r\n\r\nabc'
PART = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\nETag: "9-1"\r\nContent-Range: bytes 2-4/9\r\n\r\n345'
GONE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
BATCH = b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n\0\0\0\0\2ab\1\0\0\0\1c\1\0\0\0\0"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def strict(*expected: Expected) -> Shot:
    return Shot("a", [b""], expected, is_strict=True)


@pytest.mark.parametrize(
    ("shot", "data", "answers"),
    [
        (Shot("a", [b""]), b"", 0),
        (Shot("a", [b""]), OK + PART + GONE, 3),
        (strict(Expected(200, b"abc"), Expected(206, b"345"), Expected(404)), OK + PART + GONE + GONE, 4),
        (strict(Expected(200, b"abc")), CONTINUE + CHUNKED, 1),
        (strict(Expected(200, b"", is_head=True)), OK.removesuffix(b"abc"), 1),
        (Shot("a", [b""], ends="abort"), OK[:-1], 0),
        (strict(Expected(200, records=(b"abc", b""))), BATCH, 1),
    ],
)
def test_what_is_right_passes(shot: Shot, data: bytes, answers: int) -> None:
    assert JUDGE.check(shot, data) == answers


@pytest.mark.parametrize(
    ("shot", "data"),
    [
        (Shot("a", [b""]), OK.replace(b"abc", b"abd")),
        (Shot("a", [b""]), OK.replace(b"3-1", b"4-1")),
        (Shot("a", [b""]), PART.replace(b"345", b"346")),
        (Shot("a", [b""]), PART.replace(b"/9\r\n", b"/8\r\n")),
        (Shot("a", [b""]), OK + b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"),
        (Shot("a", [b""]), b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"),
        (Shot("a", [b""]), OK + b"x"),
        (Shot("a", [b""]), OK[:-1]),
        (Shot("a", [b""]), OK.replace(b"Content-Length: 3\r\n", b"")),
        (Shot("a", [b""]), OK.replace(b"ETag", b"Content-Length: 3\r\nETag")),
        (Shot("a", [b""]), b"nonsense\r\n\r\n"),
        (strict(Expected(200, b"abc")), GONE),
        (strict(Expected(200, b"abd")), OK),
        (strict(Expected(200, b"abc"), Expected(404)), OK),
        (strict(), OK),
        (strict(Expected(200, records=(b"abc",))), BATCH),
        (strict(Expected(200, records=(b"abc", b""))), BATCH.replace(b"ab", b"ac")),
        (strict(Expected(200, records=(b"abc", b""))), BATCH.replace(b"\1\0\0\0\0", b"\2\0\0\0\0")),
        (strict(Expected(200, records=(b"abc", b""))), BATCH.replace(b"\1\0\0\0\0", b"\1\0\0\0\1")),
        (strict(), GONE.replace(b"2\r\n\r\n{}", b"12\r\n\r\ncanary-bytes")),
    ],
)
def test_what_is_wrong_is_seen(shot: Shot, data: bytes) -> None:
    with pytest.raises(WrongAnswerError):
        JUDGE.check(shot, data)


def test_a_chunk_that_is_not_whole_is_no_answer_yet() -> None:
    for size in range(len(CHUNKED)):
        assert Reader(CHUNKED[:size]).answer() is None


def test_a_number_draws_the_same_shot_again_and_all_kinds_are_drawn() -> None:
    shapes = Shapes({"small": b"data", "mid": b"more data", CANARY: b"canary-bytes"}, "token")

    def drawn(number: int) -> Shot:
        return shapes.draw(random.Random(f"1/{number}"))

    shots = [drawn(number) for number in range(300)]
    assert shots == [drawn(number) for number in range(300)]
    assert {shot.name for shot in shots} == {"good", "mutated", "smuggled", "chunked", "halved", "spliced"}
    assert all(b"".join(shot.parts) for shot in shots)
