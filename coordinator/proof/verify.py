"""Verifies a run offline: from a bundle or the parts of a run directory, and a trust file, to a table of claims.

Nothing is believed but the trust file. Neither torch nor Ray is imported, and nothing is asked over a network.

Guarantee: a claim that is `proved` was derived again from bytes that a trusted key signed, by the functions that the
run itself used. A claim whose record was changed, dropped, added, moved or taken from another run is FAILED. A file
that nobody signs is never `proved`, only held to the signed records that it repeats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raycloak.coordinator.proof import budget_claims, output_claims, run_claims
from raycloak.coordinator.proof.bundle import RecordParts, read_bundle
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken, Claim, ClaimOutcome, NotThere, Report
from raycloak.coordinator.proof.trust import Trust
from raycloak.metrics.errors import RaycloakError


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """How one claim is derived.

    Attributes:
        rests_on: claims that must hold before this one means anything.
        derive: returns the sentence of a proved claim; raises Broken, NotThere or a refusal.
    """

    name: str
    rests_on: tuple[str, ...]
    derive: Callable[[ProofCase], str]

    def examine(self, case: ProofCase, before: dict[str, Claim]) -> Claim:
        """Derive the claim. One that rests on a claim that failed before fails with it."""
        lost = [name for name in self.rests_on if before[name].outcome is ClaimOutcome.FAILED]
        if lost:
            return Claim(self.name, ClaimOutcome.FAILED, f"it rests on '{lost[0]}', which failed")
        try:
            return Claim(self.name, ClaimOutcome.PROVED, self.derive(case))
        except NotThere as reason:
            return Claim(self.name, ClaimOutcome.NOT_COVERED, str(reason))
        except Broken as broken:
            return Claim(self.name, ClaimOutcome.FAILED, broken.why, broken.record)
        # Refusals of the functions that read each kind of record; their messages name it.
        except RaycloakError as refusal:
            return Claim(self.name, ClaimOutcome.FAILED, refusal.message, refusal.code)


CHECKS: Final = (
    ClaimCheck("manifest", (), run_claims.manifest),
    ClaimCheck("bundle", ("manifest",), run_claims.bundle),
    ClaimCheck("evidence log", ("manifest",), run_claims.log),
    ClaimCheck("ledger", ("manifest",), budget_claims.ledger),
    ClaimCheck("contract", ("evidence log", "ledger"), run_claims.contract),
    ClaimCheck("members' evidence", ("evidence log", "contract"), run_claims.evidence),
    ClaimCheck("key releases", ("evidence log", "members' evidence"), run_claims.keys),
    ClaimCheck("data", ("evidence log", "ledger", "contract"), run_claims.data),
    ClaimCheck("rosters", ("evidence log", "key releases", "data"), run_claims.rosters),
    ClaimCheck("documents", ("evidence log", "members' evidence", "rosters"), run_claims.documents),
    ClaimCheck("steps", ("contract", "rosters"), run_claims.steps),
    ClaimCheck("lineage", ("steps",), run_claims.lineage),
    ClaimCheck("epsilon", ("ledger", "contract"), budget_claims.epsilon),
    ClaimCheck("packages", ("steps", "epsilon"), output_claims.packages),
    ClaimCheck("released model", ("steps", "lineage"), output_claims.model),
    ClaimCheck("measurements", ("steps", "lineage"), output_claims.measurements),
    ClaimCheck("metrics.jsonl", ("steps", "measurements"), output_claims.metrics),
    ClaimCheck("verdict.json", ("steps", "epsilon", "measurements"), output_claims.verdict),
)
"""Every claim, after those that it rests on."""

LIMITS: Final = (
    "That the parameters are the result of the vectors: sums are masked, so only the members see them. The aggregators "
    "sign what they made of them, and their measured code answers for that. `raycloak replay` computes steps again.",
    "That the noise was drawn as planned: this rests on the measured code, which the evidence names.",
    "Of data that a client sends: that no example took part in more steps than the manifest's bound, and that the "
    "choice of examples followed from nothing they hold. The training service counts ids, and the ledger sees none.",
    "Times: each signer states them by its own clock, and nobody else confirms them.",
    "That the owner of the ledger's key keeps no second history: compare its head with a witness or another copy.",
    "Other accounts for the same data: the bundle has one account, and those that it exchanged epsilon with.",
    "That a nonce was fresh and unexpired when evidence answered it: the orchestrator's word. Each is used once here.",
    "Epsilons against other adversaries, evaluation results, times, byte counts and warnings in metrics.jsonl and "
    "verdict.json: nobody signs them, so they may have been edited. Of a bundle, the site signs that it gave them so.",
    "Every other file of a run directory, such as run.log: it is not read.",
    "The encrypted content of packages: `raycloak package verify` checks a package whole.",
)


def verify_bundle(path: Path, trust: Trust) -> Report:
    """Verify a bundle.

    Raises:
        ConfigError: ``bundle_file`` if it cannot be read.
    """
    try:
        parts = read_bundle(path)
    except Broken as broken:
        first = Claim("bundle", ClaimOutcome.FAILED, broken.why, broken.record)
        rest = [Claim(each.name, ClaimOutcome.FAILED, "it rests on 'bundle', which failed") for each in CHECKS]
        return Report("", (first, *(each for each in rest if each.name != first.name)), LIMITS)
    return verify_parts(parts, trust, path.name)


def verify_parts(parts: RecordParts, trust: Trust, bundle: str | None = None) -> Report:
    """Verify the parts of a run's record; ``bundle`` is the name of the file they come from, if they come from one."""
    case = ProofCase(parts, trust, bundle)
    found: dict[str, Claim] = {}
    for check in CHECKS:
        found[check.name] = check.examine(case, found)
    run_id = "" if found["manifest"].outcome is ClaimOutcome.FAILED else case.manifest.run_id
    return Report(run_id, tuple(found.values()), LIMITS)
