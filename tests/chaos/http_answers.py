"""Reads what a cache server sends back as strictly as a distrustful client would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stoker.wire.cache_batch import FRAME, FRAME_DATA, FRAME_LAST
from stoker.wire.http import REASONS
from tests.chaos.http_shapes import Expected, Shot

STATUSES = frozenset(REASONS) - {500, 502, 504}
"""What may be answered while the origin is well; 503 is only for one connection too many, which these are not."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class WrongAnswerError(Exception):
    """What came is not what may come."""


class Reader:
    """Takes answers off the bytes of one connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bytes:
        return self._data[self._at :]

    def answer(self, *, is_head: bool = False) -> Answer | None:
        """The next one; None if there is none or it is not whole. Raises WrongAnswerError."""
        begin = self._at
        end = self._data.find(b"\r\n\r\n", begin)
        if end < 0:
            return None
        first, *lines = self._data[begin:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if version != "HTTP/1.1" or not rest[:3].isdigit():
            raise WrongAnswerError(f"no status line: {first[:100]!r}")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(": ")
            if not colon or name.lower() in headers:
                raise WrongAnswerError(f"a header that is none, or there twice: {line[:100]!r}")
            headers[name.lower()] = value
        self._at = end + 4
        body = b"" if is_head or rest[:3] in ("100", "204") else self._body(headers)
        if body is None:
            self._at = begin
            return None
        return Answer(int(rest[:3]), headers, body)

    def _body(self, headers: dict[str, str]) -> bytes | None:
        if headers.get("transfer-encoding") == "chunked" and "content-length" not in headers:
            return self._chunks()
        size = headers.get("content-length", "")
        if not size.isdigit() or "transfer-encoding" in headers:
            raise WrongAnswerError(f"nobody can tell where the body ends: {headers}")
        if len(self._data) - self._at < int(size):
            return None
        self._at += int(size)
        return self._data[self._at - int(size) : self._at]

    def _chunks(self) -> bytes | None:
        body = bytearray()
        while (end := self._data.find(b"\r\n", self._at)) >= 0:
            size = int(self._data[self._at : end], 16)
            chunk = self._data[end + 2 : end + 2 + size + 2]
            if len(chunk) < size + 2:
                return None
            if chunk[-2:] != b"\r\n":
                raise WrongAnswerError("a chunk of another size than it said")
            self._at = end + 2 + size + 2
            if size == 0:
                return bytes(body)
            body += chunk[:-2]
        return None


class Judge:
    """`contents`: of each entity tag, the object's bytes. No two objects have the same tag."""

    def __init__(self, contents: Mapping[str, bytes], canary: bytes) -> None:
        self._contents = contents
        self._canary = canary

    def check(self, shot: Shot, data: bytes) -> int:
        """How many answers there are in what came back. Raises WrongAnswerError."""
        if shot.is_strict and self._canary in data:
            raise WrongAnswerError("what was no request was answered")
        reader = Reader(data)
        answers = 0
        for expected in shot.expected:
            found = self._next(reader, is_head=expected.is_head)
            self._compare(found, expected)
            answers += 1
        while (found := self._next(reader)) is not None:
            if shot.is_strict and found.status < 400:
                raise WrongAnswerError(f"an answer to what was no request: {found.status} {found.headers}")
            answers += 1
        if reader.left and shot.ends == "shut":
            raise WrongAnswerError(f"an answer that is not whole: {reader.left[:300]!r}")
        return answers

    def _next(self, reader: Reader, *, is_head: bool = False) -> Answer | None:
        found = reader.answer(is_head=is_head)
        while found is not None and found.status == 100:
            found = reader.answer(is_head=is_head)
        if found is not None:
            self._examine(found, is_head=is_head)
        return found

    def _examine(self, found: Answer, *, is_head: bool) -> None:
        if found.status not in STATUSES or found.status == 503:
            raise WrongAnswerError(f"{found.status}: {found.body[:300]!r}")
        tag = found.headers.get("etag")
        if tag is None or found.status not in (200, 206) or is_head:
            return
        whole = self._contents.get(tag)
        if whole is None:
            raise WrongAnswerError(f"an object that is none: {found.headers}")
        start, stop = 0, len(whole)
        if found.status == 206:
            span, _, total = found.headers["content-range"].removeprefix("bytes ").partition("/")
            start, stop = int(span.partition("-")[0]), int(span.partition("-")[2]) + 1
            if int(total) != len(whole):
                raise WrongAnswerError(f"an object of another size: {found.headers}")
        if found.body != whole[start:stop]:
            raise WrongAnswerError(f"other bytes than those of {tag} [{start}, {stop})")

    def _compare(self, found: Answer | None, expected: Expected) -> None:
        if found is None:
            raise WrongAnswerError(f"no whole answer, where {expected.status} is right")
        if found.status != expected.status:
            raise WrongAnswerError(f"{found.status} {found.body[:200]!r}, where {expected.status} is right")
        if expected.body is not None and found.body != expected.body:
            raise WrongAnswerError(f"other bytes than those that were asked for, with {found.status}")
        if expected.records is not None and records_of(found.body) != expected.records:
            raise WrongAnswerError("a batch with other records than those that were asked for")


def records_of(body: bytes) -> tuple[bytes, ...]:
    """The records in a batch's answer. Raises WrongAnswerError if a frame is not whole, or tells of an error."""
    found, record, at = [], b"", 0
    while at < len(body):
        kind, size = FRAME.unpack_from(body.ljust(at + FRAME.size), at)
        at += FRAME.size + size
        if kind not in (FRAME_DATA, FRAME_LAST) or at > len(body):
            raise WrongAnswerError(f"a frame of kind {kind} that ends at {at} of {len(body)}")
        record += body[at - size : at]
        if kind == FRAME_LAST:
            found.append(record)
            record = b""
    return tuple(found)
