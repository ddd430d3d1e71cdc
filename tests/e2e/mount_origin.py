"""An S3 origin over real HTTP that can be held up: it takes requests, and answers none."""

from __future__ import annotations

import threading
from urllib.parse import parse_qs, unquote, urlsplit

from tests.chaos.storm_origin import StormOrigin, _Handler


class SlowOrigin(StormOrigin):
    """`asked`: keys, and prefixes with a slash, since it was last emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Slow
        self.asked: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def hold(self) -> None:
        self.goes_on.clear()

    def release(self) -> None:
        self.goes_on.set()


class _Slow(_Handler):
    server: SlowOrigin

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path.removeprefix("/bucket").lstrip("/"))
        self.server.asked.append(key or parse_qs(parts.query).get("prefix", [""])[0])
        self.server.goes_on.wait()
        super().do_GET()
