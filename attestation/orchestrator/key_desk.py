"""The desk that releases keys to entitled members, and logs each release before it leaves.

Guarantee: a key leaves only for a member whose evidence is accepted and not expired. It is sealed to the key that the
evidence binds, no more often than its quota, and only after the log has the release. The member gets the proof of that.
A key of sealed training examples leaves only for a run whose manifest meets their owner's demand. No machine gets more
virtual workers' keys of one epoch than the terms say: see `raycloak.attestation.orchestrator.machine_book`. All
releases of a session are under the policy that the session began with. A refused release is logged, or counted in the
log, before the member hears of the refusal: see `raycloak.attestation.orchestrator.refusal_log`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyContract, KeyPackage, KeyRelease, released_body, seal_package
from raycloak.attestation.log.entries import Entry
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.log.watch import forked
from raycloak.attestation.orchestrator.admissions import Admissions, AdmittedMember
from raycloak.attestation.orchestrator.hosting import RunHosting
from raycloak.attestation.orchestrator.refusal_log import RefusalLog
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.orchestrator.state import SessionId
from raycloak.attestation.policy.key_policy import KeyKind, KeyPolicy
from raycloak.attestation.sealed.sealed_data import SliceKeys
from raycloak.metrics.errors import EvidenceError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.orchestrator import OpenRun


@dataclass(slots=True)
class AskedKeys:
    """The keys that are asked for: a refusal is logged under the kind that it is about."""

    kind: KeyKind


@contextmanager
def refusals_logged(
    refusals: RefusalLog, transaction: Callable[[], AbstractContextManager[None]], member_id: str, kind: KeyKind
) -> Iterator[AskedKeys]:
    """Log a refusal to release keys to ``member_id`` that is raised inside, as ``release_refused``.

    Guarantee: before the refusal leaves, the entry is durable or part of the caller's transaction. Beyond its budget,
    ``refusals`` counts the refusal instead. A ``transaction`` that was open inside is undone.

    Args:
        kind: of the keys. A caller that releases several kinds sets the one that it has come to.
    """
    asked = AskedKeys(kind)
    try:
        yield asked
    except EvidenceError as refusal:
        with transaction():
            refusals.append("release_refused", member_id, refusal.code, kind=asked.kind.value)
        raise


class Grant(NamedTuple):
    """A release that is logged but not proved yet: one head that is signed later proves many at once.

    Attributes:
        packages: by kind of key, with its entry in the log, in the order in which the member opens them.
        seen: entries under the newest head that the member was shown.
    """

    packages: Mapping[KeyKind, tuple[Envelope, Entry]]
    seen: int

    def proved(self, log: EvidenceLog) -> KeyRelease:
        """Return the release, with the proof that ``log`` has it and extends what the member has seen."""
        # All are under one head, so only the first package that the member opens has to prove that this head extends
        # what it has seen.
        extends = log.prove_extends(self.seen, len(log))
        shown: dict[KeyKind, KeyRelease] = {}
        for kind, (package, entry) in self.packages.items():
            shown[kind] = KeyRelease(package=package, proof=log.prove(entry).encode(), extends=extends)
            extends = ()
        beside = {"slices": shown.get(KeyKind.DATASET), "evaluation": shown.get(KeyKind.EVALUATION)}
        return shown[KeyKind.VIRTUAL_WORKER].model_copy(update=beside)


class _Logged(NamedTuple):
    """A release that is in the log, and is to be sealed to its receiver."""

    package: KeyPackage
    plaintext: bytes
    receiver: AdmittedMember
    entry: Entry


class KeyDesk:
    """The keys face of a session: it releases the keys of the run to admitted workers.

    Args:
        run: its identity key signs each package.
        terms: of the session; its releases stay under the policy that it began with.
        hosting: told who has the keys of which virtual workers.

    Raises:
        ConfigError: if sealed data that ``terms`` name cannot be opened.
    """

    def __init__(
        self,
        run: "OpenRun",
        session: SessionId,
        terms: RunTerms[KeyContract],
        admissions: Admissions,
        hosting: RunHosting,
    ) -> None:
        self._run = run
        self._books = run.books
        self._transaction = partial(run.books.transaction_of, session)
        self._session = session.name
        self._terms = terms
        self._admissions = admissions
        self._hosting = hosting
        self._slices = {
            KeyKind.DATASET: SliceKeys.open(terms.sealed, "training") if terms.sealed else None,
            KeyKind.EVALUATION: SliceKeys.open(terms.evaluation, "evaluation") if terms.evaluation else None,
        }
        contract = terms.contract
        self._key_context = contract.key_context
        # All members of an epoch are told the same, and hardly any two epochs are under way at once.
        self._commitments = lru_cache(maxsize=4)(partial(run.keys.commitments, self._key_context, contract.key_owners))
        self._key_policies = {kind: KeyPolicy.of(kind, terms.policy, contract.keys_per_machine) for kind in KeyKind}
        # From the log, not from the terms: a restarted driver may bring another policy to the same session.
        begun = next(self._books.log.newest("session")).content
        self._policy_of_session = bytes.fromhex(begun["policy_digest"])

    def release(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> KeyRelease:
        """Seal the keys of ``virtual_workers`` in ``epoch`` to an admitted worker, logged before they leave.

        Args:
            seen: entries under the newest head of the log that the member was shown.

        Returns:
            The sealed keys, and the proof that the log has the release and extends what the member has seen.

        Raises:
            EvidenceError: ``release_denied`` if the member is not an admitted worker, or its evidence has expired,
                served another epoch or was appraised by another policy. Also raised if a key was drawn as often as its
                quota says, or if its machine would get keys of more virtual workers than the terms allow.
                ``sealed_demand`` if training examples are sealed for other terms than the run's manifest states.
                ``code_unlisted`` if they are sealed for a policy that does not list the code of the run.
                ``log_forked`` if the member has seen more of the log than there is. The log has the refusal.
        """
        return self.grant(member_id, epoch, virtual_workers, seen).proved(self._books.log)

    def grant(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> Grant:
        """Release keys as :meth:`release`, for a caller that proves several grants later under one signed head.

        Guarantee: the log has all releases of one grant or none. A refused one uses up no quota of a key.
        """
        logged: dict[KeyKind, _Logged] = {}
        log_refusal = refusals_logged(self._books.refusals, self._transaction, member_id, KeyKind.VIRTUAL_WORKER)
        with log_refusal as asked, self._transaction():
            if seen > len(self._books.log):
                raise forked(f"{member_id} has seen {seen} entries, and there are {len(self._books.log)}")
            # Keys of examples first, as the member opens them first.
            for kind in (KeyKind.DATASET, KeyKind.EVALUATION, KeyKind.VIRTUAL_WORKER):
                asked.kind = kind
                if kind is KeyKind.VIRTUAL_WORKER or self._slices[kind] is not None:
                    logged[kind] = self._log_release(kind, member_id, epoch, virtual_workers)
            admitted = logged[KeyKind.VIRTUAL_WORKER].receiver
            # Last, because the member's epoch is also in memory, where no rollback takes it back.
            self._admissions.keep(replace(admitted.row, epoch=epoch))
        # Only now: a refused release leaves the hosting as it was.
        self._hosting.released(member_id, virtual_workers)
        # Sealed after the transaction: that takes time, and nobody else can write meanwhile.
        packages = {
            kind: (seal_package(package, plaintext, receiver.presentation.hpke_key, self._run.identity), entry)
            for kind, (package, plaintext, receiver, entry) in logged.items()
        }
        return Grant(packages, seen)

    def held_by_machine(self, epoch: int) -> dict[str, Mapping[str, tuple[int, ...]]]:
        """Return by admitted worker, and by name of its machine, whose keys of ``epoch`` went there in any session."""
        return self._books.machines.held(self._admissions.workers(), epoch)

    def draw_checkpoint_key(self, info: bytes) -> None:
        """Count and log that the data key of a sealed package of the run leaves.

        Args:
            info: what the key is bound to; it names the package.

        Raises:
            EvidenceError: ``release_denied`` if the key was drawn as often as its quota says.
        """
        name, terms = digest(info).hex(), self._key_policies[KeyKind.CHECKPOINT]
        with refusals_logged(self._books.refusals, self._transaction, "", terms.kind), self._transaction():
            self._books.draws.draw(terms, 0, (name,), self._session, "")
            self._books.log.append(
                "opened", {"kind": terms.kind.value, "package": name, "policy": terms.digest().hex()}
            )

    def _log_release(self, kind: KeyKind, member_id: str, epoch: int, virtual_workers: tuple[int, ...]) -> _Logged:
        """Count and log the release of keys of ``kind`` to an entitled member, in the caller's transaction."""
        key_terms = self._key_policies[kind]
        slices = self._slices.get(kind)
        if slices is not None:
            slices.require_policy(key_terms.evidence_policy)
            manifest = self._terms.contract.encode(), self._terms.manifest_digest
            slices.require_code(self._terms.policy, *manifest)
            slices.require_demand(*manifest)
        admitted = self._entitled(member_id, epoch, key_terms)
        if slices is not None:
            keys, commitments = [slices.of(v) for v in virtual_workers], slices.header.key_commitments
        else:
            of_run = [self._run.keys.of(self._key_context, v, epoch) for v in virtual_workers]
            keys, commitments = [part for key in of_run for part in (key.stream, key.data)], self._commitments(epoch)
        package = KeyPackage(
            kind=kind,
            run_id=self._run.keys.run_id,
            session=self._session,
            member_id=member_id,
            manifest_digest=self._terms.manifest_digest,
            policy_digest=key_terms.digest(),
            nonce=admitted.presentation.nonce,
            evidence_digest=admitted.appraisal.evidence_digest,
            epoch=epoch,
            virtual_workers=virtual_workers,
            commitments=commitments,
            ciphertext=b"",
        )
        self._books.draws.draw(key_terms, epoch, map(str, virtual_workers), self._session, member_id)
        if kind is KeyKind.VIRTUAL_WORKER:
            self._books.machines.give(admitted.appraisal, epoch, virtual_workers, key_terms.keys_per_machine)
        entry = self._books.log.append("released", released_body(package))
        return _Logged(package, b"".join(key.reveal() for key in keys), admitted, entry)

    def _entitled(self, member_id: str, epoch: int, terms: KeyPolicy) -> AdmittedMember:
        admitted = self._admissions.find(member_id)
        if admitted is None or admitted.appraisal.role != terms.role:
            raise EvidenceError("release_denied", f"{member_id} is not an admitted worker")
        if epoch >= (count := self._terms.contract.epochs):
            raise EvidenceError("release_denied", f"there are keys of {count} epochs, none of {epoch}")
        if not terms.evidence_policy == admitted.appraisal.policy_digest == self._policy_of_session:
            raise EvidenceError(
                "release_denied",
                f"the policy was changed since {member_id} was appraised, or since the session began",
                "Start a new run under the new policy.",
            )
        if admitted.appraisal.expires_at <= self._run.now():
            raise EvidenceError("release_denied", f"the evidence of {member_id} expired", "Present fresh evidence.")
        if admitted.row.epoch not in (None, epoch):
            raise EvidenceError(
                "release_denied",
                f"the evidence of {member_id} was for epoch {admitted.row.epoch}, not {epoch}",
                "Present fresh evidence.",
            )
        return admitted
