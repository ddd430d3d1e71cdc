"""The port between front and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from stoker._native import Piece
from stoker.cache.auth.principals import Principal
from stoker.cache.server.body import BodyParts
from stoker.cache.server.landing import Landing
from stoker.errors import ConfigError
from stoker.wire.cache_api import HOPS, HOPS_MAX, ORIGIN, SITES, SITES_MAX
from stoker.wire.cache_batch import DescriptorsWanted, ReadRequest


class Request:
    """A request that the front does not answer itself. Header names are in lower case; the values of one that was sent
    several times are separated by commas.

    `is_near`: it came by a Unix socket, by which descriptors can be passed. `parts`: a body that comes as it is asked
    for, instead of in `body`. `principal` UNPROVEN: who asks is still to be found out. `certificate`: the name in the
    one that the peer has shown, which was verified; empty: none. `peer`: the address of who is connected; empty: by
    a Unix socket.
    """

    __slots__ = (
        "body",
        "certificate",
        "headers",
        "is_near",
        "method",
        "parts",
        "peer",
        "principal",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        principal: Principal,
        is_near: bool = False,
        parts: BodyParts | None = None,
        certificate: str = "",
        peer: str = "",
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.principal = principal
        self.is_near = is_near
        self.parts = parts
        self.certificate = certificate
        self.peer = peer

    def header(self, name: bytes) -> str | None:
        """A header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def hops_of(request: Request) -> int:
    """How often a request was handed on from server to server."""
    return _count_of(request, HOPS, HOPS_MAX)


def sites_asked(request: Request) -> int:
    """How many fleets were asked, one by the other, before this one."""
    return _count_of(request, SITES, SITES_MAX)


def _count_of(request: Request, name: str, most: int) -> int:
    said = request.header(name.lower().encode()) or "0"
    is_number = len(said) < 4 and said.isascii() and said.isdigit()
    return min(int(said), most) if is_number else 0


def origin_of(request: Request) -> str | None:
    """What stands for the origin that another server has the bucket from."""
    return request.header(ORIGIN.lower().encode())


def is_refreshing(request: Request) -> bool:
    """Whether the reader wants to be sure that the origin was asked."""
    return "no-cache" in (request.header(b"cache-control") or "")


class WrongMethod(ConfigError):
    """A route is not asked so; `allowed` is what it may be asked with."""

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"{method} is not possible here: use {' or '.join(allowed)}")


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

    def charge(self, principal: Principal) -> None:
        """It is found out who asks: what follows goes on that account."""
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
