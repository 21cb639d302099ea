"""Admission of members: challenges them, has their evidence appraised, and does so again when it ages or is revoked.

It hides challenges and presentations. A worker that fails leaves; an aggregator that fails is replaced, since every
range needs one.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.control import START_AGAIN
from raycloak.coordinator.cluster.remote import AggregatorActor, WorkerActor
from raycloak.coordinator.membership.crew import aggregator_id
from raycloak.coordinator.membership.members import Departure, Members
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import EvidenceError, RunFailedError
from raycloak.workers.messages import Admission


@dataclass(slots=True)
class MemberAdmission:
    """Admits members to one run, and keeps their evidence fresh.

    Attributes:
        terms: what each worker presents itself for; newer collateral replaces the former.
        ranges: one per aggregator.
        base: folder that names of user code start from.
        newer: gives the collateral that evidence is judged by from now on; None if there is none but the first.
        revocations: counts them; see `raycloak.attestation.orchestrator.revocations.count_revocations`.
    """

    members: Members
    terms: Admission
    ranges: Sequence[ParameterRange]
    base: str
    newer: Callable[[], CollateralBundle] | None
    revocations: Callable[[], int]
    _serial: Iterator[int] = field(init=False)
    # The terms as workers are given them: written once for all, because collateral is megabytes.
    _shown: Reference[Admission] | None = None
    # When a review may find something new besides a revocation: a step costs no call for it.
    _review_at: float = -math.inf
    _seen_revocations: int = 0

    def __post_init__(self) -> None:
        # Behind those of the first aggregators, one per range.
        self._serial = itertools.count(len(self.ranges))

    def admit_founders(self) -> None:
        """Challenge, appraise and admit every worker and one aggregator per range.

        Nobody is waited for yet: what keeps workers out before the first step would keep others out too.

        Raises:
            RefusedError: ``too_few_workers``, with the code of each refusal.
        """
        self._admit_workers()
        if not self.members.enough:
            raise self.members.too_few()
        self.members.departures.check()
        for owned, actor in zip(self.ranges, self.members.aggregators, strict=True):
            self._admit_started(actor, owned)

    def challenge(self, worker: WorkerActor) -> Reference[Envelope]:
        """Ask a worker to present itself; returns the reference to its presentation."""
        challenge = self.members.control.orchestrator.challenge(worker.member_id, "worker")
        self._shown = self._shown or self.members.backend.put(self.terms)
        return worker.present(challenge, self._shown)

    def admit(self, member_id: str, envelope: Envelope) -> None:
        """Have a presentation appraised; errors as `EvidenceOrchestrator.admit`."""
        self.members.control.orchestrator.admit(envelope)
        self.members.presentations[member_id] = envelope

    def renew(self) -> None:
        """Admit every member anew, as each epoch needs it, and as evidence that ages does.

        A worker that fails leaves, and an aggregator that does is replaced. Fresh evidence is judged by newer
        collateral, by the orchestrator and by every worker, if there is any.
        """
        collateral = self.newer() if self.newer is not None else self.terms.collateral
        if collateral != self.terms.collateral:
            self.members.control.orchestrator.take_collateral(collateral)
            self.terms, self._shown = self.terms.model_copy(update={"collateral": collateral}), None
        self._admit_workers()
        for index, owned in enumerate(self.ranges):
            try:
                self._admit_aggregator(self.members.aggregators[index], owned)
            except ActorLost as lost:
                self.replace_aggregator(index, lost.cause)
            except EvidenceError as refusal:
                self.replace_aggregator(index, refusal.code)

    def review(self, *, now: bool = False) -> bool:
        """Remove every revoked member; returns whether the evidence of the others has to be renewed.

        Guarantee: between two steps every revocation so far is found; from then on a revoked member is sent nothing.

        Args:
            now: ask the orchestrator, whether or not there may be something new.
        """
        revocations, timer = self.revocations(), self.members.timer
        if not now and revocations == self._seen_revocations and timer.now() < self._review_at:
            return False
        found = self.members.control.orchestrator.review()
        # Counted before asking: a revocation in between makes the next look ask again.
        self._seen_revocations = revocations
        # Evidence that is about to be renewed will be new at the next look, which tells when it ages.
        wait_s = math.inf if found.renew_in_s is None else found.renew_in_s
        self._review_at = -math.inf if found.ages else timer.now() + wait_s
        indices = {actor.member_id: index for index, actor in enumerate(self.members.aggregators)}
        for member_id, message in found.revoked:
            if member_id in self.members.workers:
                self.members.lose(member_id, "revoked", message)
            elif member_id in indices:
                self.replace_aggregator(indices[member_id], "revoked")
        return found.ages

    def replace_aggregator(self, index: int, code: str) -> None:
        """Stop the aggregator of range ``index`` and admit a new one in its place."""
        members, owned = self.members, self.ranges[index]
        lost = members.aggregators[index]
        members.backend.stop(lost)
        members.presentations.pop(lost.member_id, None)
        members.depart(Departure(lost.member_id, code, "another took its place"), newcomer=False)
        successor = members.backend.start_aggregator(aggregator_id(owned.index, next(self._serial)))
        try:
            self._admit_aggregator(successor, owned)
        except ActorLost:
            # Ray may place it on the node whose death ended its predecessor; by now it knows that the node is gone.
            members.backend.stop(successor)
            successor = members.backend.start_aggregator(aggregator_id(owned.index, next(self._serial)))
            self._admit_started(successor, owned)
        members.aggregators[index] = successor

    def _admit_workers(self) -> None:
        # All are challenged before the first answer is waited for: they collect evidence side by side.
        asked = {member_id: self.challenge(actor) for member_id, actor in self.members.workers.items()}
        self.members.collect(asked, self.admit)

    def _admit_started(self, actor: AggregatorActor, owned: ParameterRange) -> None:
        try:
            self._admit_aggregator(actor, owned)
        except ActorLost as lost:
            raise RunFailedError(
                "unreachable", f"{actor.member_id} could not be started ({lost.cause}).", START_AGAIN
            ) from None

    def _admit_aggregator(self, actor: AggregatorActor, owned: ParameterRange) -> None:
        members = self.members
        challenge = members.control.orchestrator.challenge(actor.member_id, "aggregator")
        reference = actor.present(challenge, self.terms.manifest, owned, self.base)
        self.admit(actor.member_id, members.backend.fetch(reference, members.config.failure.admission_deadline_s))
