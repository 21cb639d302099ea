"""Spans of a run, kept in memory or received over OTLP."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raycloak.metrics.traces import RecordedTraces


class Kept(RecordedTraces):
    """Traces whose spans stay in this process."""

    def __init__(self, parent: str | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        super().__init__(SimpleSpanProcessor(self._exporter), parent)

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        """The spans that have ended, in that order."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the attributes of each ended span of that name, in the order in which they began."""
        found = sorted((each for each in self.ended if each.name == name), key=lambda each: each.start_time)
        return [attributes(each) for each in found]

    def tree(self, span: ReadableSpan) -> tuple[str, list[Any]]:
        """Return a span's name and the trees inside it, in the order in which they began."""
        inner = [each for each in self.ended if each.parent and each.parent.span_id == span.context.span_id]
        return span.name, [self.tree(each) for each in sorted(inner, key=lambda each: each.start_time)]

    @property
    def trees(self) -> list[tuple[str, list[Any]]]:
        """The whole traces, in the order in which they began."""
        roots = [each for each in self.ended if each.parent is None]
        return [self.tree(each) for each in sorted(roots, key=lambda each: each.start_time)]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes without their prefix."""
    return {name.removeprefix("raycloak."): value for name, value in (span.attributes or {}).items()}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of spans: what a backend gets, as it is on the wire."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
        """Take spans."""
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        """All spans received."""
        return [
            s for r in self.requests for each in r.resource_spans for scope in each.scope_spans for s in scope.spans
        ]


@contextmanager
def collector():
    """Yield a collector on loopback, and the address to export to."""
    received, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield received, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
