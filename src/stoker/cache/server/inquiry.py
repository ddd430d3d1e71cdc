"""The request that a task of the back works on: its id, which follows it to other servers, and what came of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import count
from secrets import token_hex
from typing import Protocol

REQUEST_ID = "x-request-id"
TRACE_PARENT = "traceparent"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=+-]{0,127}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class Spans(Protocol):
    """Where requests and their parts are told of: see `tracing.py`."""

    def request(
        self, parent: str | None, attributes: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[None]:
        """A request while it is answered; `parent`: the header `traceparent` that came with it."""
        ...

    def answered(self, dialect: str, status: int) -> None:
        """How the request ends that is answered."""
        ...

    def part(self, name: str, attributes: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """A part of the request that is answered."""
        ...

    def trace_parent(self) -> str | None:
        """The header `traceparent` of what this task asks of another server."""
        ...


class Inquiry:
    """One request. `began`: when the back took it; `first_byte_s`: so long after that its answer began, which it has
    with `status`. `keys`: what it is about, where its target does not say so."""

    __slots__ = (
        "began",
        "dialect",
        "first_byte_s",
        "has_missed",
        "is_over",
        "keys",
        "method",
        "request_id",
        "spans",
        "status",
        "trace_parent",
    )

    def __init__(
        self,
        request_id: str,
        trace_parent: str | None,
        dialect: str,
        method: str,
        began: float,
        spans: Spans | None,
    ) -> None:
        self.request_id = request_id
        self.trace_parent = trace_parent
        self.dialect = dialect
        self.method = method
        self.began = began
        self.spans = spans
        self.first_byte_s = 0.0
        self.status = 0
        self.has_missed = False
        self.is_over = False
        self.keys: list[str] = []

    def headers(self) -> str:
        """What another server is told of it."""
        parent = self.trace_parent if self.spans is None else self.spans.trace_parent()
        return f"{REQUEST_ID}: {self.request_id}\r\n" + (f"{TRACE_PARENT}: {parent}\r\n" if parent else "")


_current: ContextVar[Inquiry | None] = ContextVar("stoker_inquiry", default=None)


def set_current(inquiry: Inquiry) -> None:
    """This task, and those that it begins, work for that request."""
    _current.set(inquiry)


def current() -> Inquiry | None:
    """The request that this task works for; None where it is over, or there is none."""
    inquiry = _current.get()
    return None if inquiry is None or inquiry.is_over else inquiry


def speaks(dialect: str) -> None:
    """It was found out in which dialect the request is."""
    inquiry = current()
    if inquiry is not None:
        inquiry.dialect = dialect


def has_missed() -> None:
    """Something that the request wanted was not here."""
    inquiry = current()
    if inquiry is not None:
        inquiry.has_missed = True


def is_about(keys: Iterable[str]) -> None:
    """These keys are in its body."""
    inquiry = current()
    if inquiry is not None:
        inquiry.keys.extend(keys)


def current_id() -> str:
    """Its id; empty where there is none."""
    inquiry = current()
    return "" if inquiry is None else inquiry.request_id


def peer_headers() -> str:
    """Header lines by which another server works for the same request."""
    inquiry = current()
    return "" if inquiry is None else inquiry.headers()


@contextlib.contextmanager
def part_of_request(name: str, **attributes: str) -> Iterator[None]:
    """A part of the request that this task works for, which is told of where traces are."""
    inquiry = current()
    if inquiry is None or inquiry.spans is None:
        yield
        return
    with inquiry.spans.part(name, attributes):
        yield


class Ids:
    """Makes ids: 32 hexadecimal digits, the first half of which stands for this run of the server."""

    def __init__(self) -> None:
        self._run = token_hex(8)
        self._count = count(1)

    def next(self) -> str:
        return f"{self._run}{next(self._count):016x}"


def ids_of(request_id: str | None, trace_parent: str | None, ids: Ids) -> tuple[str, str | None]:
    """A request's id, and the trace that it is of: what came with it as far as that is valid, else an id of its own."""
    if request_id is None and trace_parent is None:
        return ids.next(), None
    found = None if trace_parent is None else _TRACE_PARENT.fullmatch(trace_parent.strip())
    if found is not None and (found[1] == _NO_TRACE or found[2] == _NO_SPAN or found[0].startswith("ff")):
        found = None
    if request_id is not None and _ID.fullmatch(request_id.strip()):
        chosen = request_id.strip()
    else:
        chosen = found[1] if found is not None else ids.next()
    return chosen, None if found is None else found[0]
