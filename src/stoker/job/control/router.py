"""Answers requests with a `JobControl`: token, route, arguments, call, typed answer or typed error."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from itertools import islice
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from stoker.errors import StokerError
from stoker.job.control import openapi, routes
from stoker.job.control.metrics import prometheus_text
from stoker.job.control.port import JobControl
from stoker.job.control.response import Refusal, Response, error_response, json_response
from stoker.job.control.routes import Route
from stoker.wire.control import (
    BODY_BYTES_MAX,
    NDJSON,
    PROMETHEUS,
    Advice,
    EventPage,
    EventsQuery,
    Health,
    LeaveRequest,
    ScaleRequest,
    ShardList,
    StackDump,
    StacksQuery,
    StopRequest,
)
from stoker.wire.control_errors import code_of

KEEPALIVE_S = 15.0
"""A followed stream of events says something at least this often, so that a reader who is gone is noticed."""
NAMES_SAID_MAX = 20
"""Node ids that an error names."""

_FIELD = re.compile(r" - at `\$\.?(?P<path>[^`]*)`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")

T = TypeVar("T", bound=msgspec.Struct)


class Call:
    """One request with its route, decoded as far as anybody asks."""

    def __init__(
        self, route: Route, names: dict[str, str], query: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self.route = route
        self.names = names
        self.headers = headers
        self._query = query
        self._body = body

    def query(self, kind: type[T]) -> T:
        """The query's parameters. Raises Refusal."""
        try:
            pairs = parse_qsl(self._query, keep_blank_values=True, max_num_fields=32, errors="strict")
        except ValueError as error:
            raise Refusal(
                "bad_request", f"the query cannot be read: {error}", "see /v1/openapi.json"
            ) from None
        given: dict[str, str] = {}
        for name, value in pairs:
            if name in given:
                raise Refusal("bad_request", f"{name!r} is given twice", "give it once", field=name)
            given[name] = value
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _bad(error, "query") from None

    def body(self, kind: type[T]) -> T:
        """The body. Raises Refusal."""
        try:
            return msgspec.json.decode(self._body or b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise _bad(error, "body") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal("bad_request", f"the body is not JSON: {error}", "send a JSON object") from None


Handler = Callable[[JobControl, Call], Awaitable[Response]]


class ControlRouter:
    """The control API of one job."""

    def __init__(self, control: JobControl, token: str) -> None:
        if not token:
            raise ValueError("a control API without a token would be open to everybody")
        self.control = control
        self._token = token.encode()
        self._handlers: dict[str, Handler] = {
            "status": _status,
            "events": _events,
            "scale": _scale,
            "stop": _stop,
            "leave_node": _leave_node,
            "stacks": _stacks,
            "shards": _shards,
            "advice": _advice,
            "metrics": _metrics,
        }

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the job's token; header names are in lower case. Takes the same time for every
        token of one length."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given_bytes, self._token)

    def unauthorized(self) -> Refusal:
        """What an unknown caller is told."""
        return Refusal(
            "unauthorized",
            "the job's token is missing or wrong",
            "send it as 'Authorization: Bearer TOKEN'; the nodes have it in STOKER_JOB_TOKEN or --job-token-file",
        )

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer one request; `headers` have names in lower case. Bad requests are answered, never raised."""
        try:
            return await self._handle(method, target, headers, body)
        except Refusal as refusal:
            return refusal.response
        except StokerError as error:
            return error_response(code_of(error), str(error))

    async def _handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        path, _, query = target.partition("?")
        match = routes.find(method, path)
        route = match.route
        if not (route is not None and route.is_open) and not self.is_authorized(headers):
            raise self.unauthorized()
        if route is None and match.allowed:
            allow = ", ".join(match.allowed)
            raise Refusal(
                "method_not_allowed", f"{path} has no {method}", f"use {allow}", headers=(("Allow", allow),)
            )
        if route is None:
            raise Refusal("not_found", f"there is no route {path}", routes.MEND_ROUTES)
        if len(body) > BODY_BYTES_MAX:
            raise too_large()
        if route.operation == "healthz":
            return json_response(Health(status="ok"))
        if route.operation == "openapi":
            return Response(200, openapi.document())
        if route.changes:
            _check_may_change(self.control)
        call = Call(route, match.names, query, body, headers)
        return await self._handlers[route.operation](self.control, call)


def too_large(bytes_max: int = BODY_BYTES_MAX) -> Refusal:
    """What the sender of a long body is told."""
    return Refusal("too_large", f"a request body has at most {bytes_max} bytes", "send less")


def _check_may_change(control: JobControl) -> None:
    outcome = control.outcome()
    if outcome is not None:
        raise Refusal("ended", f"the job has ended: {outcome.why}", "start it again with `stoker run`")


def _bad(error: msgspec.ValidationError, part: str) -> Refusal:
    """A 400 that names the field at fault."""
    text = str(error)
    inside = _FIELD.search(text)
    names = [inside["path"]] if inside is not None and inside["path"] else []
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    if named is not None:
        names.append(named["name"])
    field = ".".join(names)
    said = _FIELD.sub("", text).strip()
    message = f"{field}: {said}" if field and named is None else said
    return Refusal("bad_request", f"{message} (in the {part})", "see /v1/openapi.json", field=field)


async def _status(control: JobControl, _: Call) -> Response:
    return json_response(control.status())


async def _events(control: JobControl, call: Call) -> Response:
    query = call.query(EventsQuery)
    if query.follow or NDJSON in call.headers.get("accept", ""):
        return Response(200, content_type=NDJSON, stream=_follow(control, query))
    page = await _page(control, query.after, query.limit)
    if not page.events and not page.ended and query.wait_s > 0:
        await control.wait_for_events(query.after, query.wait_s)
        page = await _page(control, query.after, query.limit)
    return json_response(page)


async def _page(control: JobControl, after: int, limit: int) -> EventPage:
    # The end first: once it is there the last event is already in the log.
    has_ended = control.outcome() is not None
    events = tuple(await control.events(after, limit))
    last = events[-1].seq if events else after
    return EventPage(events=events, after=last, ended=has_ended and len(events) < limit)


async def _follow(control: JobControl, query: EventsQuery) -> AsyncGenerator[bytes, None]:
    after = query.after
    while True:
        page = await _page(control, after, query.limit)
        if page.events:
            yield b"".join(msgspec.json.encode(event) + b"\n" for event in page.events)
            after = page.after
        if page.ended:
            return
        if not page.events:
            await control.wait_for_events(after, KEEPALIVE_S)
            if not await control.events(after, 1):
                yield b"\n"


async def _scale(control: JobControl, call: Call) -> Response:
    return json_response(control.scale(call.body(ScaleRequest).nodes), 202)


async def _stop(control: JobControl, call: Call) -> Response:
    request = call.body(StopRequest)
    return json_response(control.stop(request.why, request.exit_code), 202)


async def _leave_node(control: JobControl, call: Call) -> Response:
    request, node = call.body(LeaveRequest), call.names["node"]
    here = control.node_names()
    if node not in here:
        raise Refusal("not_found", f"the job has no node {node!r}", f"it has {_some(here)}")
    return json_response(control.leave_node(node, request.why), 202)


def _some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    said = ", ".join(islice(names, NAMES_SAID_MAX)) or "none"
    more = len(names) - NAMES_SAID_MAX
    return f"{said} and {more} more" if more > 0 else said


async def _stacks(control: JobControl, call: Call) -> Response:
    workers = await control.stacks(call.query(StacksQuery).timeout_s)
    return json_response(StackDump(workers=tuple(workers)))


async def _shards(control: JobControl, _: Call) -> Response:
    return json_response(ShardList(shards=tuple(control.shards())))


async def _advice(control: JobControl, _: Call) -> Response:
    return json_response(Advice(advice=control.recommendation()))


async def _metrics(control: JobControl, _: Call) -> Response:
    return Response(200, prometheus_text(control.status()).encode(), PROMETHEUS)
