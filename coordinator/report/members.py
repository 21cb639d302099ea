"""The members of a run as its evidence log has them: who was admitted on what, who got keys, who was refused or left.

Hides the kinds of entries in the log. Its signatures were checked; whether the evidence holds is judged by
`raycloak verify`, and not again here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from raycloak.coordinator.record.run_reader import RunData
from raycloak.metrics.errors import EvidenceError


@dataclass(frozen=True, slots=True)
class ReportedMember:
    """One member of a run.

    Attributes:
        evidence_class: ``simulated`` or the hardware class whose root verified.
        hardware: model of the machine, as the evidence names it; empty if it does not.
        platform_id: identity of the platform, hexadecimal.
        admitted_at, expires_at: Unix seconds of the first admission, and of the end of the newest evidence.
        presentations: how often its evidence was accepted, renewals included.
        virtual_workers: whose keys it got.
        left: cause of its expulsion; None if there was none.
    """

    member_id: str
    role: str
    evidence_class: str
    hardware: str
    platform_id: str
    admitted_at: int
    expires_at: int
    presentations: int
    virtual_workers: frozenset[int] = frozenset()
    left: str | None = None


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """A failure, a refusal or a repeat.

    Attributes:
        when: UTC; empty where the record has no time.
        step: finished steps by then; None where the record does not tell.
        file: of the run directory, that has the record.
    """

    when: str
    step: int | None
    what: str
    detail: str
    file: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The members and refusals of a run.

    Attributes:
        refusals: of members by the orchestrator, and revocations; ``refused`` is their number, as a row may stand for
            several.
        problem: why there is no log that can be shown, a sentence; empty if there is one.
        entries: length of the log.
        secret_destroyed: whether the run secret is gone; None if the log was not ended for good.
    """

    members: tuple[ReportedMember, ...] = ()
    refusals: tuple[IncidentRow, ...] = ()
    refused: int = 0
    entries: int = 0
    secret_destroyed: bool | None = None
    problem: str = ""


def evidence_of(run: RunData) -> Evidence:
    """Return what the evidence log of a run says; a log that is missing or broken becomes its ``problem``."""
    try:
        log = run.log()
    except EvidenceError as error:
        return Evidence(problem=f"Nothing of it can be relied on. {error.message} ({error.code})")
    if log is None:
        return Evidence(problem="There is no evidence log here: it is written when an execution of the run ends.")
    members: dict[str, ReportedMember] = {}
    refusals, refused, secret_destroyed = [], 0, None
    for entry in log.entries:
        body = entry.content
        member = members.get(body.get("member_id", ""))
        match entry.kind:
            case "admitted":
                members[str(body["member_id"])] = _admitted(member, body)
            case "released" if member is not None and body["kind"] == "virtual_worker":
                keys = member.virtual_workers | set(body["virtual_workers"])
                members[member.member_id] = replace(member, virtual_workers=keys)
            case "expelled" if member is not None:
                members[member.member_id] = replace(member, left=str(body["cause"]))
            case "finished":
                secret_destroyed = bool(body["secret_destroyed"])
            case "refused" | "release_refused" | "refusals_omitted" | "revoked":
                what, detail = _refusal(entry.kind, body)
                refusals.append(IncidentRow("", None, what, detail, f"evidence.jsonl, entry {entry.sequence}"))
                refused += body.get("count", 1)
    return Evidence(tuple(members.values()), tuple(refusals), refused, len(log.entries), secret_destroyed)


def _admitted(known: ReportedMember | None, body: Mapping[str, Any]) -> ReportedMember:
    if known is not None:
        return replace(known, expires_at=body["expires_at"], presentations=known.presentations + 1, left=None)
    return ReportedMember(
        member_id=str(body["member_id"]),
        role=str(body["role"]),
        evidence_class=str(body["evidence_class"]),
        hardware=str(body["claims"].get("hwmodel", "")),
        platform_id=str(body["platform_id"]),
        admitted_at=body["appraised_at"],
        expires_at=body["expires_at"],
        presentations=1,
    )


def _refusal(kind: str, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return what was refused, and of whom and why."""
    if kind == "refusals_omitted":
        times = f", {body['count']} times" if body["count"] > 1 else ""
        return "more refusals", f"several: {', '.join(body['codes'])}{times}"
    if kind == "revoked":
        return "revoked", f"{body['kind']} {body['name']}: {body['reason']}"
    return "admission refused" if kind == "refused" else "keys refused", f"{body['member_id']}: {body['code']}"


def utc(seconds: float) -> str:
    """Return a Unix time to the second, for a reader."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
