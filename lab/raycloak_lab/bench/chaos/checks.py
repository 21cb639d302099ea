"""The checks of a run after chaos: the same bytes as the undisturbed run, every step charged once, nothing lost.

Every check reads what a run leaves behind, and returns what is wrong and where. An empty answer is the promised one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.metrics.errors import RaycloakError
from raycloak_lab.bench.chaos.child_run import StepSeen


@dataclass(frozen=True, slots=True)
class Charges:
    """The ledger's record of a run.

    Attributes:
        lost, double: steps without a charge, and with more than one.
        uncommitted: steps that were charged but not finished.
        broken: why the chain cannot be trusted; None if it can.
    """

    lost: tuple[int, ...]
    double: tuple[int, ...]
    uncommitted: tuple[int, ...]
    broken: str | None


def digests_of(steps: Iterable[StepSeen]) -> dict[int, set[str]]:
    """Return the digests that each step was seen with, over all executions."""
    digests: dict[int, set[str]] = {}
    for each in steps:
        digests.setdefault(each.step, set()).add(each.model_digest)
    return digests


def digest_differences(reference: Mapping[int, set[str]], disturbed: Mapping[int, set[str]]) -> tuple[int, ...]:
    """Return the steps of ``disturbed`` that do not have the one digest that ``reference`` has."""
    return tuple(step for step in sorted(disturbed) if len(disturbed[step] | reference.get(step, set())) != 1)


def missing_steps(digests: Mapping[int, set[str]]) -> tuple[int, ...]:
    """Return the steps before the last one that were never finished."""
    return tuple(step for step in range(max(digests, default=-1)) if step not in digests)


def check_charges(home: Path, run_id: str, finished: Iterable[int]) -> Charges:
    """Compare the charges of a run, in its home's own ledger, with the steps that it has finished."""
    try:
        with closing(PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)) as ledger:
            ledger.verify()
            events = [entry.event for entry in ledger.history()]
    except RaycloakError as error:
        return Charges(tuple(finished), (), (), str(error))
    steps = (event for event in events if isinstance(event, StepCharged))
    times = Counter(each.step for each in steps if (each.run_id, each.query) == (run_id, "gradient"))
    done = set(finished)
    return Charges(
        lost=tuple(sorted(done - times.keys())),
        double=tuple(sorted(step for step, count in times.items() if count > 1)),
        uncommitted=tuple(sorted(times.keys() - done)),
        broken=None,
    )


def logged_digests(log: Path, owner: SignerPublic) -> dict[int, set[str]]:
    """Return the digests that an exported evidence log has for each step.

    Raises:
        EvidenceError: ``log_broken`` if the log is not whole.
    """
    digests: dict[int, set[str]] = {}
    for entry in read_exported_log(log, owner).entries:
        if entry.kind in ("committed", "reproduced"):
            body = entry.content
            if body.get("query", "gradient") == "gradient":
                digests.setdefault(body["step"], set()).add(body["released_digest"])
    return digests
