"""One run under examination: its parts, what the auditor trusts, and what the claims have established so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from raycloak.attestation.core.lineage import ModelPoint
from raycloak.attestation.core.messages import parse_stored
from raycloak.attestation.core.roster import Query
from raycloak.attestation.log.evidence_log import ExportedLog
from raycloak.attestation.orchestrator.documents import Document
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.ledger.audit import AuditedRun
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.export import CheckedExtract, check_extract
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.proof.bundle import BATCHES, LEDGER, MANIFEST, RecordParts
from raycloak.coordinator.proof.claims import Broken
from raycloak.coordinator.proof.history import History
from raycloak.coordinator.proof.trust import Trust
from raycloak.coordinator.record.batch_files import Digests, sent_sets
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released
from raycloak.workers.terms.step_input import step_input


@dataclass(frozen=True, slots=True)
class OwnClaim:
    """The epsilon that a run may claim (docs/proofs/005).

    Attributes:
        steps: how many of the plan's steps the cap allowed when the run was registered.
        within: of the plan as far as that cap reached, fixed before the first step.
        whole: of the whole plan, which the run claims once it was charged beyond that cap.
    """

    steps: int
    within: float
    whole: float

    def least(self, steps: int) -> float:
        """Return the least that may be claimed of so many steps."""
        return self.within if steps <= self.steps else self.whole


@dataclass
class ProofCase:
    """The state that claims share. Each field but the first three is set by the claim that establishes it.

    Attributes:
        bundle: name of the bundle; None for a run directory, which has no index.
        released: what the measurements released, by query and number, in order.
    """

    parts: RecordParts
    trust: Trust
    bundle: str | None
    log: ExportedLog = field(init=False)
    documents: Mapping[bytes, Document] = field(init=False)
    history: History = field(init=False)
    packages: dict[str, PackageManifest] = field(default_factory=dict)
    released: Mapping[tuple[Query, int], Released] = field(default_factory=dict)

    @cached_property
    def manifest(self) -> Manifest:
        """The run's manifest, parsed; whether it is the one that others signed for is a claim of its own."""
        try:
            return parse_stored(Manifest, self.parts.line(MANIFEST), MANIFEST)
        # Of a former format too: a record with a changed byte may look like one.
        except (ConfigError, ProtocolError) as refusal:
            raise Broken(MANIFEST, refusal.message) from None

    @cached_property
    def extract(self) -> CheckedExtract:
        """The account's entries, of a ledger that the auditor trusts; BudgetError ``chain_broken``."""
        return check_extract(self.parts.lines(LEDGER), self.trust.ledger)

    @cached_property
    def run(self) -> AuditedRun:
        """The run, as the ledger has it."""
        run = self.extract.audited.runs.get(self.manifest.run_id)
        if run is None:
            raise Broken("ledger", f"it has no run {self.manifest.run_id}")
        return run

    @cached_property
    def own_claim(self) -> OwnClaim:
        """The epsilon that the run may claim, by its manifest and the cap of its registration."""
        registered, computation = self.run.registered, self.manifest.computation
        run = Schedule(computation.mechanism, computation.measurements)
        delta = self.extract.audited.accounts[self.manifest.account].terms.delta
        steps, measured = run.reach(registered.epsilon_cap, delta, registered.orders)
        within, whole = (
            epsilon_against(run.mechanism, 0, delta, made, run.measured(after))
            for made, after in ((steps, measured), (run.mechanism.steps, run.mechanism.steps))
        )
        # An accountant's grid may put the cost of a part slightly above that of the whole.
        return OwnClaim(steps, min(within, whole), whole)

    def charge(self, sequence: int) -> StepCharged:
        """Return the charge that is the ledger's entry ``sequence``."""
        event = self.extract.entries[sequence].event
        assert isinstance(event, StepCharged), "the audit filed it as a charge"
        return event

    def parameters_after(self, steps: int) -> bytes | None:
        """Return the digest of the parameters that the next step starts from; None if the steps were not committed."""
        if (load := self.history.loaded_after.get(steps)) is not None:
            return load.model_digest
        if steps == 0:
            return self.manifest.computation.initial_parameters
        commit = self.history.commits.get(("gradient", steps - 1))
        return commit.released_digest if commit else None

    def model_after(self, steps: int) -> ModelPoint | None:
        """Return the model that the next step starts from, as :meth:`parameters_after`."""
        load = self.history.loaded_after.get(steps)
        commit = self.history.commits.get(("gradient", (load.step if load else steps) - 1))
        if commit is not None:
            return commit.model
        return ModelPoint.initial(self.manifest.computation.initial_parameters) if steps == 0 else None

    def exported_after(self, steps: int) -> bytes | None:
        """Return the digest of the weights that are evaluated, measured and exported after ``steps``; None as above."""
        model = self.model_after(steps)
        return model.exported if model else None

    def started_from(self, charged: bytes, finished: int, query: Query) -> bool:
        """Return whether a charge was for the parameters after ``finished`` steps, and for batches that were kept.

        The digest that was charged is signed. So nobody can name other batches for it than those it was made of.
        """
        parameters = self.parameters_after(finished) if query == "gradient" else self.exported_after(finished)
        if parameters is None:
            return False
        sent = self._sent_sets.get(finished, ()) if query == "gradient" else ()
        before = b""
        if query == "gradient" and finished and self.manifest.computation.mechanism.bands > 1:
            before = self.charge(self.run.charges["gradient"][finished - 1]).input_digest
        return any(step_input(parameters, batches, before) == charged for batches in ((), *sent))

    @cached_property
    def _sent_sets(self) -> Mapping[int, tuple[Digests, ...]]:
        """The batches that a client sent, by step, as the run's directory names them."""
        if BATCHES not in self.parts:
            return {}
        try:
            return sent_sets(self.parts.lines(BATCHES))
        except ProtocolError as refusal:
            raise Broken(BATCHES, refusal.message) from None

    @property
    def steps(self) -> int:
        """The number of committed training steps."""
        return self.history.made["gradient"]

    def may_wait_for_its_commit(self, query: Query, number: int) -> bool:
        """Return whether a measurement may have been decoded although the log has no commit: its vectors are bound.

        Its commit comes with the next step's. A kill between the two leaves it to a resume.
        """
        is_bound = query != "gradient" and number in self.run.bound.get(query, {})
        return is_bound and not self.history.finished

    @property
    def resting_steps(self) -> Sequence[int]:
        """The numbers of steps that the run may have stopped after, the last first; one for a run that has ended.

        A resume repeats committed steps from its newest package on, and may be stopped among them.
        """
        return range(self.steps, self.steps - 1 if self.history.finished else 0, -1)
