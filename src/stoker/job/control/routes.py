"""The routes of the control API as data: the router and the OpenAPI document read the same table."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from stoker.wire import control as messages

MEND_ROUTES = "GET /v1/openapi.json lists what there is"


class Route(NamedTuple):
    """One operation: what it takes, what it answers, and how it may fail."""

    method: str
    path: str
    operation: str
    summary: str
    answer: type[msgspec.Struct] | str
    """The type of its JSON, or the content type of something else."""
    status: int = 200
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    is_open: bool = False
    """It needs no token."""
    changes: bool = False
    """It changes the job, and so is refused once the job has ended."""
    errors: tuple[str, ...] = ()
    """Codes beside those that every route may answer with."""


_CHANGES = ("bad_request", "ended", "length_required", "too_large")

ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/status", "status", "The job at a glance", messages.JobStatus),
    Route(
        "GET",
        "/v1/events",
        "events",
        "What was decided, and why; waits for newer events, or streams them",
        messages.EventPage,
        query=messages.EventsQuery,
        errors=("bad_request",),
    ),
    Route(
        "POST",
        "/v1/scale",
        "scale",
        "Have another number of nodes",
        messages.Accepted,
        status=202,
        body=messages.ScaleRequest,
        changes=True,
        errors=_CHANGES,
    ),
    Route(
        "POST",
        "/v1/stop",
        "stop",
        "End the job now",
        messages.Accepted,
        status=202,
        body=messages.StopRequest,
        changes=True,
        errors=_CHANGES,
    ),
    Route(
        "POST",
        "/v1/nodes/{node}/leave",
        "leave_node",
        "Have a node leave at an agreed commit",
        messages.Accepted,
        status=202,
        body=messages.LeaveRequest,
        changes=True,
        errors=("not_found", *_CHANGES),
    ),
    Route(
        "GET",
        "/v1/stacks",
        "stacks",
        "What every rank does right now",
        messages.StackDump,
        query=messages.StacksQuery,
        errors=("bad_request", "timeout"),
    ),
    Route(
        "GET",
        "/v1/shards",
        "shards",
        "How far the dynamic shards have come",
        messages.ShardList,
    ),
    Route(
        "GET",
        "/v1/advice",
        "advice",
        "How many nodes the job should have",
        messages.Advice,
    ),
    Route(
        "GET",
        "/v1/metrics",
        "metrics",
        "Figures for Prometheus",
        messages.PROMETHEUS,
    ),
    Route(
        "GET",
        "/v1/healthz",
        "healthz",
        "Whether the master's process serves",
        messages.Health,
        is_open=True,
    ),
    Route(
        "GET",
        "/v1/openapi.json",
        "openapi",
        "These routes as OpenAPI 3.1",
        messages.JSON,
    ),
)


class Match(NamedTuple):
    """The route of a request, with the names in its path; or the methods that its path has."""

    route: Route | None
    names: dict[str, str]
    allowed: tuple[str, ...]


def find(method: str, path: str) -> Match:
    """The route for a method and a path that is still percent-encoded."""
    allowed = []
    for route in ROUTES:
        names = _names(route.path, path)
        if names is None:
            continue
        if route.method == method:
            return Match(route, names, (method,))
        allowed.append(route.method)
    return Match(None, {}, tuple(allowed))


def _names(template: str, path: str) -> dict[str, str] | None:
    wanted, given = template.split("/"), path.split("/")
    if len(wanted) != len(given):
        return None
    names = {}
    for want, have in zip(wanted, given, strict=True):
        if want.startswith("{"):
            names[want[1:-1]] = unquote(have, errors="replace")
        elif want != have:
            return None
    return names
