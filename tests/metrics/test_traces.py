"""Spans: what they may carry, when there are any, and that they never hold up a run."""

import subprocess
import sys
import threading

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import StatusCode

from raycloak.metrics import traces
from raycloak.metrics.errors import ConfigError, RefusedError, RunFailedError
from raycloak.metrics.events import FIELD_BY_NAME, FIELDS
from raycloak.metrics.traces import ENDPOINTS, OFF, SPANS, RecordedTraces, tracing, tracing_is_on
from tests.layout import ROOT
from tests.spans import Kept, attributes, collector

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        ENDPOINT | {"OTEL_SDK_DISABLED": "True"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_or_switched_off_there_are_no_spans(environment):
    assert not tracing_is_on(environment)
    with tracing(environment) as made, made.span("run", execution="new") as span:
        assert made is OFF
        assert span.began_ns == 0
        made.record("worker", 0, 1.0, "died", member="worker-0")
        span.set(run="ab")


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_switches_them_on(name):
    assert tracing_is_on({name: "http://collector:4317"})


def test_guarantee_without_an_endpoint_nothing_is_imported():
    code = (
        "import sys\nfrom raycloak.metrics.traces import tracing\n"
        "with tracing({}) as traces, traces.span('run'):\n    pass\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'grpc')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("missing", "environment", "said"),
    [
        (("opentelemetry.exporter",), ENDPOINT, "OpenTelemetry is not installed"),
        (("opentelemetry.sdk",), ENDPOINT, "Install 'raycloak\\[otel\\]'"),
        ((), ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "not 'http/protobuf'"),
        ((), ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "not 'http/json'"),
    ],
)
def test_an_endpoint_without_what_it_needs_is_the_users_mistake(missing, environment, said, monkeypatch):
    found = traces.find_spec

    def find_spec(name):
        if name in missing:
            return None
        if name.startswith(missing):
            raise ModuleNotFoundError(name)
        return found(name)

    monkeypatch.setattr(traces, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=said) as refusal:
        tracing_is_on(environment)
    assert refusal.value.code == "tracing"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"patients": 7}, "event_field"),
        ({"event": "step"}, "event_field"),
        ({"loss": 0.5}, "event_secret"),
        ({"examples": 12}, "event_secret"),
        ({"code": "row 7 is Ada Lovelace"}, "event_value"),
        ({"step": "3"}, "event_value"),
        ({"seconds": float("nan")}, "event_value"),
    ],
)
def test_guarantee_no_attribute_is_outside_the_table(fields, code):
    kept = Kept()
    with kept.span("step") as span:
        for act in (
            lambda: kept.span("charge", **fields).__enter__(),
            lambda: span.set(**fields),
            lambda: kept.record("worker", span.began_ns, 0.0, **fields),
        ):
            with pytest.raises(RefusedError) as refusal:
                act()
            assert refusal.value.code == code
    assert [attributes(each) for each in kept.ended] == [{}]


def test_every_field_that_may_be_shown_may_be_an_attribute():
    values = {str: "a-name", int: 3, float: 0.5}
    shown = [each for each in FIELDS if each.privacy.exportable and each.name not in ("event", "time")]
    kept = Kept()
    with kept.span("step", **{each.name: values[each.kind] for each in shown}) as span:
        span.set(loss=None)
    (span,) = kept.ended
    assert attributes(span).keys() == {each.name for each in shown}
    assert all(name.removeprefix("raycloak.") in FIELD_BY_NAME for name in span.attributes)


def test_a_span_has_a_declared_name():
    kept = Kept()
    for act in (lambda: kept.span("patient 7").__enter__(), lambda: kept.record("rows", 0, 1.0)):
        with pytest.raises(RefusedError) as refusal:
            act()
        assert refusal.value.code == "span_name"
    assert len(set(SPANS)) == len(SPANS)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunFailedError("unreachable", "worker-1 is gone"), "unreachable"), (ValueError("row 7"), "unexpected")],
)
def test_guarantee_the_text_of_an_error_is_in_no_span(error, code):
    kept = Kept()
    with pytest.raises(type(error)), kept.span("run"), kept.span("train"):
        raise error
    for span in kept.ended:
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, code)
        assert attributes(span) == {"code": code}
        assert span.events == ()
        assert "row 7" not in span.to_json()
        assert "gone" not in span.to_json()


def test_a_step_is_a_trace_of_its_own_that_links_to_its_run():
    kept = Kept()
    with kept.span("run"), kept.span("train"):
        for step in (0, 1):
            with kept.span("step", step=step), kept.span("attempt") as attempt:
                kept.record("worker", attempt.began_ns, 0.25, "died", member="worker-1")
    assert kept.trees == [
        ("run", [("train", [])]),
        ("step", [("attempt", [("worker", [])])]),
        ("step", [("attempt", [("worker", [])])]),
    ]
    run = next(each for each in kept.ended if each.name == "run")
    steps = [each for each in kept.ended if each.name == "step"]
    assert [[link.context.span_id for link in each.links] for each in steps] == [[run.context.span_id]] * 2
    assert len({each.context.trace_id for each in (run, *steps)}) == 3
    worker = next(each for each in kept.ended if each.name == "worker")
    assert worker.end_time - worker.start_time == 250_000_000
    assert worker.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("given", "trace"),
    [(f"00-{'ab' * 16}-{'cd' * 8}-01", int("ab" * 16, 16)), ("not a parent", None), ("", None), (None, None)],
)
def test_a_run_belongs_to_the_trace_that_started_it(given, trace):
    kept = Kept(given)
    with kept.span("run"):
        pass
    (span,) = kept.ended
    assert (span.parent.trace_id if span.parent else None) == trace


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "raycloak"), ({"OTEL_SERVICE_NAME": "ward"}, "ward"), ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=w"}, "w")],
)
def test_the_service_is_named_by_its_user(variables, name, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    kept = Kept()
    with kept.span("run"):
        pass
    assert kept.ended[0].resource.attributes["service.name"] == name


class Stuck(SpanProcessor):
    """A collector that never answers."""

    def __init__(self):
        self.release = threading.Event()

    def shutdown(self):
        assert self.release.wait(60), "nobody waits that long"


def test_guarantee_a_collector_that_does_not_answer_keeps_no_run(monkeypatch):
    monkeypatch.setattr(traces, "CLOSE_S", 0.01)
    stuck = Stuck()
    recorded = RecordedTraces(stuck)
    with recorded.span("run"):
        pass
    recorded.close()
    assert not stuck.release.is_set()
    stuck.release.set()


def test_spans_arrive_at_a_collector(monkeypatch):
    with collector() as (received, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setattr(traces, "CLOSE_S", 120.0)
        with tracing() as made, made.span("run", execution="new") as run:
            with made.span("step", run="ab12", step=4):
                pass
            run.set(run="ab12")
        assert {span.name for span in received.spans} == {"run", "step"}
        (step,) = (span for span in received.spans if span.name == "step")
        found = {each.key: each.value for each in step.attributes}
        assert found["raycloak.run"].string_value == "ab12"
        assert found["raycloak.step"].int_value == 4
        (resource,) = {each.SerializeToString() for each in (r.resource_spans[0].resource for r in received.requests)}
        assert b"service.name" in resource
