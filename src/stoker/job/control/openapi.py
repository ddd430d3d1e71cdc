"""The routes and message types as an OpenAPI 3.1 document, so that other languages can make clients of their own."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any

import msgspec

from stoker.base.version import VERSION
from stoker.job.control.routes import ROUTES, Route
from stoker.wire import control, control_errors
from stoker.wire.control import (
    JSON,
    NDJSON,
    JobEvent,
)
from stoker.wire.control_errors import ERRORS, ErrorBody

_REF = "#/components/schemas/{name}"
_EVERYWHERE = ("unauthorized", "environment", "failed")
_NAMES = {"node": "The node's id."}

Json = dict[str, Any]


@cache
def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(describe())


def describe() -> Json:
    """The document."""
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stoker job control",
            "version": VERSION,
            "description": "What the master of a training job answers on its port.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [
            {
                "url": "http://{host}:{port}",
                "variables": {"host": {"default": "127.0.0.1"}, "port": {"default": "29400"}},
            }
        ],
        "security": [{"jobToken": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "jobToken": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The job's token, which all its nodes share (STOKER_JOB_TOKEN).",
                }
            },
        },
    }


def _schemas() -> Json:
    kinds: list[Any] = [ErrorBody, JobEvent]
    for route in ROUTES:
        kinds += [
            kind for kind in (route.answer, route.body) if kind is not None and not isinstance(kind, str)
        ]
    _, components = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    told = _field_descriptions()
    for name, schema in components.items():
        _describe_fields(schema, told.get(name, {}))
    return components


def _operation(route: Route) -> Json:
    operation: Json = {
        "operationId": route.operation,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {
            str(route.status): {"description": route.summary, "content": _content(route)},
            **_errors(route),
        },
    }
    if route.is_open:
        operation["security"] = []
    if route.body is not None:
        operation["requestBody"] = {
            "required": bool(_required(route.body)),
            "content": {JSON: {"schema": _ref(route.body)}},
        }
    return operation


def _content(route: Route) -> Json:
    if route.answer == JSON:
        return {JSON: {"schema": {"type": "object"}}}
    if isinstance(route.answer, str):
        return {route.answer: {"schema": {"type": "string"}}}
    content = {JSON: {"schema": _ref(route.answer)}}
    if route.operation == "events":
        content[NDJSON] = {"schema": _ref(JobEvent)}
    return content


def _errors(route: Route) -> Json:
    codes = () if route.is_open else (*_EVERYWHERE, *route.errors)
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(ERRORS[code].status, []).append(code)
    return {
        str(status): {
            "description": f"error: {' or '.join(sorted(names))}",
            "content": {JSON: {"schema": _ref(ErrorBody)}},
        }
        for status, names in sorted(by_status.items())
    }


def _path_parameters(route: Route) -> list[Json]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    return [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string"}, "description": _NAMES[n]}
        for n in names
    ]


def _query_parameters(route: Route) -> list[Json]:
    if route.query is None:
        return []
    (_,), components = msgspec.json.schema_components([route.query], ref_template=_REF)
    told = _field_descriptions().get(route.query.__name__, {})
    schema = components[route.query.__name__]
    return [
        {"name": name, "in": "query", "required": False, "schema": kind, "description": told.get(name, name)}
        for name, kind in schema["properties"].items()
    ]


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind) if field.required]


def _describe_fields(schema: Json, told: dict[str, str]) -> None:
    for name, kind in schema.get("properties", {}).items():
        if name in told:
            kind["description"] = told[name]


@cache
def _field_descriptions() -> dict[str, dict[str, str]]:
    """The text under each field of each message, by type and field: said once, where the field is."""
    told: dict[str, dict[str, str]] = {}
    for module in (control, control_errors):
        try:
            tree = ast.parse(inspect.getsource(module))
        except (OSError, SyntaxError):
            continue  # installed without sources: the document says less
        told |= {kind.name: _texts_under(kind) for kind in tree.body if isinstance(kind, ast.ClassDef)}
    return told


def _texts_under(kind: ast.ClassDef) -> dict[str, str]:
    told = {}
    for field, text in zip(kind.body, kind.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            told[field.target.id] = " ".join(text.value.value.split())
    return told
