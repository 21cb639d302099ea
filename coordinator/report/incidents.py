"""The incidents of a run: failures, refusals and repeats, in the order in which the record has them."""

from collections.abc import Iterator

from raycloak.coordinator.record.run_reader import Event, RunData
from raycloak.coordinator.report.members import Evidence, IncidentRow, utc


def incidents_of(run: RunData, evidence: Evidence) -> Iterator[IncidentRow]:
    """Yield departures, newcomers, restarts, resumes, loads, repeated attempts, then the orchestrator's refusals."""
    finished, executions = 0, 0
    repeated = set()
    for event in run.events:
        match event["event"]:
            case "admitted":
                executions += 1
                if executions > 1:
                    yield _incident(event, finished, "resumed", f"execution {executions}")
            case "departure":
                yield _incident(event, finished, "member left", f"code {event['code']}")
            case "join":
                yield _incident(event, finished, "worker joined", f"{event['workers']} workers by then")
            case "load":
                yield _incident(event, event["steps"], "state loaded", f"that of step {event['step']}")
            case "restart":
                detail = f"{event['role']}, {event['cause']}, back after {event['seconds']:.1f} s"
                yield _incident(event, finished, "restarted", detail)
            case "measurement" if event["attempts"] > 1:
                # A release has an event for each of its values.
                release = event["query"], event["release"]
                if release not in repeated:
                    repeated.add(release)
                    detail = f"{event['query'].replace('_', ' ')}, {event['attempts']} attempts, charged once"
                    yield _incident(event, finished, "measurement repeated", detail)
            case "step":
                finished = event["step"] + 1
                if event["attempts"] > 1:
                    yield _incident(event, finished, "step repeated", f"{event['attempts']} attempts, charged once")
    yield from evidence.refusals


def _incident(event: Event, finished: int, what: str, detail: str) -> IncidentRow:
    return IncidentRow(utc(event["time"]), finished, what, detail, "metrics.jsonl")
