"""EvidenceOrchestrator in a vault."""

import time
from pathlib import Path

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import OrchestratorOpening
from raycloak.coordinator.vaults.platforms import platform_under
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.coordinator.vaults.settings import OrchestratorSettings, policy_not_served, require_apart
from raycloak.metrics.errors import RefusedError
from raycloak.workers.terms.manifest import Manifest

_LOG_FILE = "evidence.jsonl"


class OrchestratorVault(Hosted, RunOrchestrator):
    """A RunOrchestrator that answers calls.

    Guarantee: a vault of the machine keeps its state, reads secrets and writes logs where its settings say, and begins
    no session under another policy, whatever the relay names.
    """

    OPENING = OrchestratorOpening
    BESIDE = True

    def __init__(self, opening: OrchestratorOpening, inside: Inside) -> None:
        source = platform_under(inside, opening.simulated)
        settings = inside.settings
        self._settings = settings if isinstance(settings, OrchestratorSettings) else None
        state = opening.state_directory if self._settings is None else self._settings.state
        bind = opening.bind if self._settings is None else self._settings.bind
        RunOrchestrator.__init__(self, state, time.time, bind, source)

    def open_run(self, secret_file: str | None, run_id: str | None = None) -> tuple[str, SignerPublic]:
        if self._settings is not None and secret_file is not None:
            # What is checked is what is read: a link could be set anew in between.
            folder, file = self._settings.secrets, Path(secret_file).resolve()
            if folder is None or file.parent != Path(folder).resolve():
                raise RefusedError(
                    "secret_not_served",
                    f"the vault reads no run secret in {file.parent}.",
                    "Give the run none, or name that folder in the secrets of the orchestrator's settings.",
                )
            secret_file = str(file)
        return super().open_run(secret_file, run_id)

    def begin(self, terms: RunTerms[Manifest], session: str) -> None:  # type: ignore[override]  # of a run alone
        require_apart(self._settings, terms.policy)
        if self._settings is not None and terms.policy.digest().hex() not in self._settings.policies:
            raise policy_not_served()
        super().begin(terms, session)

    def finish(self, log_file: str, destroy: bool) -> None:
        super().finish(self._log_place(log_file), destroy)

    def export_log(self, log_file: str) -> None:
        super().export_log(self._log_place(log_file))

    def _log_place(self, log_file: str) -> str:
        """Return where a log is written: in a vault of the machine, beside the run's state."""
        if self._settings is None:
            return log_file
        folder = Path(self._settings.state) / "exports" / self._open.run_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._exported = folder / _LOG_FILE
        return str(self._exported)
