"""The conditions of a resume: same configuration, same manifest, no ledger that was put back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.config.run import RunConfig
from raycloak.metrics.errors import BudgetError, RefusedError
from raycloak.workers.terms.manifest import Manifest

OPERATIONAL = frozenset(
    {
        "num_workers",
        "min_workers",
        "max_workers",
        "aggregators",
        "failure",
        "placement",
        "checkpoint",
        "metrics",
        "key_service",
        "callbacks",
        "loggers",
    }
)
"""Fields of a configuration that may differ when a run is resumed: where and how it computes, never the result. So may
the ledger's witness, since the ledger itself stays the same. The manifest has the part of a key service that must
stay."""


def require_same_config(before: RunConfig, now: RunConfig) -> None:
    """Refuse to resume with another configuration.

    Raises:
        RefusedError: ``resume_differs``; names every field that differs, with both values.
    """
    exclude: dict[str, bool | set[str]] = {**dict.fromkeys(OPERATIONAL, True), "ledger": {"witness"}}
    old, new = (each.model_dump(mode="json", exclude=exclude) for each in (before, now))
    _refuse(differences(old, new), "the configuration")


def require_same_manifest(before: Manifest, now: Manifest) -> None:
    """Refuse to resume with other code, data, libraries, ledger or policy.

    Guarantee: returns only if the two manifests have the same digest.

    Raises:
        RefusedError: ``resume_differs``; names every item that differs, with both values.
    """
    found = differences(before.model_dump(mode="json"), now.model_dump(mode="json"))
    # The simulator's policy names the code that its members run, so a newer raycloak shows as another policy.
    own = any(each.startswith("policy_digest ") for each in found)
    _refuse(found, "the run's manifest" + (", by another policy or another version of raycloak," if own else ""))


def require_ledger(commits: Iterable[StepCommit], hash_at: Callable[[int], bytes | None]) -> None:
    """Refuse a ledger that is behind the evidence log, or is another ledger.

    Guarantee: returns only if the ledger has the newest entry that the evidence log knows of, and so, as its entries
    are chained, all before it.

    Args:
        commits: every committed step.
        hash_at: hash of the ledger's entry at a position; None beyond its end.

    Raises:
        BudgetError: ``ledger_rolled_back``; names the step and both values.
    """
    newest = max(commits, key=lambda commit: commit.ledger_sequence, default=None)
    if newest is None:
        return
    found = hash_at(newest.ledger_sequence)
    if found != newest.ledger_hash:
        raise BudgetError(
            "ledger_rolled_back",
            f"the evidence log saw step {newest.step} bound by the ledger's entry {newest.ledger_sequence} with hash "
            f"{newest.ledger_hash.hex()}; the ledger has {found.hex() if found else 'no such entry'}.",
            "Put the ledger's newest file back; an older one forgets what was spent.",
        )


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """List every leaf in which two trees of plain data differ, as ``path: before, now``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = sorted({*before, *now})
        return [
            line for key in keys for line in differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}[{index}]")]
    return [] if before == now else [f"{path} was {_shown(before)}, now {_shown(now)}"]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse(found: list[str], what: str) -> None:
    if found:
        raise RefusedError(
            "resume_differs",
            f"{what} changed since the run began: {'; '.join(found)}.",
            "Restore it, or start a new run: it draws fresh noise and is charged in full.",
        )
