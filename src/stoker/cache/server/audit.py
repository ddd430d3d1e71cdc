"""Who wrote, removed or administered what, and who was refused: a line of JSON for each, in a file of its own."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import Any

from stoker.cache.server.inquiry import Inquiry
from stoker.cache.server.logs import JsonLine
from stoker.cache.server.port import Request, hops_of
from stoker.cache.server.watch import REFUSED
from stoker.errors import ConfigError
from stoker.wire.cache_api import OWN_PREFIX

_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_ROUTES = frozenset((b"evict", b"pin", b"buckets", b"refresh"))
"""Stoker's own routes that change something for others."""
KEYS_MAX = 1000


class Audit:
    """Writes to a file, which may be moved away: it is made anew. What cannot be written holds up nobody; `problem`
    says so. Raises ConfigError where the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        self._log = logging.Logger("stoker.cache.audit", logging.INFO)
        try:
            handler = _Handler(self, path)
        except OSError as error:
            raise ConfigError(f"--audit-log {path}: {error}") from error
        handler.setFormatter(JsonLine())
        self._log.addHandler(handler)

    def take(self, inquiry: Inquiry, request: Request, path: str, client: str) -> None:
        """A request that was answered, `path` as it may be logged, and the address from which it came."""
        if not is_audited(request, inquiry.status):
            return
        fields: dict[str, Any] = {
            "principal": request.principal.name,
            "client": client,
            "method": inquiry.method,
            "path": path,
            "dialect": inquiry.dialect,
            "status": inquiry.status,
        }
        if inquiry.keys:
            fields["keys"] = inquiry.keys[:KEYS_MAX]
            fields["key_count"] = len(inquiry.keys)
        did = "was refused" if inquiry.status in REFUSED else "did" if inquiry.status < 400 else "tried"
        line = "%s %s %s %s", request.principal.name, did, inquiry.method, path
        self._log.info(*line, extra={"fields": fields})

    def close(self) -> None:
        """Nothing more is written."""
        for handler in self._log.handlers:
            handler.close()


class _Handler(logging.handlers.WatchedFileHandler):
    def __init__(self, audit: Audit, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._audit = audit

    def emit(self, record: logging.LogRecord) -> None:
        self._audit.problem = None
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  it is logging's
        self._audit.problem = f"the audit log {self.baseFilename} cannot be written: lines are lost"


def is_audited(request: Request, status: int) -> bool:
    """Whether it was refused, or changed something for others. What servers of a fleet ask of each other was written
    down where it was asked first."""
    if hops_of(request) and request.principal.is_unrestricted:
        return False
    if status in REFUSED:
        return True
    if request.method in _READING:
        return False
    if not request.target.startswith(OWN_PREFIX.encode()):
        return True
    route = request.target.removeprefix(OWN_PREFIX.encode()).partition(b"/")[0].partition(b"?")[0]
    return route in _ROUTES
