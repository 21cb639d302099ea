"""Open runs and their sessions: which members take part, and which keys they get.

The orchestrator of a run holds the run secret. It issues challenges, appraises evidence, releases virtual-worker keys
to admitted workers and signs one roster per attempt. It writes every decision to the evidence log before the decision
takes effect. It never sees data, gradients or masked sums.

    open_run(...)  ->  OpenRun     identity, key commitments, books       before the manifest is known
    .begin(terms)  ->  RunSession  .admission  .keys  .packages, steps    from then on

Two objects, because the manifest names the orchestrator's key and commits to the run's keys, while evidence is for a
manifest: the run has to be open before the terms of its session exist. Both are plain classes for one caller at a time.

The process may die at any moment. A new instance that opens the run again and begins the same session resumes it, and
every question may be asked again. `attestation/orchestrator/books.py` holds everything that must survive.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from raycloak.attestation.appraisal.mutual import present_orchestrator
from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.lineage import ModelStanding
from raycloak.attestation.core.mask_graph import MAX_ATTEMPTS_PER_STEP, draw_circle
from raycloak.attestation.core.messages import Envelope, open_envelope, parse, seal
from raycloak.attestation.core.roster import MaskCircle, Member, Query, Roster, RosterMembers
from raycloak.attestation.keys.release import KeyContract, RunKeys, commitments_digest
from raycloak.attestation.keys.run_secret import create_secret, destroy_secret, kept_secret, load_secret, run_id_of
from raycloak.attestation.orchestrator.admissions import Admissions
from raycloak.attestation.orchestrator.books import RunBooks
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.orchestrator.documents import DOCUMENTS_FILE, Document
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder, place_order
from raycloak.attestation.orchestrator.hosting import RunHosting
from raycloak.attestation.orchestrator.key_desk import KeyDesk
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.attestation.orchestrator.package_desk import PackageDesk
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.orchestrator.state import SessionId, state_file
from raycloak.attestation.orchestrator.succession import Succession
from raycloak.attestation.sealed.package_keys import run_recipient_key
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError
from raycloak.metrics.proof_bounds import require_assertions

# The form of `run_id_of`. Any other text could lead out of the folder.
_RUN_ID: Final = re.compile(r"[0-9a-f]{16}")


def open_run(
    state_directory: str, clock: Callable[[], float], secret_file: str | None, run_id: str | None = None
) -> "OpenRun":
    """Read the run secret, or generate one, and open the books of its run.

    Args:
        state_directory: local directory for ``<run id>.sqlite`` and generated secrets; created 0700. The site's package
            signer lives beside it, in ``signer/``.
        clock: seconds since the epoch; a parameter so that tests own the time.
        secret_file: the user's own secret; None for a generated one.
        run_id: opens a run that exists, with the secret that was generated for it unless a file is given.

    Raises:
        ConfigError: ``run_secret`` if the file cannot be used or is another run's, ``run_unknown``,
            ``secret_destroyed``.
        EvidenceError: ``log_broken``.
    """
    directory = Path(state_directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if run_id is not None and not (_RUN_ID.fullmatch(run_id) and state_file(directory, run_id).is_file()):
        raise ConfigError("run_unknown", f"there is no run '{run_id}' in {directory}.", "Check RAYCLOAK_HOME.")
    generated: Path | None = None
    if secret_file is not None:
        secret = load_secret(Path(secret_file))
    elif run_id is not None:
        generated, secret = kept_secret(directory, run_id)
    else:
        generated, secret = create_secret(directory)
    if run_id not in (None, run_id_of(secret)):
        raise ConfigError(
            "run_secret",
            f"{secret_file} is the secret of run {run_id_of(secret)}, not of {run_id}.",
            "Give the file that the run began with.",
        )
    return OpenRun(directory, secret, clock, generated=generated, is_new=run_id is None)


class OpenRun:
    """A run whose secret was read and whose books are open; it begins sessions, and it ends the run.

    Args:
        directory: of the books.
        generated: the file of a secret that was generated; None for a secret of the user's own.
        is_new: whether the next session is a new one, whatever its name.

    Attributes:
        identity: the key that certifies channels and signs packages, rosters and orders.
        public: the keys that members verify by: that of ``identity``, and the log's ML-DSA key.
        keys: the virtual-worker keys.
        recipient_key: opens packages that are sealed to the run.
        signer_folder: holds the site's package signer.
    """

    def __init__(
        self, directory: Path, secret: Secret, clock: Callable[[], float], *, generated: Path | None, is_new: bool
    ) -> None:
        require_assertions()
        self.run_id = run_id_of(secret)
        seed = derive(secret, Purpose.ORCHESTRATOR_IDENTITY)
        signer = HybridSigner(seed, derive(secret, Purpose.ORCHESTRATOR_ML_DSA))
        self.identity = IdentityKey.from_seed(seed)
        self.public = signer.public
        self.keys = RunKeys(secret, self.run_id)
        self.recipient_key = run_recipient_key(secret)
        self.signer_folder = directory.parent / "signer"
        self.books = RunBooks(state_file(directory, self.run_id), self.run_id, signer)
        self._clock = clock
        self._generated = generated
        # A run that is opened as new may be under way elsewhere; that session ends when the next one begins.
        self._is_new = is_new
        self._session = SessionId()

    def now(self) -> int:
        """Return the time in unix seconds."""
        return int(self._clock())

    def key_commitments(self, key_context: bytes, virtual_workers: int, epochs: int) -> tuple[bytes, ...]:
        """Return, per epoch, the digest of the commitments to all its keys, for the manifest."""
        return tuple(
            commitments_digest(self.keys.commitments(key_context, virtual_workers, epoch)) for epoch in range(epochs)
        )

    def begin(self, terms: RunTerms[KeyContract], session: str) -> "RunSession":
        """Fix the terms of the run, and start a session or resume it.

        Args:
            session: text that the driver draws for one execution of the run. The session on disk is resumed: members
                whose evidence is still valid, their epochs and the ratchet are restored. Any other starts afresh.

        Raises:
            ProtocolError: ``policy_mismatch`` if the policy is not the one that the manifest names. Under a laxer one,
                keys that derive from the manifest could leave for evidence that it does not accept.
            EvidenceError: ``machine_book_missing`` if the run was charged beside another state folder, and the terms
                bound the keys of a machine.
        """
        contract = terms.contract
        if terms.policy.digest() != contract.policy_digest:
            raise ProtocolError("policy_mismatch", "the policy is not the manifest's")
        with self.books.state.transaction():
            self.books.machines.require_known(terms.charged, contract.key_owners, contract.keys_per_machine)
        self._session = SessionId(session, terms.manifest_digest)
        if self._is_new or not self.books.state.is_current(self._session):
            self._start_session(terms)
        self._is_new = False
        return RunSession(self, self._session, terms)

    def most_hosted(self) -> int:
        """Return the most virtual workers whose keys of one epoch one machine received, in any session of the run."""
        return self.books.machines.most()

    def finish(self, log_file: str, destroy: bool) -> None:
        """Export the log with its signed head, and destroy a generated secret if asked.

        A run that failed is finished too, even if it has begun no session. A repeat adds nothing to the log, and does
        what may be missing of the rest.
        """
        state = self.books.state
        # Decided once and kept on disk, so that a repeat after a crash does not decide otherwise.
        destroys = None if self._is_new else state.destroys(self._session)
        self._is_new = False
        if destroys is None:
            destroys = destroy and self._generated is not None
            with state.transaction():
                self.books.refusals.settle()
                self.books.log.append("finished", {"secret_destroyed": destroys})
                state.finish_session(self._session, destroys)
        # After the transaction, so that the file has the entry ``finished``.
        self._export(Path(log_file))
        # Last, as nobody can open the run afterwards: a crash before this line leaves a run that can be finished again.
        if destroys and self._generated is not None and self._generated.exists():
            destroy_secret(self._generated)

    def export_log(self, log_file: str) -> None:
        """Write the log so far, with its signed head, of a run that is not finished."""
        self.books.refusals.settle()
        self._export(Path(log_file))

    def _export(self, log_file: Path) -> None:
        self.books.log.export(log_file)
        # After the log: every document that the exported entries name is there by then.
        self.books.state.export_documents(log_file.with_name(DOCUMENTS_FILE))

    def close(self) -> None:
        """Close the books; another instance may open the run."""
        self.books.close()

    def _start_session(self, terms: RunTerms[KeyContract]) -> None:
        with self.books.state.transaction():
            # A challenge of the session before must not admit anybody to this one.
            self.books.nonces.forget_unused()
            # Before the entry of this session: in its log, a member's revocation would be about its namesake here.
            self.books.revocations.record()
            self.books.state.start_session(self._session)
            self.books.state.keep_document(Document.of(terms.policy))
            body = {
                "session": self._session.name,
                "manifest_digest": terms.manifest_digest.hex(),
                "policy_digest": terms.policy.digest().hex(),
            }
            self.books.log.append("session", {**body, "virtual_workers": terms.contract.key_owners})


class RunSession:
    """One session of a run. It decides on the steps itself, and on all else through its three faces.

    A step concerns all members at once, so rosters, orders, data commitments and commits belong to no face.

    Attributes:
        run: the open run that it is a session of.
        hosting: which virtual workers each member hosts.
        admission: challenges, appraisals and members.
        keys: releases to admitted workers.
        packages: sealed packages.
    """

    def __init__(self, run: OpenRun, session: SessionId, terms: RunTerms[KeyContract]) -> None:
        self.run = run
        self._books = run.books
        self._id = session
        self._terms = terms
        self.hosting = RunHosting()
        models = terms.contract.lineage, run.run_id, terms.manifest_digest
        self._models = Succession(run.books.commits, run.books.loads, *models)
        self._members: tuple[tuple[Member, ...], Document] | None = None
        self._circle: tuple[object, MaskCircle | None] | None = None
        self.admission = Admissions(run, session, terms, self.hosting)
        self.keys = KeyDesk(run, session, terms, self.admission, self.hosting)
        self.packages = PackageDesk(run, terms.manifest_digest, self.keys.draw_checkpoint_key)

    def present(self, source: EvidenceSource) -> Envelope:
        """Return the orchestrator's own evidence for the manifest of the session; see
        `raycloak.attestation.appraisal.mutual`."""
        return present_orchestrator(self.run.identity, self.run.run_id, self._terms.manifest_digest, source)

    def record_data(self, envelope: Envelope) -> None:
        """Record a worker's data commitments; the first of each virtual worker binds the run.

        Raises:
            EvidenceError: ``data_changed`` if a slice differs from the one first opened in this run,
                ``release_denied`` if the sender is not an admitted worker.
            ProtocolError: ``signature``, or ``malformed`` if it names no slices of this run.
        """
        # Read before it is verified, only to learn whose key must have signed it.
        body = parse(DataCommitments, envelope.body)
        with self._books.transaction_of(self._id):
            admitted = self.admission.find(body.member_id)
            if admitted is None or admitted.appraisal.role != "worker" or body.run_id != self.run.run_id:
                raise EvidenceError("release_denied", f"{body.member_id} is not an admitted worker of this run")
            body = open_envelope(DataCommitments, envelope, admitted.presentation.identity_key)
            self._books.slices.record(body, self._terms.contract.key_owners)

    def open_step(
        self,
        step: int,
        hosting: Mapping[str, tuple[int, ...]],
        aggregators: tuple[str, ...],
        commits: tuple[StepCommit, ...],
        query: Query = "gradient",
    ) -> Envelope:
        """Commit the given finished steps, and sign the roster of the next attempt of ``step`` of ``query``.

        Guarantee: no two rosters of a (run, query, step) ever carry the same attempt, even across restarts. The counter
        is on disk before the roster returns. Asked again, it signs the next attempt and commits nothing twice.

        Raises:
            EvidenceError: ``evidence_expired`` if a member's evidence is no longer valid, ``data_unknown`` if a host
                has not committed to the slices it is to compute on.
            ProtocolError: ``attempts_exhausted``, ``session_over`` once another session has begun, or as
                :meth:`commit`.
        """
        with self._books.transaction_of(self._id):
            # Under the write lock: nobody can be revoked between this look and the entry of the roster.
            members = tuple(self.admission.entry(i, hosting[i]) for i in sorted(hosting))
            members += tuple(self.admission.entry(i, ()) for i in aggregators)
            self._books.slices.require_opened(hosting)
            self._models.record(commits, self._id)
            attempt = self._books.state.next_attempt(query, step)
            if attempt >= MAX_ATTEMPTS_PER_STEP:
                raise ProtocolError("attempts_exhausted", f"step {step} was tried {attempt} times")
            nonce = secrets.token_bytes(32)
            circle = self._circle_of(members, nonce, step)
            roster = Roster(
                run_id=self.run.run_id,
                manifest_digest=self._terms.manifest_digest,
                query=query,
                step=step,
                attempt=attempt,
                ratchet=self._books.state.ratchet,
                nonce=nonce,
                members=members,
                circle=circle[1] if circle else None,
            )
            document = self._document_of(members)
            self._books.state.keep_document(document)
            # With its members' document, this is the whole roster: an auditor can build it again.
            body = {
                "query": query,
                "step": step,
                "attempt": attempt,
                "digest": roster.digest().hex(),
                "ratchet": roster.ratchet,
                "nonce": roster.nonce.hex(),
                "members": document.name.hex(),
                "circle": roster.circle.model_dump(mode="json") if roster.circle else None,
            }
            self._books.log.append("roster", body)
        # Only now: a later roster may keep no circle whose own roster is not in the log.
        self._circle = circle
        # Signed after the transaction: the masks of an attempt that is not on disk could be used twice.
        signed = seal(roster, self.run.identity)
        self.hosting.rostered(hosting, signed)
        return signed

    def _circle_of(
        self, members: tuple[Member, ...], nonce: bytes, step: int
    ) -> tuple[object, MaskCircle | None] | None:
        """Return a roster's workers and circle: the last circle, unless a worker came, went or presented again.

        A circle that stays spares each worker the appraisal of all others, one after the other. It must not outlast
        its workers: somebody who knows the order could choose who leaves or joins.
        """
        terms = self._terms.masks
        if terms is None:
            return None
        # The number of circles is in the bound that the reach follows from.
        if step >= terms.releases:
            raise ProtocolError("step_unplanned", f"step {step} is not one of the run's {terms.releases} releases")
        workers = tuple((each.member_id, each.evidence_digest) for each in members if each.role == "worker")
        if self._circle is None or self._circle[0] != workers:
            return workers, draw_circle(nonce, len(workers), terms.colluding_workers, terms.releases)
        return self._circle

    def _document_of(self, members: tuple[Member, ...]) -> Document:
        """Return the members of a roster as a document; mostly they are the same as before."""
        if self._members is None or self._members[0] != members:
            self._members = members, Document.of(RosterMembers(members=members))
        return self._members[1]

    def order_evaluation(
        self, finished_steps: int, model_digest: bytes, hosting: Mapping[str, tuple[int, ...]]
    ) -> Envelope:
        """Log and sign the order to evaluate the model after ``finished_steps``.

        Raises:
            EvidenceError: ``evidence_expired`` as :meth:`open_step`.
            ProtocolError: ``not_committed`` or ``order_mismatch``, as
            `raycloak.attestation.orchestrator.evaluation_order.place_order`.
        """
        with self._books.transaction_of(self._id):
            order = EvaluationOrder(
                run_id=self.run.run_id,
                manifest_digest=self._terms.manifest_digest,
                finished_steps=finished_steps,
                model_digest=model_digest,
                # Under the write lock, as in open_step.
                members=tuple(self.admission.entry(i, hosting[i]) for i in sorted(hosting)),
            )
            self._books.state.keep_document(Document.of(RosterMembers(members=order.members)))
            place_order(order, self._terms.contract.key_owners, self._books.loads, self._books.log)
        # After the block: nobody gets an order that is not on disk.
        return seal(order, self.run.identity)

    def commit(self, commits: tuple[StepCommit, ...]) -> None:
        """Log finished steps as :meth:`open_step` does, except those that this session has logged already.

        Guarantee: a step is committed with one released digest only, in whatever session of the run. Under a lineage,
        it is one that the step's aggregators signed, made of the model that the run had before it.

        Raises:
            ProtocolError: ``not_reproducible`` if a step was committed with other parameters, or as
                `raycloak.attestation.orchestrator.succession.Succession.record`; nothing is logged then.
        """
        with self._books.transaction_of(self._id):
            self._models.record(commits, self._id)

    def model_standing(self, finished_steps: int) -> Envelope:
        """Return the signed statement about the model after so many steps, by their commit or the last load there.

        Raises:
            ProtocolError: ``not_committed``.
        """
        with self._books.transaction_of(self._id):
            model = self._models.after(finished_steps)
        standing = ModelStanding(
            run_id=self.run.run_id,
            manifest_digest=self._terms.manifest_digest,
            finished_steps=finished_steps,
            model=model,
        )
        return seal(standing, self.run.identity)

    def load_state(self, load: StateLoad) -> None:
        """Log that the state of an earlier package becomes current; all finished steps are committed before.

        Raises:
            ProtocolError: ``load_refused`` as `raycloak.attestation.orchestrator.loads.LoadBook.record`.
        """
        with self._books.transaction_of(self._id):
            self._books.loads.record(load)
