"""Requests that come by a link: for whom they are answered, and how. What a link opens says `cache/auth/links.py`."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from types import MappingProxyType
from typing import cast

from stoker.base.clock import Clock
from stoker.cache.auth.access import Access
from stoker.cache.auth.links import is_clean, verify_link
from stoker.cache.auth.principals import Principal
from stoker.cache.auth.rules import READ, Rule, Rules
from stoker.cache.server.port import Answer, Request
from stoker.cache.store.attributes import CONTENT_TYPE
from stoker.errors import AccessDenied, ConfigError
from stoker.wire.cache_api import LINK_PREFIX
from stoker.wire.http import object_target, split_target

INDEX = "index.html"
"""What is shown of a folder, where it is there."""
_TYPES = MappingProxyType(
    {
        ".css": "text/css",
        ".htm": "text/html",
        ".html": "text/html",
        ".json": "application/json",
        ".txt": "text/plain",
        ".xml": "application/xml",
    }
)
"""Of contents whose type their origin does not know; programs that follow links go by it."""
_HEADERS = frozenset((b"range", b"if-range", b"if-match", b"if-none-match"))
"""All others say what only servers and those with a credential may, or (the host) mean another bucket elsewhere."""


class Links:
    """Of one server. Links that are good for longer than `age_max_s` are refused; 0: all are."""

    def __init__(self, access: Access, clock: Clock, age_max_s: float) -> None:
        self._access = access
        self._clock = clock
        self._age_max_s = age_max_s

    def is_for(self, request: Request) -> bool:
        """Whether a request came by a link."""
        return request.target.startswith(LINK_PREFIX.encode())

    def opened(self, request: Request, answer: Answer) -> tuple[Request, Answer]:
        """The same as a request of who made the link, who may read nothing but what is asked for; and where its answer
        goes. Raises AccessDenied, ConfigError."""
        if request.method not in ("GET", "HEAD"):
            raise ConfigError(f"{request.method} is not possible by a link: use GET or HEAD")
        path, _, _ = request.target[len(LINK_PREFIX) :].partition(b"?")
        proof, _, rest = path.partition(b"/")
        bucket, key, _ = split_target(b"/" + rest)
        grant, maker = verify_link(
            proof.decode("latin-1"), self._clock.wall(), self._age_max_s, self._access.link_maker
        )
        if not key or key.endswith("/"):
            key += INDEX
        if not is_clean(key) or not grant.covers(bucket, key):
            raise AccessDenied("this link opens something else")
        whole = maker.principal
        if not whole.may_read(bucket, key):
            raise AccessDenied(f"{whole.name}, who made this link, may not read that (any more)")
        # What is sent counts for who made the link.
        answer.charge(whole)
        only = Principal(whole.name, Rules([Rule(bucket, key, frozenset((READ,)))]))
        headers = {name: value for name, value in request.headers.items() if name in _HEADERS}
        asked = Request(
            request.method, object_target(bucket, key).encode(), headers, b"", only, request.is_near
        )
        return asked, cast(Answer, _LinkAnswer(answer, key))


class _LinkAnswer:
    """An answer with the type of its content, where only the name tells that."""

    def __init__(self, answer: Answer, key: str) -> None:
        self._answer = answer
        self._type = _TYPES.get(posixpath.splitext(key)[1].lower())

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        said = [
            (name, self._type if (name, value) == ("Content-Type", CONTENT_TYPE) and self._type else value)
            for name, value in headers
        ]
        # The proof stands in the page's address, which is nobody else's to know.
        self._answer.start(status, [*said, ("Referrer-Policy", "no-referrer")], length_bytes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._answer, name)
