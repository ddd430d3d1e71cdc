"""What the server says of its own routes (OpenAPI) holds, whatever is sent to them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from stoker.wire.cache_api import MSGPACK
from stoker.wire.cache_routes import BLOB_ROUTES, METHODS, OBJECT_ROUTES, ROUTES
from tests.e2e.cache_helpers import ServerProcess, fill, served
from tests.e2e.test_cache_watch import ask

pytestmark = pytest.mark.real

OPERATOR, READER = "operator-token", "reader-token"
CONFIG = """
[parameters]
bucket = "data"
key = "a/1"
[[operations]]
include-path = "/blob/{bucket}/{key}"
parameters = { bucket = "pushed", key = "a/1" }
"""
BLOBS = ("--blob-bucket", "pushed=100KB")
NOT_CHECKED = "positive_data_acceptance"
"""That all is taken that fits the schema: names, sizes and URLs are looked at by more rules than JSON Schema has."""
REFUSED_AS_S3 = "write_object|remove_object"
"""Who shows nothing at all may be a client of S3: `test_object_writes.py`."""
BODIES_ONLY_MSGPACK = "/-/read"


def document(server: ServerProcess) -> dict[str, dict[str, dict[str, object]]]:
    said = ask(f"{server.url}/-/openapi.json", OPERATOR)
    assert (said.status, said.headers["content-type"]) == (200, "application/json")
    found: dict[str, dict[str, dict[str, object]]] = json.loads(said.body)
    return found


def test_the_document_is_openapi_and_has_every_route_that_there_is(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["a/1"])
    with served(tmp_path / "c", {"data": str(tmp_path / "o")}, "--token", OPERATOR, *BLOBS) as server:
        said = document(server)
        OpenAPIV31SpecValidator(said).validate()
        assert {(method.upper(), path) for path, methods in said["paths"].items() for method in methods} == {
            (route.method, route.path) for route in (*ROUTES, *BLOB_ROUTES, *OBJECT_ROUTES)
        }
        for route in ROUTES:
            path = route.path.format(bucket="data", key="a/1")
            answer = ask(f"{server.url}{path}", OPERATOR, route.method)
            assert answer.status != 405, path
            assert b'"message":"there is no ' not in answer.body, path
            for method in {"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"} - set(METHODS[route.name]):
                wrong = ask(f"{server.url}{path}", OPERATOR, method)
                assert (wrong.status, wrong.headers["allow"]) == (405, ", ".join(METHODS[route.name]))
                assert json.loads(wrong.body)["code"] == "method"
        blob = f"{server.url}/blob/pushed/a/1"
        answers = [ask(blob, OPERATOR, method).status for method in ("PUT", "HEAD", "GET", "DELETE", "GET")]
        assert answers == [201, 200, 200, 204, 404]
        for method in ("POST", "PATCH", "OPTIONS"):
            wrong = ask(blob, OPERATOR, method)
            assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD, PUT, DELETE")
        assert ask(f"{server.url}/-/none", OPERATOR).status == 404
        assert ask(f"{server.url}/-/openapi.json").status == 401
        assert ask(f"{server.url}/-/status", OPERATOR, Accept=MSGPACK).headers["content-type"] == MSGPACK


@pytest.mark.timeout(600)
def test_whatever_is_sent_is_answered_as_the_document_says(tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("there is no schemathesis: pip install -e '.[dev]'")
    fill(tmp_path / "o", ["a/1", "a/2", "b"], 2000)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    tokens = "--token", OPERATOR, "--token", f"{READER}:data,pushed", *BLOBS
    with served(tmp_path / "c", {"data": str(tmp_path / "o")}, *tokens) as server:
        for token in (OPERATOR, READER):
            command = [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/-/openapi.json",
                "--header", f"Authorization: Bearer {token}", "--phases", "examples,coverage,fuzzing",
                "--checks", "all", "--exclude-checks", NOT_CHECKED, "--exclude-path", BODIES_ONLY_MSGPACK,
                    "--exclude-operation-id-regex", REFUSED_AS_S3,
                "--max-examples", "30", "--seed", "1", "--generation-database", "none", "--no-color",
            ]  # fmt: skip
            run = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
                env=dict(os.environ),
            )  # fmt: skip
            assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
            assert "Tested: 31" in run.stdout, run.stdout[-2000:]
        assert ask(f"{server.url}/data/a/1", OPERATOR).status == 200, "it goes on serving"
