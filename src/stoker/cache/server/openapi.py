"""The server's own routes as an OpenAPI 3.1 document, so that other languages can make clients of their own. Pure."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from stoker.wire.cache_api import JSON, MSGPACK
from stoker.wire.cache_errors import ErrorBody
from stoker.wire.cache_routes import BLOB_ROUTES, BUCKET, OBJECT_ROUTES, ROUTES, Route
from stoker.wire.http import KEY_BYTES_MAX, REASONS

_REF = "#/components/schemas/{name}"
_UNKNOWN = 401
_NOT_MODIFIED = 304
_EVERYWHERE = (_UNKNOWN, 500)
_TOKEN = "token"

Json = dict[str, Any]


@cache
def document(version: str) -> bytes:
    """As JSON."""
    return msgspec.json.encode(describe(version))


def describe(version: str) -> Json:
    """`version`: the server's."""
    paths: dict[str, Json] = {}
    for route in (*ROUTES, *BLOB_ROUTES, *OBJECT_ROUTES):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stoker cache server",
            "version": version,
            "description": "What a cache server answers below /-/; blobs, whose keys are the bytes that stand in the "
            f"path; and objects, at /BUCKET/KEY. Messages are JSON, or MessagePack where `Accept` is {MSGPACK}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{_TOKEN: []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {_TOKEN: {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> Json:
    kinds = [
        kind
        for route in (*ROUTES, *OBJECT_ROUTES)
        for kind in (route.answer, route.body)
        if _is_message(kind)
    ]
    _, components = msgspec.json.schema_components(
        list(dict.fromkeys([ErrorBody, *kinds])), ref_template=_REF
    )
    return components


def _operation(route: Route) -> Json:
    refusals = route.refusals if route.is_open else (*_EVERYWHERE, *route.refusals)
    operation: Json = {
        "operationId": route.operation,
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": {
            **{str(status): _answered(route, status) for status in route.statuses},
            **{
                str(status): _response(
                    REASONS[status], ErrorBody if route.method != "HEAD" else None, (JSON,)
                )
                for status in sorted(refusals)
            },
        },
    }
    if route.is_open:
        operation["security"] = []
    if route.body is not None:
        schema = _ref(route.body) if _is_message(route.body) else {"type": "string", "format": "binary"}
        content = {kind: {"schema": schema} for kind in route.takes}
        operation["requestBody"] = {"required": _is_message(route.body), "content": content}
    return operation


def _answered(route: Route, status: int) -> Json:
    has_content = status != _NOT_MODIFIED
    said = route.summary if status < 300 or _is_message(route.answer) else REASONS[status]
    return _response(said, route.answer if has_content else None)


def _response(text: str, answer: Any, kinds: tuple[str, ...] = (JSON, MSGPACK)) -> Json:
    said: Json = {"description": text}
    if _is_message(answer):
        said["content"] = {kind: {"schema": _ref(answer)} for kind in kinds}
    elif answer == JSON:
        said["content"] = {JSON: {"schema": {"type": "object"}}}
    elif answer is not None:
        said["content"] = {answer: {"schema": {"type": "string"}}}
    return said


def _parameters(route: Route) -> list[Json]:
    found: list[Json] = []
    if BUCKET in route.below:
        found.append(
            _parameter("bucket", "path", "The bucket's name.", {"type": "string", "minLength": 1}, True)
        )
    if "{key}" in route.below:
        schema = {"type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX}
        found.append(_parameter("key", "path", "The object's key, with its slashes.", schema, True))
    found += [
        _parameter(one.name, "query", one.text, dict(one.schema), one.is_required) for one in route.query
    ]
    return found


def _parameter(name: str, where: str, text: str, schema: Json, is_required: bool) -> Json:
    return {"name": name, "in": where, "description": text, "required": is_required, "schema": schema}


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type)


def _ref(kind: Any) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}
