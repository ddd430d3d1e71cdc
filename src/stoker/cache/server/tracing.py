"""Traces by OpenTelemetry, sent by OTLP over HTTP. It needs the extra `otel`, and nothing else here knows of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from stoker.errors import ConfigError

SERVICE = "stoker-cache"
_TRACES = "/v1/traces"


def check_otlp(url: str) -> str:
    """Where traces are sent: `http://HOST:PORT` means its `/v1/traces`. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"--otlp {url!r} is not the URL of a collector, such as http://127.0.0.1:4318")
    return url if parts.path.strip("/") else url.rstrip("/") + _TRACES


class OtelSpans:
    """Sends spans in batches, from a thread of its own. What the collector does not take is dropped, after some tries,
    and said in the log."""

    def __init__(self, url: str, server: str, version: str) -> None:
        """Raises ConfigError where the packages are missing."""
        endpoint = check_otlp(url)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp needs OpenTelemetry, which is not installed here ({error}): pip install 'stoker[otel]'"
            ) from error
        attributes = {"service.name": SERVICE, "service.instance.id": server, "service.version": version}
        self._provider = TracerProvider(resource=Resource.create(attributes))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("stoker.cache", version)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, parent: str | None, attributes: Mapping[str, str]) -> Iterator[None]:
        carrier = {} if parent is None else {"traceparent": parent}
        context = self._propagator.extract(carrier)
        method = attributes.get("http.request.method", "")
        kind = self._trace.SpanKind.SERVER
        with self._tracer.start_as_current_span(
            f"{method} request", context=context, kind=kind, attributes=dict(attributes)
        ):
            yield

    def answered(self, dialect: str, status: int) -> None:
        span = self._trace.get_current_span()
        span.set_attribute("stoker.dialect", dialect)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)

    @contextlib.contextmanager
    def part(self, name: str, attributes: Mapping[str, str]) -> Iterator[None]:
        kind = self._trace.SpanKind.CLIENT
        told = {f"stoker.{key}": value.encode(errors="replace").decode() for key, value in attributes.items()}
        with self._tracer.start_as_current_span(name, kind=kind, attributes=told):
            yield

    def trace_parent(self) -> str | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent")

    def close(self) -> None:
        """Send what is still to be sent, within a few seconds. It waits: not for the event loop."""
        self._provider.shutdown()
