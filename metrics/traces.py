"""The spans of a run for OpenTelemetry: how long each of its parts took, nested.

Hides whether spans are recorded, and by which library. The standard variable ``OTEL_EXPORTER_OTLP_ENDPOINT`` turns them
on; without it nothing is imported, and a span costs a function call. Names are declared here, attributes in
`metrics/events.py` with their privacy class.

Guarantee: a span holds a declared name, declared fields of the classes that may be shown, and times; never the text of
an exception. One thread opens spans.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self

from raycloak.metrics.errors import ConfigError, RaycloakError, RefusedError
from raycloak.metrics.events import Value, check_field

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as Recorded

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PARENT = "TRACEPARENT"
"""The span that started this process, as W3C's Trace Context writes it."""
SPANS = (
    "run", "connect", "launch", "prepare", "admit", "train", "finish",
    "step", "measurement", "charge", "roster", "attempt", "compute", "worker", "reduce", "commit",
    "evaluate", "checkpoint", "recover",
)  # fmt: skip
OWN_TRACE = ("step", "measurement")
"""Each begins its own trace, linked to its run: one trace of ten thousand steps is more than backends accept."""
CLOSE_S = 5.0
"""Time for the last spans to leave. A collector that does not answer must not keep a finished run."""


class Span:
    """A part of a run that nobody records.

    Attributes:
        began_ns: Unix time in nanoseconds; 0 where nobody records.
    """

    began_ns = 0

    def set(self, **fields: Value) -> None:
        """Add fields; None leaves one out.

        Raises:
            RefusedError: as `raycloak.metrics.events.check_field`, where spans are recorded.
        """

    def fail(self, code: str) -> None:
        """Mark the span as failed, with a stable code."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


UNRECORDED = Span()


class Traces:
    """The spans of one execution, which go nowhere; :func:`tracing` gives those that go somewhere."""

    @property
    def trace_id(self) -> str:
        """The trace of the open span, 32 hexadecimal digits; empty if there is none."""
        return ""

    def span(self, name: str, /, **fields: Value) -> Span:
        """Return a span of `SPANS` to enter: it is a part of the one that is open. An error that leaves it fails it."""
        return UNRECORDED

    def record(self, name: str, began_ns: int, seconds: float, failed: str = "", /, **fields: Value) -> None:
        """Add a part of the open span that is over, such as a worker's, by the time that the worker states.

        Args:
            failed: the code of its failure; empty if it was well.
        """


OFF = Traces()


def tracing_is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether spans are to be exported. Imports no part of OpenTelemetry.

    Raises:
        ConfigError: ``tracing`` if they are, and cannot be.
    """
    if not any(environment.get(name) for name in ENDPOINTS):
        return False
    # The standard's own two switches.
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(
            "tracing", f"spans are exported by OTLP over grpc, not '{protocol}'.", f"Set {PROTOCOLS[1]}=grpc."
        )
    if not all(map(_is_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"))):
        raise ConfigError(
            "tracing",
            f"{ENDPOINTS[1]} is set, but OpenTelemetry is not installed.",
            "Install 'raycloak[otel]', or unset the variable.",
        )
    return True


@contextmanager
def tracing(environment: Mapping[str, str] = os.environ) -> Iterator[Traces]:
    """Yield the spans of one execution; they are exported in the background, and the rest of them at its end.

    Raises:
        ConfigError: as :func:`tracing_is_on`.
    """
    if not tracing_is_on(environment):
        yield OFF
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    traces = RecordedTraces(BatchSpanProcessor(OTLPSpanExporter()), environment.get(PARENT))
    try:
        yield traces
    finally:
        traces.close()


class RecordedTraces(Traces):
    """The spans of one execution, given to a processor of OpenTelemetry's.

    Args:
        processor: takes every span that has ended.
        parent: the value of `PARENT`; one that is not well formed is left out, as the standard asks.
    """

    def __init__(self, processor: "SpanProcessor", parent: str | None = None) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The user's own name, from the standard variables, goes before ours.
        resource = Resource.create({SERVICE_NAME: "raycloak"} | dict(OTELResourceDetector().detect().attributes))
        # A provider of our own and not the process's: other libraries' spans know no privacy class.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("raycloak")
        carrier = {"traceparent": parent} if parent else {}
        # An empty context, so that what the process may have open is no parent.
        self._outer = TraceContextTextMapPropagator().extract(carrier, Context())
        self._open: list[Recorded] = []

    @property
    def trace_id(self) -> str:
        return f"{self._open[-1].get_span_context().trace_id:032x}" if self._open else ""

    def span(self, name: str, /, **fields: Value) -> Span:
        return _RecordedSpan(partial(self._start, name, fields), self._open)

    def record(self, name: str, began_ns: int, seconds: float, failed: str = "", /, **fields: Value) -> None:
        span = self._start(name, fields, began_ns)
        if failed:
            _mark_failed(span, failed)
        span.end(began_ns + int(seconds * 1e9))

    def close(self) -> None:
        """Export what is left, and wait for at most `CLOSE_S`; nothing is recorded from then on."""
        # In a thread, because OpenTelemetry's own deadlines hold for one batch, and there may be several.
        closing = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _start(self, name: str, fields: Mapping[str, Value], began_ns: int) -> "Recorded":
        """Start a span inside the open one, or in a new trace."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, set_span_in_context

        if name not in SPANS:
            raise RefusedError("span_name", f"'{name}' is not a declared span")
        parent, links = self._outer, []
        if self._open:
            is_apart = name in OWN_TRACE
            parent = Context() if is_apart else set_span_in_context(self._open[-1], Context())
            links = [Link(self._open[0].get_span_context())] if is_apart else []
        return self._tracer.start_span(
            name, parent, attributes=_attributes(fields), links=links, start_time=began_ns, record_exception=False
        )


class _RecordedSpan(Span):
    """A span that begins where it is entered.

    Args:
        start: starts it at a time.
        within: the spans that are open, the outermost first.
    """

    def __init__(self, start: "Callable[[int], Recorded]", within: "list[Recorded]") -> None:
        self._start = start
        self._within = within

    def set(self, **fields: Value) -> None:
        self._span.set_attributes(_attributes(fields))

    def fail(self, code: str) -> None:
        _mark_failed(self._span, code)

    def __enter__(self) -> Self:
        self.began_ns = time.time_ns()
        self._span = self._start(self.began_ns)
        self._within.append(self._span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._within.pop()
        if error is not None:
            # The code alone: the text of other exceptions may have been made from private data.
            self.fail(error.code if isinstance(error, RaycloakError) else "unexpected")
        self._span.end()


def _attributes(fields: Mapping[str, Value]) -> dict[str, str | int | float]:
    """Return the attributes for declared fields; RefusedError as `raycloak.metrics.events.check_field`."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        check_field(name, value)
    return {f"raycloak.{name}": value for name, value in given.items()}


def _mark_failed(span: "Recorded", code: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(_attributes({"code": code}))
    span.set_status(Status(StatusCode.ERROR, code))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    # Raised if a package above it is missing.
    except ModuleNotFoundError:
        return False
