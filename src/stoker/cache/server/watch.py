"""Counts and times what the back answers, gives each request its id, and writes the access log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from stoker.base.exposition import Histogram
from stoker.cache.server.client_address import FORWARDED, ClientAddresses
from stoker.cache.server.inquiry import REQUEST_ID, TRACE_PARENT, Ids, Inquiry, Spans, ids_of, set_current
from stoker.cache.server.port import Request
from stoker.wire.cache_api import LINK_PREFIX, OWN_PREFIX

log = logging.getLogger("stoker.cache")
access_log = logging.getLogger("stoker.cache.access")
OWN, OBJECT, S3, BLOB = "own", "object", "s3", "blob"
DIALECTS = (OWN, OBJECT, S3, BLOB)
METHODS = frozenset(("GET", "HEAD", "PUT", "POST", "DELETE"))
OTHER = "other"
"""What stands for any other method: clients must not be able to make figures."""
GONE = 499
"""The status of requests whose client left before there was an answer."""
FAILED = 500
REFUSED = (401, 403)
_QUIET = frozenset((b"/-/health", b"/-/ready", b"/-/metrics"))
_OWN_PREFIX = OWN_PREFIX.encode()
_BLOB_PREFIX = b"/blob/"
_REQUEST_ID, _TRACE_PARENT = REQUEST_ID.encode(), TRACE_PARENT.encode()


class Watching:
    """A context manager, which costs less than one that is a generator: there is one for each request."""

    __slots__ = ("_inquiry", "_request", "_span", "_watch")

    def __init__(self, watch: Watch, request: Request, inquiry: Inquiry) -> None:
        self._watch = watch
        self._request = request
        self._inquiry = inquiry
        self._span: AbstractContextManager[None] | None = None

    def __enter__(self) -> Inquiry:
        inquiry = self._inquiry
        set_current(inquiry)
        if inquiry.spans is not None:
            attributes = {
                "stoker.request_id": inquiry.request_id,
                "http.request.method": inquiry.method,
                "url.path": _path_of(self._request),
            }
            self._span = inquiry.spans.request(inquiry.trace_parent, attributes)
            self._span.__enter__()
        return inquiry

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.end(self._inquiry, self._request, error)
        if self._span is not None and self._inquiry.spans is not None:
            self._inquiry.spans.answered(self._inquiry.dialect, self._inquiry.status)
            self._span.__exit__(kind, error, trace)


class Watch:
    """Lives on one event loop."""

    def __init__(
        self,
        now: Callable[[], float],
        spans: Spans | None = None,
        *,
        logs_access: bool = False,
        audit: Callable[[Inquiry, Request, str, str], None] | None = None,
        clients: ClientAddresses | None = None,
    ) -> None:
        self._now = now
        self._spans = spans
        self._logs_access = logs_access
        self._audit = audit
        self._clients = clients or ClientAddresses()
        self._ids = Ids()
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By dialect, method and status."""
        self.of_principals: Counter[str] = Counter()
        """Requests by the name of who asked."""
        self.refused_of_principals: Counter[str] = Counter()
        """Those of them for which there was no right."""
        self.seconds = {dialect: Histogram() for dialect in DIALECTS}
        self.miss_seconds = Histogram()

    def watching(self, request: Request) -> Watching:
        """While a request is answered; this task works for it from now on."""
        return Watching(self, request, self._begun(request))

    def begin_answer(self, inquiry: Inquiry, status: int) -> tuple[tuple[str, str], ...]:
        """An answer begins; with which headers beside its own."""
        inquiry.status = status
        inquiry.first_byte_s = self._now() - inquiry.began
        return ((REQUEST_ID, inquiry.request_id),)

    def _begun(self, request: Request) -> Inquiry:
        request_id, parent = ids_of(request.header(_REQUEST_ID), request.header(_TRACE_PARENT), self._ids)
        dialect = OBJECT
        if request.target.startswith(_OWN_PREFIX):
            dialect = OWN
        elif request.target.startswith(_BLOB_PREFIX):
            dialect = BLOB
        return Inquiry(request_id, parent, dialect, request.method, self._now(), self._spans)

    def end(self, inquiry: Inquiry, request: Request, error: BaseException | None) -> None:
        """An answer is over, in whatever way."""
        is_defect = isinstance(error, Exception) and not isinstance(error, ConnectionError)
        if is_defect:
            log.error("a request failed by a defect", exc_info=error)
        if not inquiry.status:
            inquiry.status = FAILED if is_defect else GONE
            inquiry.first_byte_s = self._now() - inquiry.began
        elif inquiry.status < 400:
            self.seconds[inquiry.dialect].add(inquiry.first_byte_s)
            if inquiry.has_missed:
                self.miss_seconds.add(inquiry.first_byte_s)
        method = inquiry.method if inquiry.method in METHODS else OTHER
        self.requests[inquiry.dialect, method, inquiry.status] += 1
        self.of_principals[request.principal.name] += 1
        if inquiry.status in REFUSED:
            self.refused_of_principals[request.principal.name] += 1
        if self._logs_access and request.target not in _QUIET:
            self._log(inquiry, request, error)
        if self._audit is not None:
            self._audit(inquiry, request, _path_of(request), self._client(request))
        inquiry.is_over = True

    def _log(self, inquiry: Inquiry, request: Request, error: BaseException | None) -> None:
        fields = {
            "method": inquiry.method,
            "path": _path_of(request),
            "dialect": inquiry.dialect,
            "client": self._client(request),
            "principal": request.principal.name,
            "status": inquiry.status,
            "has_missed": inquiry.has_missed,
            "first_byte_s": round(inquiry.first_byte_s, 6),
            "seconds": round(self._now() - inquiry.began, 6),
            "is_whole": error is None,
        }
        access_log.info("%s %s %d", inquiry.method, fields["path"], inquiry.status, extra={"fields": fields})

    def _client(self, request: Request) -> str:
        return self._clients.of(request.peer, request.header(FORWARDED))


def _path_of(request: Request) -> str:
    """Without its query: that may hold a signature, which opens what it was made for; so does the proof of a link."""
    path = request.target.partition(b"?")[0].decode("ascii", "backslashreplace")
    if not path.startswith(LINK_PREFIX):
        return path
    return f"{LINK_PREFIX}…/{path[len(LINK_PREFIX) :].partition('/')[2]}"
