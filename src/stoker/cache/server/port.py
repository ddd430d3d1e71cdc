"""The port between front and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from stoker.cache.auth.tokens import Principal
from stoker.cache.store.port import OpenFile
from stoker.cache.store.shelf import Held


class Request:
    """A request that the front does not answer itself. Header names are in lower case.

    `is_own_user`: it came from a process of this machine that runs as the server's user.
    """

    __slots__ = ("body", "headers", "is_own_user", "method", "principal", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        principal: Principal,
        is_own_user: bool = False,
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.principal = principal
        self.is_own_user = is_own_user

    def header(self, name: bytes) -> str | None:
        """A header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class Hit:
    """All that the front needs to answer a whole object of one block. `head` is the response's, complete."""

    __slots__ = ("data", "file", "head", "held", "size_bytes")

    def __init__(
        self, head: bytes, size_bytes: int, data: bytes, file: OpenFile | None, held: Held | None
    ) -> None:
        self.head = head
        self.size_bytes = size_bytes
        self.data = data
        self.file = file
        self.held = held


class Answer(Protocol):
    """Where the back writes a response. Writes never block; `drain` waits until the peer keeps up."""

    @property
    def has_started(self) -> bool:
        """Whether the head has gone out."""
        ...

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        """Write the head. Without a length the body is chunked."""
        ...

    def data(self, data: bytes) -> None:
        """Write a part of the body."""
        ...

    def file(self, file: OpenFile, offset: int, size_bytes: int, done: Callable[[], None]) -> None:
        """Write a part of the body from a file; `done` is called once the file is needed no more."""
        ...

    async def drain(self) -> None:
        """Wait until little is unsent. Raises ConnectionError if the peer is gone."""
        ...

    def finish(self) -> None:
        """The body is complete."""
        ...


class Back(Protocol):
    """What the front hands on to."""

    def look_up(self, bucket: str, key: str) -> Hit | None:
        """A hit that can be answered at once, counted as one; None for everything else."""
        ...

    def pin(self, hit: Hit) -> Callable[[], None]:
        """Keep the hit's file while it is sent; returns what undoes it."""
        ...

    async def answer(self, request: Request, answer: Answer) -> None:
        """Answer anything, errors too; an exception means that the connection must be dropped."""
        ...
