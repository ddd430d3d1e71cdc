"""The port between front and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from stoker._native import Piece
from stoker.cache.auth.tokens import Principal
from stoker.cache.server.body import BodyParts
from stoker.cache.server.landing import Landing
from stoker.wire.cache_api import HOPS, HOPS_MAX, ORIGIN
from stoker.wire.cache_batch import DescriptorsWanted, ReadRequest


class Request:
    """A request that the front does not answer itself. Header names are in lower case; the values of one that was sent
    several times are separated by commas.

    `is_near`: it came by a Unix socket, by which descriptors can be passed. `parts`: a body that comes as it is asked
    for, instead of in `body`. `principal` UNPROVEN: who asks is still to be found out.
    """

    __slots__ = ("body", "headers", "is_near", "method", "parts", "principal", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        principal: Principal,
        is_near: bool = False,
        parts: BodyParts | None = None,
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.principal = principal
        self.is_near = is_near
        self.parts = parts

    def header(self, name: bytes) -> str | None:
        """A header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def hops_of(request: Request) -> int:
    """How often a request was handed on from server to server."""
    said = request.header(HOPS.lower().encode()) or "0"
    is_number = len(said) < 4 and said.isascii() and said.isdigit()
    return min(int(said), HOPS_MAX) if is_number else 0


def origin_of(request: Request) -> str | None:
    """What stands for the origin that another server has the bucket from."""
    return request.header(ORIGIN.lower().encode())


def is_refreshing(request: Request) -> bool:
    """Whether the reader wants to be sure that the origin was asked."""
    return "no-cache" in (request.header(b"cache-control") or "")


class BatchHit(NamedTuple):
    """A batch that was answered at once. `large`: containers of large objects whose place was named."""

    size_bytes: int
    places: int
    large: Sequence[int]


class Answer(Protocol):
    """Where the back writes a response. Writes never block; `drain` waits until the peer keeps up."""

    @property
    def has_started(self) -> bool:
        """Whether the head has gone out."""
        ...

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        """Write the head. Without a length the body is chunked."""
        ...

    def data(self, data: bytes | bytearray | memoryview) -> None:
        """Write a part of the body that is no content: limits of how fast that may go out do not hold for it."""
        ...

    def piece(self, piece: Piece, start: int, stop: int, before: bytes = b"") -> bool:
        """Write `before`, and bytes `[start, stop)` of a held piece, which was looked up since the last `await`. False,
        and nothing is written, if its file is not there."""
        ...

    def landing(self, landing: Landing, start: int, stop: int, before: bytes = b"") -> None:
        """Write `before`, and bytes `[start, stop)` of a block, as they come. Where they never do, the answer cannot be
        ended."""
        ...

    def batch(
        self, request: ReadRequest, rule: tuple[int, float, int], wanted: DescriptorsWanted | None
    ) -> BatchHit | None:
        """The whole answer, if all that is asked for is here; `rule`: the bucket's number, its ttl in seconds, and when
        the origin must have been asked at the earliest. None, and nothing is written, otherwise."""
        ...

    def pass_descriptor(self, piece: Piece) -> bool:
        """Pass a descriptor of a piece's container, of which the peer may read everything, and write the frame that
        says so. False, and nothing is written, if there is none to pass."""
        ...

    @property
    def instance(self) -> bytes:
        """Of the server's run: what readers say of their descriptors begins with it."""
        ...

    async def drain(self) -> None:
        """Wait until little is unsent. Raises ConnectionError if the peer is gone."""
        ...

    def finish(self) -> None:
        """The body is complete."""
        ...
