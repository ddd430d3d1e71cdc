"""The OpenAPI document: valid, complete, and true."""

from __future__ import annotations

import json
from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator

from stoker.job.control.openapi import describe, document
from stoker.job.control.routes import ROUTES
from stoker.wire import control, control_errors


def test_it_is_valid_openapi() -> None:
    OpenAPIV31SpecValidator(json.loads(document())).validate()


def test_it_has_every_route_with_its_errors_and_security() -> None:
    paths = json.loads(document())["paths"]
    said = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert said == {(route.method, route.path) for route in ROUTES}
    assert paths["/v1/healthz"]["get"]["security"] == []
    scale = paths["/v1/scale"]["post"]
    assert set(scale["responses"]) == {"202", "400", "401", "409", "411", "413", "500", "503"}
    assert scale["requestBody"]["required"]
    assert not paths["/v1/stop"]["post"]["requestBody"]["required"], "all its fields have defaults"
    events = paths["/v1/events"]["get"]
    assert {p["name"]: p["schema"]["type"] for p in events["parameters"]} == {
        "after": "integer", "limit": "integer", "wait_s": "number", "follow": "boolean",
    }  # fmt: skip
    assert control.NDJSON in events["responses"]["200"]["content"]


def test_every_field_says_what_it_is_unless_its_name_does() -> None:
    schemas: dict[str, Any] = describe()["components"]["schemas"]
    assert schemas["JobStatus"]["properties"]["nodes_target"]["description"].startswith("How many nodes")
    assert schemas["NodeStatus"]["properties"]["state"]["enum"] == sorted(
        ["checking", "standby", "active", "away", "leaving", "cordoned"]
    )
    assert schemas["ErrorBody"]["properties"]["mend"]["description"] == "What to do about it."
    assert all(schema.get("description") for schema in schemas.values())


def test_every_error_has_a_status_and_a_class() -> None:
    used = {code for route in ROUTES for code in route.errors}
    assert used <= set(control_errors.ERRORS)
    for code, entry in control_errors.ERRORS.items():
        body = control_errors.ErrorBody(code, "what", "mend")
        raised = control_errors.error_of(body)
        assert type(raised) is entry.error
        assert str(raised) == "what: mend"
    assert str(control_errors.error_of(control_errors.ErrorBody("new in 2031", "what"))) == "what"
