"""Traces of real servers, sent to a collector of ours over OTLP/HTTP."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, fill
from tests.e2e.test_cache_fleet_start import wait_until
from tests.e2e.test_cache_watch import ALL, ask, fleet, owned_by
from tests.http_servers import QuietHandler, QuietServer, running

pytestmark = pytest.mark.real
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector(QuietServer):
    """Keeps all spans that it is sent, by the server that they are of."""

    def __init__(self) -> None:
        super().__init__(Taking)
        self.spans: list[tuple[str, Any]] = []
        self.lock = threading.Lock()

    def of_trace(self) -> list[tuple[str, Any]]:
        with self.lock:
            return [(server, span) for server, span in self.spans if span.trace_id.hex() == TRACE]


class Taking(QuietHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        said = ExportTraceServiceRequest.FromString(body)
        for resource in said.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert about["service.name"] == "stoker-cache"
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            with self.server.lock:
                self.server.spans += [(about["service.instance.id"], span) for span in spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    server = Collector()
    with running(server):
        yield server


def test_one_trace_shows_a_requests_way_through_the_fleet(tmp_path: Path, collector: Collector) -> None:
    keys = [f"k{n}" for n in range(20)]
    fill(tmp_path / "o", keys)
    with fleet(tmp_path, {"b": str(tmp_path / "o")}, "--token", ALL, "--otlp", collector.url) as (x, y):
        key = owned_by("y", "b", keys)[0]
        said = ask(f"{x.url}/b/{key}", ALL, traceparent=PARENT)
        assert (said.status, said.headers["x-request-id"]) == (200, TRACE)
        for server in (x, y):  # what is still to be sent is sent then
            code, errors = server.stop()
            assert (code, errors) == (0, "")
    spans = collector.of_trace()
    by_id = {span.span_id: (server, span) for server, span in spans}
    (origin,) = [(server, span) for server, span in spans if span.name == "origin fetch"]
    assert origin[0] == "y"
    way = []
    server, span = origin
    while True:
        way.append((server, span.name))
        if span.parent_span_id not in by_id:
            break
        server, span = by_id[span.parent_span_id]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    assert way in (
        [("y", "origin fetch"), ("y", "GET request"), ("x", "peer fetch"), ("x", "GET request")],
        # The owner begins to fetch when it is asked for the version.
        [("y", "origin fetch"), ("y", "GET request"), ("x", "peer question"), ("x", "GET request")],
    )
    told = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
    assert (told["url.path"], told["stoker.dialect"], told["http.response.status_code"]) == (
        f"/b/{key}",
        "object",
        200,
    )


def test_a_collector_that_is_away_costs_the_traces_only(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    fill(tmp_path / "o", ["k"])
    options = "--dir", str(tmp_path / "c"), "--capacity", "1MB", "--bucket", f"b={tmp_path / 'o'}"
    server = ServerProcess(*options, "--otlp", "http://127.0.0.1:9")
    try:
        wait_until(lambda: ask(f"{server.url}/b/k").status == 200)
    finally:
        server.child.terminate()
        _, errors = server.child.communicate(timeout=60)
    assert server.child.returncode == 0, errors


def test_without_the_packages_it_is_said_what_to_install(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['opentelemetry'] = None\n"
    options = "--dir", str(tmp_path / "c"), "--capacity", "1MB", "--listen", "127.0.0.1:0"
    command = [sys.executable, "-c", blocked + RUN_CLI, "cache", "serve", *options]
    said = subprocess.run(
        [*command, "--otlp", "http://127.0.0.1:4318"], capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 2
    assert "pip install 'stoker[otel]'" in said.stderr
