"""The members of a run as its evidence log has them: who was admitted on what, who got keys, who was refused or left.

Hides the kinds of entries in the log. Its signatures were checked; whether the evidence holds is judged by
`raycloak verify`, and not again here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raycloak.attestation.log.evidence_log import ExportedLog
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
        entry: number of the log entry of its first admission.
    """

    member_id: str
    role: str
    evidence_class: str
    hardware: str
    platform_id: str
    admitted_at: int
    expires_at: int
    presentations: int
    entry: int
    virtual_workers: frozenset[int] = frozenset()
    left: str | None = None


@dataclass(frozen=True, slots=True)
class ReportedRefusal:
    """One refusal or revocation: of whom, and the stable code or stated reason. ``count`` may stand for several."""

    name: str
    what: str
    reason: str
    entry: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Evidence:
    """The members and refusals of a run.

    Attributes:
        problem: why there is no log that can be shown, a sentence; empty if there is one.
        entries: length of the log.
        sessions: executions that the log has.
        secret_destroyed: whether the run secret is gone; None if the log was not ended for good.
    """

    members: tuple[ReportedMember, ...] = ()
    refusals: tuple[ReportedRefusal, ...] = ()
    entries: int = 0
    sessions: int = 0
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
    return _read(log)


@dataclass(slots=True)
class _Reading:
    members: dict[str, ReportedMember] = field(default_factory=dict)
    refusals: list[ReportedRefusal] = field(default_factory=list)
    sessions: int = 0
    secret_destroyed: bool | None = None


def _read(log: ExportedLog) -> Evidence:
    found = _Reading()
    for entry in log.entries:
        body = entry.content
        match entry.kind:
            case "session":
                found.sessions += 1
            case "admitted":
                _admit(found, entry.sequence, body)
            case "released":
                member = found.members.get(body["member_id"])
                if member is not None and body["kind"] == "virtual_worker":
                    keys = member.virtual_workers | set(body["virtual_workers"])
                    found.members[member.member_id] = replace(member, virtual_workers=keys)
            case "expelled":
                member = found.members.get(body["member_id"])
                if member is not None:
                    found.members[member.member_id] = replace(member, left=str(body["cause"]))
            case "refused" | "release_refused":
                what = "admission refused" if entry.kind == "refused" else "keys refused"
                found.refusals.append(ReportedRefusal(str(body["member_id"]), what, str(body["code"]), entry.sequence))
            case "refusals_omitted":
                found.refusals.append(
                    ReportedRefusal("several", "more refusals", ", ".join(body["codes"]), entry.sequence, body["count"])
                )
            case "revoked":
                name = f"{body['kind']} {body['name']}"
                found.refusals.append(ReportedRefusal(name, "revoked", str(body["reason"]), entry.sequence))
            case "finished":
                found.secret_destroyed = bool(body["secret_destroyed"])
    return Evidence(
        members=tuple(found.members.values()),
        refusals=tuple(found.refusals),
        entries=len(log.entries),
        sessions=found.sessions,
        secret_destroyed=found.secret_destroyed,
    )


def _admit(found: _Reading, sequence: int, body: Mapping[str, Any]) -> None:
    name = str(body["member_id"])
    known = found.members.get(name)
    if known is not None:
        again = replace(known, expires_at=body["expires_at"], presentations=known.presentations + 1, left=None)
        found.members[name] = again
        return
    found.members[name] = ReportedMember(
        member_id=name,
        role=str(body["role"]),
        evidence_class=str(body["evidence_class"]),
        hardware=str(body["claims"].get("hwmodel", "")),
        platform_id=str(body["platform_id"]),
        admitted_at=body["appraised_at"],
        expires_at=body["expires_at"],
        presentations=1,
        entry=sequence,
    )
