"""Uploads in parts to S3 while it is busy."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter

import pytest

from stoker.cache.origin import s3_uploads
from stoker.cache.origin.s3_writing import WritableS3Origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.errors import OriginBusy, WriteDenied
from stoker.testing.cache_origin_writable import MIB, body
from tests.unit.test_cache_s3_writes import DENIED, answer, length_of, run

BUSY = "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>"
ID = b"<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"
DONE = b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"


class Bucket:
    """A server of uploads. Of each part `fails` says how often it is refused first; None: the connection ends."""

    def __init__(self, fails: dict[int, list[tuple[str, bytes] | None]]) -> None:
        self.fails = fails
        self.parts: dict[int, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.whole = b""

    async def say(
        self, _: int, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if "100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        has_body = "content-length" in head.lower()
        data = await reader.readexactly(length_of(head)) if has_body else b""
        method, target = head.split(" ")[:2]
        number = re.search(r"partNumber=(\d+)", target)
        self.asked[method if number is None else f"part {number[1]}"] += 1
        if number is not None:
            fails = self.fails.get(int(number[1]), [])
            fault = fails.pop(0) if fails else ("200 OK", b"")
            if fault is None:
                writer.close()
                return
            if fault[0] == "200 OK":
                self.parts[int(number[1])] = data
            writer.write(answer(*fault, 'ETag: "e"\r\n'))
        elif method == "POST" and "uploads" in target:
            writer.write(answer("200 OK", ID))
        elif method == "POST":
            self.whole = b"".join(self.parts[number] for number in sorted(self.parts))
            writer.write(answer("200 OK", DONE))
        elif method == "HEAD":
            writer.write(f'HTTP/1.1 200 OK\r\nETag: "w"\r\nContent-Length: {len(self.whole)}\r\n'.encode())
            writer.write(b"Last-Modified: Mon, 02 Feb 2026 00:00:00 GMT\r\n\r\n")
        else:
            writer.write(answer("204 No Content", b""))


def upload(bucket: Bucket, data: bytes, monkeypatch: pytest.MonkeyPatch, *, says_length: bool) -> None:
    monkeypatch.setattr(s3_uploads, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(s3_uploads, "_KNOWN_PART_BYTES", 8 * MIB)

    async def story(origin: WritableOrigin) -> None:
        assert isinstance(origin, WritableS3Origin)
        origin._put_bytes_max = 8 * MIB
        pieces = [data[at : at + 700_000] for at in range(0, len(data), 700_000)]
        await origin.put("k", body(*pieces), len(data) if says_length else None)

    run(bucket.say, story)


@pytest.mark.parametrize("says_length", [False, True])
def test_a_part_is_put_again_while_s3_is_busy(says_length: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(20 * MIB)
    bucket = Bucket({1: [None], 2: [BUSY, BUSY, BUSY], 3: [BUSY, None]})
    upload(bucket, data, monkeypatch, says_length=says_length)
    assert bucket.whole == data
    parts = {name: count for name, count in bucket.asked.items() if name.startswith("part")}
    assert parts == {"part 1": 2, "part 2": 4, "part 3": 3}
    assert not bucket.asked["DELETE"]


@pytest.mark.parametrize(
    ("fault", "kind", "count"), [(BUSY, OriginBusy, 6), (("403 Forbidden", DENIED), WriteDenied, 1)]
)
def test_what_does_not_pass_ends_the_upload(
    fault: tuple[str, bytes], kind: type[Exception], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket({2: [fault] * 100})
    with pytest.raises(kind):
        upload(bucket, bytes(20 * MIB), monkeypatch, says_length=True)
    assert bucket.asked["part 2"] == count
    assert bucket.asked["DELETE"] == 1, "it is given up"
    assert not bucket.whole
