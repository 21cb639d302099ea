"""The result of the chaos bench: the hits, the recovery times, and any broken promise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.console.figures import value_text
from raycloak.coordinator.console.tables import columns_table, fields_table
from raycloak.metrics.errors import EvidenceError
from raycloak_lab.bench.chaos.checks import (
    Charges,
    check_charges,
    digest_differences,
    digests_of,
    logged_digests,
    missing_steps,
)
from raycloak_lab.bench.chaos.child_run import ChildRun
from raycloak_lab.bench.chaos.figures import (
    PHASES,
    Kill,
    Phase,
    Recovery,
    RecoverySpread,
    longest_step,
    recovery,
    spread,
    usual_lengths,
)
from raycloak_lab.bench.chaos.schedule import KILLED_ROLES, Role, SignalName

# Expectations: a miss breaks no promise, and fails the bench only with --strict.
RECOVERY_S = 1.0
MEMBERS_S = 15.0
STEP_S = 30.0


@dataclass(frozen=True, slots=True)
class Runs:
    """The two runs, and the kills of the first."""

    disturbed: ChildRun
    reference: ChildRun
    kills: Sequence[Kill]


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of times that a role was hit by a signal in a phase."""

    role: Role
    signal: SignalName
    phase: Phase
    count: int


@dataclass(frozen=True, slots=True)
class RoleTimes:
    """The recoveries of a role; see `raycloak_lab.bench.chaos.figures.Recovery`. None where nothing was
    measured."""

    role: Role
    commit: RecoverySpread | None
    settled: RecoverySpread | None
    members: RecoverySpread | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """A figure and its expected limit. Missing it breaks no promise. None was not measured."""

    name: str
    value: float | None
    limit: float
    met: bool


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The findings of a chaos run. Seconds count from the signal.

    Attributes:
        hits: kills by role, signal and phase.
        recovery: to the commit of the step that was hit, over all kills except of drivers and nodes.
        settled: to the commit of the first step that began after the signal, over the same kills.
        members: to the first commit with all workers again, over the killed and stopped workers.
        by_role: the same three for each role; drivers and nodes are only here.
        longest_step_s: most seconds from one commit to the next, apart from driver restarts and lost nodes.
        ended: last words of drivers that ended by themselves. A run is expected to survive.
        digest_differences: steps that some execution finished with other bytes than the undisturbed run.
        lost_charges, double_charges, uncommitted_charges: steps of the ledger. A stopped run has no uncommitted ones.
        failed_claims: those that `raycloak verify` found FAILED, each with the record that breaks it.
        breaches: broken promises, in sentences; empty is expected.
    """

    kills: int
    hits: tuple[Tally, ...]
    recovery: RecoverySpread | None
    settled: RecoverySpread | None
    members: RecoverySpread | None
    by_role: tuple[RoleTimes, ...]
    driver_restarts: int
    nodes_lost: int
    longest_step_s: float
    ended: tuple[str, ...]
    steps: int
    repeated_steps: int
    digest_differences: tuple[int, ...]
    lost_charges: tuple[int, ...]
    double_charges: tuple[int, ...]
    uncommitted_charges: tuple[int, ...]
    ledger_chain_valid: bool
    evidence_log_valid: bool
    failed_claims: tuple[str, ...]
    wall_seconds: float
    expectations: tuple[Expectation, ...]
    breaches: tuple[str, ...]


def report(config: RunConfig, runs: Runs, wall_seconds: float) -> ChaosReport:
    """Compare and measure two runs that have ended."""
    disturbed = runs.disturbed
    tail = disturbed.tail
    assert tail is not None, "the run has made steps"
    usual = usual_lengths(tail.steps)
    recoveries = [recovery(kill, tail.steps, tail.departures, usual, config.num_workers) for kill in runs.kills]
    near = [each for each in recoveries if each.kill.role not in ("driver", "node")]
    members = spread(each.members_s for each in near if each.kill.role == "worker")
    apart = [each.kill.time for each in recoveries if each not in near] + [when for when, _ in disturbed.ended]
    seen, expected = digests_of(tail.steps), digests_of(runs.reference.steps)
    charges = check_charges(disturbed.home, disturbed.folder.record.run_id, seen)
    differing = set(digest_differences(expected, seen))
    log_trouble, manifest = None, disturbed.folder.manifest()
    try:
        if manifest is None:
            raise EvidenceError("log_broken", "the run has no manifest that names the log's owner")
        logged = logged_digests(disturbed.folder.path / "evidence.jsonl", manifest.log_owner)
        differing |= set(digest_differences(expected, logged))
    except EvidenceError as error:
        log_trouble = str(error)
    failed = disturbed.failed_claims()
    hits = Counter((each.kill.role, each.kill.signal, each.phase) for each in recoveries)
    differences, commits = tuple(sorted(differing)), spread(each.commit_s for each in near)
    longest = longest_step(tail.steps, apart)
    return ChaosReport(
        kills=len(near) + sum(kill.role == "driver" for kill in runs.kills),
        hits=tuple(Tally(*hit, count) for hit, count in sorted(hits.items())),
        recovery=commits,
        settled=spread(each.settled_s for each in near),
        members=members,
        by_role=tuple(_role_times(role, recoveries) for role in (*KILLED_ROLES, "node")),
        driver_restarts=sum(kill.role == "driver" for kill in runs.kills),
        nodes_lost=sum(kill.role == "node" for kill in runs.kills),
        longest_step_s=longest,
        ended=tuple(reason for _, reason in disturbed.ended),
        steps=len(seen),
        repeated_steps=len(tail.steps) - len(seen),
        digest_differences=differences,
        lost_charges=charges.lost,
        double_charges=charges.double,
        uncommitted_charges=charges.uncommitted,
        ledger_chain_valid=charges.broken is None,
        evidence_log_valid=log_trouble is None,
        failed_claims=failed,
        wall_seconds=wall_seconds,
        expectations=(
            _expect("median seconds to the commit of the step that was hit", _median(commits), RECOVERY_S),
            _expect("median seconds to all workers", _median(members), MEMBERS_S),
            _expect("seconds of the longest step", longest, STEP_S),
        ),
        breaches=_breaches(differences, missing_steps(seen), charges, log_trouble, failed, disturbed.ended),
    )


def _role_times(role: Role, recoveries: Sequence[Recovery]) -> RoleTimes:
    own = [each for each in recoveries if each.kill.role == role]
    return RoleTimes(
        role=role,
        commit=spread(each.commit_s for each in own),
        settled=spread(each.settled_s for each in own),
        members=spread(each.members_s for each in own),
    )


def _expect(name: str, value: float | None, limit: float) -> Expectation:
    return Expectation(name, value, limit, value is None or value <= limit)


def _median(values: RecoverySpread | None) -> float | None:
    return values.median_s if values else None


def _breaches(
    differences: Sequence[int],
    missing: Sequence[int],
    charges: Charges,
    log_trouble: str | None,
    failed: Sequence[str],
    ended: Sequence[tuple[float, str]],
) -> tuple[str, ...]:
    steps = (
        ("other bytes than undisturbed", differences),
        ("never finished", missing),
        ("finished without a charge", charges.lost),
        ("charged more than once", charges.double),
        ("charged and never finished", charges.uncommitted),
    )
    found = [f"{what}: {_steps_text(which)}" for what, which in steps if which]
    found += [f"the ledger: {charges.broken}"] if charges.broken else []
    found += [f"the evidence log: {log_trouble}"] if log_trouble else []
    found += [f"raycloak verify: {claim}" for claim in failed]
    found += [f"the run ended by itself: {reason}" for _, reason in ended]
    return tuple(found)


def _steps_text(steps: Sequence[int], shown: int = 8) -> str:
    text = ", ".join(map(str, steps[:shown]))
    return f"steps {text}" + (f" and {len(steps) - shown} more" if len(steps) > shown else "")


def chaos_view(result: ChaosReport) -> RenderableType:
    """Render the report for a person: hits, recovery times and promises."""
    hits = []
    for role, signal in dict.fromkeys((hit.role, hit.signal) for hit in result.hits):
        counts = {hit.phase: hit.count for hit in result.hits if (hit.role, hit.signal) == (role, signal)}
        hits.append((role, signal, *(str(counts.get(phase, "")) for phase in PHASES)))
    times = []
    for each in result.by_role:
        if each.commit or each.settled:
            count = sum(hit.count for hit in result.hits if hit.role == each.role)
            times.append((each.role, str(count), *map(_spread_text, (each.commit, each.settled, each.members))))
    near = map(_spread_text, (result.recovery, result.settled, result.members))
    times.append(("all but driver and node", "", *near))
    headers = ("role", "kills", "commit of the step hit", "first whole step after it", "all workers")
    return Group(
        columns_table("Kills by role and phase", ("role", "signal", *PHASES), hits),
        columns_table("Seconds from the signal: median / 90 % / longest", headers, times),
        fields_table("bench chaos", _rows(result)),
        *map(Text, result.breaches),
    )


def _spread_text(values: RecoverySpread | None) -> str:
    return f"{values.median_s:.3g} / {values.p90_s:.3g} / {values.max_s:.3g}" if values else ""


def _rows(result: ChaosReport) -> list[tuple[str, str]]:
    kept = {
        "digest differences": len(result.digest_differences),
        "lost charges": len(result.lost_charges),
        "double charges": len(result.double_charges),
        "ledger chain": "valid" if result.ledger_chain_valid else "BROKEN",
        "evidence log": "valid" if result.evidence_log_valid else "BROKEN",
        "raycloak verify": f"{len(result.failed_claims)} claims FAILED" if result.failed_claims else "no claim failed",
        "steps": f"{result.steps}, {result.repeated_steps} of them again after a driver was lost",
        "driver restarts": result.driver_restarts,
        "lost nodes": result.nodes_lost,
        "wall seconds": result.wall_seconds,
    }
    rows = [(name, value_text(value)) for name, value in kept.items()]
    for each in result.expectations:
        met = "" if each.met else ", MISSED"
        rows.append((each.name, f"{value_text(each.value)}, expected {each.limit:g} at most{met}"))
    return rows
