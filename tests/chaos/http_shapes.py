"""What a fuzzer sends to a cache server: good requests with known answers, and what becomes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from stoker.wire.cache_api import HeldQuery, LoadRequest
from stoker.wire.cache_batch import RANGE, DescriptorsWanted, ReadRequest

CANARY = "canary"
"""An object that is only ever asked for inside what is no request."""
MISSING_KEYS = 40

_HEADERS = (
    b"Range: bytes=0-0", b"Range: bytes=-7", b"Range: bytes=5-1,9-", b"Range: bytes=99999999999999999999-",
    b"If-None-Match: *", b'If-Match: "x%zz"', b"If-Range: W/", b"Expect: 100-continue", b"Connection: close",
    b"Connection: upgrade, keep-alive", b"Upgrade: websocket", b"Cache-Control: no-cache", b"Stoker-Hops: 1",
    b"Stoker-Hops: -1", b"Stoker-Hops: 99999999999999999999", b"Stoker-Hops: x", b"Accept: application/msgpack",
    b"Content-Length: 0", b"Content-Length: 18446744073709551616", b"Content-Length: 5", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity", b"X: " + b"x" * 3000, b"X:", b": x", b"X : y", b" folded: x", b"X: \xff\xfe",
    b"Host: a\x00b", b"Authorization: Bearer nobody", b"Authorization: Basic eDp5",
)  # fmt: skip
_BYTES = (
    b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b" ", b"%", b"%2f", b"%00", b"%2e%2e", b"../", b"//", b"?", b"#", b":",
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"GET", b"POST", b"0\r\n\r\n", b"-1", b"\r\n\r\n", b"99999999999999999999",
    b"\xe2\x80\xae", b"/-/", b"chunked", b"\t",
)  # fmt: skip


class Expected(NamedTuple):
    """The answer to a good request. `body`: None if any will do; `records`: those that a batch is to hold."""

    status: int
    body: bytes | None = None
    is_head: bool = False
    records: tuple[bytes, ...] | None = None


class Shot(NamedTuple):
    """What goes out on one connection, cut into `parts`, and the answers that must come first, in order.

    `ends`: `shut` (no more is sent, all is read), `leave` (some is read), `abort` (reset).
    `is_strict`: nothing else may be answered but by an error, and no CANARY may come.
    """

    name: str
    parts: Sequence[bytes]
    expected: Sequence[Expected] = ()
    ends: str = "shut"
    is_strict: bool = False


class Shapes:
    """Draws shots by chance. `objects` are in bucket `b`, with the canary; `token` opens all."""

    def __init__(self, objects: Mapping[str, bytes], token: str) -> None:
        self._objects = objects
        self._keys = [key for key in objects if key != CANARY]
        self._auth = f"Host: h\r\nAuthorization: Bearer {token}\r\n".encode()

    def draw(self, rng: random.Random) -> Shot:
        kinds: list[Callable[[random.Random], Shot]] = [
            self.good, self.mutated, self.mutated, self.mutated, self.smuggled, self.chunked, self.halved, self.spliced,
        ]  # fmt: skip
        return rng.choice(kinds)(rng)

    # -- kinds of shots -------------------------------------------------------------------------------------------

    def good(self, rng: random.Random) -> Shot:
        """Requests in a row, each of which is to be answered, cut anywhere."""
        chosen = [self._good_request(rng) for _ in range(rng.randint(1, 6))]
        sent = b"".join(request for request, _ in chosen)
        return Shot("good", cut(rng, sent), [expected for _, expected in chosen], is_strict=True)

    def mutated(self, rng: random.Random) -> Shot:
        """Good requests, and behind them one of which some bytes are others."""
        before = [self._good_request(rng) for _ in range(rng.choice([0, 0, 1, 3]))]
        harmed = self._any_request(rng)
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            harmed = mutate(rng, harmed)
        sent = b"".join(request for request, _ in before) + harmed
        ends = rng.choice(["shut", "shut", "leave", "abort"])
        return Shot("mutated", cut(rng, sent), [e for _, e in before] if ends == "shut" else (), ends)

    def spliced(self, rng: random.Random) -> Shot:
        """The begin of one request and the end of another, or bytes that are none."""
        one, other = self._any_request(rng), self._any_request(rng)
        sent = one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :]
        if rng.random() < 0.2:
            sent = rng.randbytes(rng.choice([1, 10, 1000, 50_000]))
        return Shot("spliced", cut(rng, sent), (), rng.choice(["shut", "shut", "abort"]))

    def halved(self, rng: random.Random) -> Shot:
        """A good request that ends in its midst, or whose answer nobody waits for."""
        request, _ = self._good_request(rng)
        if rng.random() < 0.5:
            request = request[: rng.randrange(len(request))]
        else:
            request *= rng.randint(1, 30)
        return Shot("halved", cut(rng, request), (), rng.choice(["leave", "abort", "abort"]))

    def chunked(self, rng: random.Random) -> Shot:
        """A batch whose body comes in chunks that are right."""
        body, expected = self._batch(rng)
        sent, at = bytearray(), 0
        while at < len(body):
            size = rng.randint(1, max(1, len(body)))
            chunk = body[at : at + size]
            extension = rng.choice([b"", b"", b";a=b", b' ; a="b c"'])
            sent += b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk)
            at += size
        trailer = rng.choice([b"", b"", b"X: y\r\n"])
        head = b"POST /-/read HTTP/1.1\r\n" + self._auth + b"Transfer-Encoding: chunked\r\n\r\n"
        whole = head + bytes(sent) + b"0\r\n" + trailer + b"\r\n"
        after, its_answer = self._good_request(rng)
        return Shot("chunked", cut(rng, whole + after), [expected, its_answer], is_strict=True)

    def smuggled(self, rng: random.Random) -> Shot:
        """A request whose end can be told in two ways, with another one inside. It must be refused, or be read as
        this server reads it, and what is inside must never be answered."""
        inside = b"GET /b/%b HTTP/1.1\r\n%b\r\n" % (CANARY.encode(), self._auth)
        before = [self._good_request(rng) for _ in range(rng.choice([0, 1, 2]))]
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inside), inside)
        head = b"POST /-/read HTTP/1.1\r\n" + self._auth
        length = b"Content-Length: %d\r\n"
        whole = rng.choice(
            [
                head + length % len(chunk) + b"Transfer-Encoding: chunked\r\n\r\n" + chunk,
                head + b"Transfer-Encoding: chunked\r\n" + length % 4 + b"\r\n" + chunk,
                head + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + chunk,
                head + b"Transfer-Encoding: identity, chunked\r\n\r\n" + chunk,
                head + b"Transfer-Encoding: xchunked\r\n\r\n" + chunk,
                head + b"Transfer-Encoding : chunked\r\n" + length % len(chunk) + b"\r\n" + chunk,
                head + b"Transfer-Encoding:\r\n chunked\r\n" + length % len(chunk) + b"\r\n" + chunk,
                head + length % 0 + length % len(inside) + b"\r\n" + inside,
                head + b"Content-Length: +0\r\n\r\n" + inside,
                head + b"Content-Length: 0x0\r\n\r\n" + inside,
                head + b"Content-Length: 0, %d\r\n\r\n" % len(inside) + inside,
                head + b"Content-Length:\r\n\r\n" + inside,
                head + length % len(inside) + b"\r\n" + inside,
                head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\n%b\n0\n\n" % (len(inside), inside),
                head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + inside,
                head + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + inside,
                b"GET /b/%b HTTP/1.1\n%b\n%b" % (quote(self._keys[0]).encode(), self._auth, inside),
                head + b"X: y\n" + b"Content-Length: 0\r\n\r\n" + inside,
                b"GET /b/small-0\rHost: x HTTP/1.1\r\n" + self._auth + b"\r\n" + inside,
            ]
        )  # fmt: skip
        sent = b"".join(request for request, _ in before) + whole
        return Shot("smuggled", cut(rng, sent), [e for _, e in before], is_strict=True)

    # -- requests -------------------------------------------------------------------------------------------------

    def _good_request(self, rng: random.Random) -> tuple[bytes, Expected]:
        what = rng.choice(["get", "get", "range", "head", "missing", "batch", "health", "list"])
        key = rng.choice(self._keys)
        data = self._objects[key]
        if what == "get":
            return self._request(b"GET", key), Expected(200, data)
        if what == "head":
            return self._request(b"HEAD", key), Expected(200, b"", is_head=True)
        if what == "range" and data:
            start = rng.randrange(len(data))
            stop = rng.randint(start + 1, len(data))
            asked = self._request(b"GET", key, b"Range: bytes=%d-%d\r\n" % (start, stop - 1))
            return asked, Expected(206, data[start:stop])
        if what == "missing":
            return self._request(b"GET", f"missing-{rng.randrange(MISSING_KEYS)}"), Expected(404)
        if what == "batch":
            body, expected = self._batch(rng)
            return self._post(b"/-/read", body), expected
        if what == "list":
            return b"GET /-/list/b?prefix=small&limit=3 HTTP/1.1\r\n" + self._auth + b"\r\n", Expected(200)
        return b"GET /-/health HTTP/1.1\r\n" + self._auth + b"\r\n", Expected(200, b'{"status":"ok"}')

    def _any_request(self, rng: random.Random) -> bytes:
        """One that is understood, of any kind; the start of all mutations."""
        encode = msgspec.msgpack.encode
        key = rng.choice(self._keys)
        known = [key, f"missing-{rng.randrange(MISSING_KEYS)}"]
        extra = b"".join(line + b"\r\n" for line in rng.sample(_HEADERS, rng.choice([0, 0, 1, 2])))
        wanted = DescriptorsWanted(1, 8, rng.randbytes(12))
        return rng.choice(
            [
                lambda: self._request(b"GET", key, extra),
                lambda: self._request(b"GET", key, b"Range: bytes=1-99\r\n" + extra),
                lambda: self._request(b"GET", f"missing-{rng.randrange(MISSING_KEYS)}", extra),
                lambda: self._post(b"/-/read", encode(ReadRequest("b", known * rng.choice([1, 20]))), extra),
                lambda: self._post(b"/-/read", encode(ReadRequest("b", known, wanted)), extra),
                lambda: self._post(b"/-/read", self._odd_ranges(rng, known), extra),
                lambda: self._post(b"/-/held/b", encode(HeldQuery([(key, "1-2", 0)])), extra),
                lambda: self._post(b"/-/fetch/b", encode(HeldQuery([(key, "1-2", 0)])), extra),
                lambda: self._post(b"/-/load/b", encode(LoadRequest(known, 1)), extra),
                lambda: self._post(b"/-/evict/b?prefix=small", b"", extra),
                lambda: self._post(b"/-/refresh/b?prefix=small", b"", extra),
                lambda: self._own(b"PUT /-/pin/b?prefix=mid", extra),
                lambda: self._own(b"DELETE /-/pin/b?prefix=mid", extra),
                lambda: self._own(b"GET /-/list/b?prefix=&after=mid&limit=5", extra),
                lambda: self._own(b"GET /-/stat/b/" + key.encode(), extra),
                lambda: self._own(b"GET /-/status", extra),
                lambda: self._own(b"GET /-/fleet", extra),
                lambda: self._post(b"/-/buckets/b", b'{"origin_url":"/not/there"}', extra, b"PUT"),
            ]
        )()  # fmt: skip

    def _batch(self, rng: random.Random) -> tuple[bytes, Expected]:
        keys = [rng.choice(self._keys) for _ in range(rng.choice([1, 2, 40]))]
        if rng.random() < 0.5:
            return self._ranges(rng, keys)
        records = tuple(self._objects[key] for key in keys)
        return msgspec.msgpack.encode(ReadRequest("b", keys)), Expected(200, records=records)

    def _ranges(self, rng: random.Random, keys: list[str]) -> tuple[bytes, Expected]:
        packed, records = [], []
        for _ in range(rng.choice([0, 1, 10, 200])):
            number = rng.randrange(len(keys))
            data = self._objects[keys[number]]
            start = rng.choice([0, rng.randrange(len(data) + 1), len(data) + rng.randrange(3), 2**64 - 1])
            stop = min(start + rng.choice([0, 1, 900, 9000, 70_000, 2**64]), 2**64 - 1)
            packed.append(RANGE.pack(number, start, stop))
            records.append(data[start:stop])
        body = msgspec.msgpack.encode(ReadRequest("b", keys, None, b"".join(packed)))
        return body, Expected(200, records=tuple(records))

    def _odd_ranges(self, rng: random.Random, known: list[str]) -> bytes:
        """Ranges of any numbers, some cut, with versions of any keys."""
        numbers = [0, 1, 2, 900, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1, rng.randrange(2_000_000)]
        packed = b"".join(
            RANGE.pack(rng.choice([0, 0, 1, 2, 2**32 - 1]), rng.choice(numbers), rng.choice(numbers))
            for _ in range(rng.choice([0, 1, 3, 50]))
        )
        packed = packed[: len(packed) - rng.choice([0, 0, 0, 7])]
        versions = rng.choice([[], ["", ""], ["1-2", ""], ["1-2"], ["\0" * 70_000, "x"]])
        wanted = rng.choice([None, DescriptorsWanted(1, 8, rng.randbytes(12))])
        return msgspec.msgpack.encode(ReadRequest("b", known, wanted, packed, versions))

    def _request(self, method: bytes, key: str, extra: bytes = b"") -> bytes:
        return b"%b /b/%b HTTP/1.1\r\n%b%b\r\n" % (method, quote(key).encode(), self._auth, extra)

    def _own(self, line: bytes, extra: bytes) -> bytes:
        return line + b" HTTP/1.1\r\n" + self._auth + extra + b"\r\n"

    def _post(self, target: bytes, body: bytes, extra: bytes = b"", method: bytes = b"POST") -> bytes:
        head = b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
        return head % (method, target, self._auth, extra, len(body)) + body


def mutate(rng: random.Random, data: bytes) -> bytes:
    """The same with one change somewhere."""
    at = rng.randrange(len(data) + 1)
    what = rng.choice(["flip", "set", "insert", "remove", "double", "word", "line"])
    if what == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if what == "set":
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if what == "remove":
        return data[:at] + data[at + rng.choice([1, 2, 10]) :]
    if what == "double":
        return data[:at] + data[at : at + rng.choice([1, 10, 100])] * rng.choice([2, 3, 50]) + data[at:]
    if what == "line":
        lines = data.split(b"\r\n")
        lines.insert(rng.randrange(len(lines)), rng.choice(_HEADERS))
        return b"\r\n".join(lines)
    return data[:at] + rng.choice(_BYTES) + data[at + rng.choice([0, 0, 1, 3]) :]


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in some parts, now and then byte by byte."""
    if rng.random() < 0.5 or len(data) < 2:
        return [data]
    if rng.random() < 0.1:
        return [data[n : n + 1] for n in range(min(200, len(data)))] + [data[200:]]
    places = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randint(1, 5)))})
    return [data[a:b] for a, b in pairwise(places)]
