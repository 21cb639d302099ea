"""The succession of a run's models: the model after each step, by commit or by load, and who must have signed it."""

from typing import NoReturn

from raycloak.attestation.core.lineage import Lineage, ModelPoint, OpenedRelease, open_release
from raycloak.attestation.orchestrator.commits import CommitBook, StepCommit
from raycloak.attestation.orchestrator.loads import LoadBook
from raycloak.attestation.orchestrator.state import SessionId
from raycloak.metrics.errors import ProtocolError


class Succession:
    """The models of one run under its lineage; without one, whoever drives the run makes them.

    Args:
        run_id, manifest_digest: of the rosters whose aggregators may sign.
    """

    def __init__(
        self, commits: CommitBook, loads: LoadBook, lineage: Lineage | None, run_id: str, manifest_digest: bytes
    ) -> None:
        self._commits = commits
        self._loads = loads
        self._lineage = lineage
        self._own = run_id, manifest_digest

    def record(self, commits: tuple[StepCommit, ...], session: SessionId) -> None:
        """Record commits one after the other, in a transaction of the caller's, as `CommitBook.record`.

        Guarantee: under a lineage, a step is committed only with what the aggregators of a roster of that step signed,
        made of the model that the run had before it.

        Raises:
            ProtocolError: ``lineage_missing`` without a release, ``lineage_broken`` if it is of another step or model;
                as `raycloak.attestation.core.lineage.open_release`, or as `CommitBook.record`.
        """
        for commit in commits:
            if self._lineage is not None:
                self._require(commit, self._lineage)
            self._commits.record((commit,), session)

    def after(self, finished_steps: int) -> ModelPoint:
        """Return the model after so many steps; of several loads there, the last one counts.

        Raises:
            ProtocolError: ``not_committed``.
        """
        if self._lineage is not None and finished_steps == 0:
            return ModelPoint.initial(self._lineage.initial_parameters)
        loads = [load for load in self._loads.all() if load.after_step == finished_steps]
        committed = self._commits.of((loads[-1].step if loads else finished_steps) - 1)
        if committed is None:
            raise ProtocolError("not_committed", f"step {finished_steps - 1} of this run was not committed")
        return committed.model

    def _require(self, commit: StepCommit, lineage: Lineage) -> None:
        name = f"{commit.query} step {commit.step}"
        if commit.released is None:
            raise ProtocolError("lineage_missing", f"{name} comes without what its aggregators signed.")
        key, (run_id, manifest_digest) = lineage.orchestrator_key, self._own
        found = open_release(commit.released, orchestrator_key=key, run_id=run_id, manifest_digest=manifest_digest)
        if (found.query, found.step, found.binding) != (commit.query, commit.step, commit.ledger_hash):
            _broken(f"{name} comes with the release of another step, or of other vectors.")
        if found.after != commit.model:
            _broken(f"{name} gives another result than its aggregators signed.")
        if not self._follows(found, lineage):
            _broken(f"{name} started from a model that the run did not have by then.")

    def _follows(self, found: OpenedRelease, lineage: Lineage) -> bool:
        """Return whether a release was made of a model that the run had: the one right before, for a training step."""
        if found.query == "gradient":
            return found.before == self.after(found.step)
        # Which step a measurement comes before is in the manifest; the ledger charges it for the newest model alone.
        model = found.before.parameters
        return model == lineage.initial_parameters or self._commits.gave(model)


def _broken(message: str) -> NoReturn:
    raise ProtocolError("lineage_broken", message)
