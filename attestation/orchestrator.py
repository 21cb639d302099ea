"""EvidenceOrchestrator: who may take part in a run, and which keys they get.

It holds the run secret, issues challenges, appraises evidence, releases virtual-worker keys to admitted workers,
signs one roster per attempt, and writes every decision to the evidence log before it takes effect. It never sees
data, gradients or masked sums. A plain class; one caller at a time.

It may die at any moment: a new instance that opens the run again and begins the same session goes on where it was, and
every question may be asked again. What it must not forget is in `attestation/orchestrator_state.py`.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attestation.admissions import Admissions, MemberReview, OrchestratorView
from attestation.appraisal import Appraisal
from attestation.attester import EvidenceSource
from attestation.channel import server_end
from attestation.commit_book import CommitBook, StepCommit
from attestation.evaluation_order import EvaluationOrder, place_order
from attestation.evidence import Challenge, CollateralBundle, Role
from attestation.evidence_desk import EvidenceDesk
from attestation.evidence_log import EvidenceLog
from attestation.hybrid_signature import HybridSigner, SignerPublic
from attestation.key_policy import DrawBook
from attestation.key_release import KeyRelease, RunKeys, commitments_digest
from attestation.keys import IdentityKey, Purpose, derive
from attestation.log_entries import LogHead
from attestation.messages import Envelope, open_envelope, parse, seal
from attestation.mutual import present_orchestrator
from attestation.orchestrator_state import OrchestratorState, SessionId, state_file
from attestation.package_desk import PackageDesk, PublishedPackage
from attestation.package_keys import RecipientPublic
from attestation.refusal_log import RefusalLog
from attestation.release_desk import Grant, ReleaseDesk
from attestation.roster import Query, Roster
from attestation.run_hosting import RunHosting
from attestation.run_secret import create_secret, destroy_secret, kept_secret, load_secret, run_id_of
from attestation.run_terms import RunTerms
from attestation.slices import DataCommitments, SliceBook, most_hosted
from attestation.static_hosting import StaticHosting
from metrics.errors import ConfigError, EvidenceError, ProtocolError

MAX_ATTEMPTS_PER_STEP = 4096
_RUN_ID = re.compile(r"[0-9a-f]{16}")


class EvidenceOrchestrator:
    """Admission, keys and rosters of one run.

    Args:
        state_directory: local directory for ``<run id>.sqlite`` and generated secrets; created 0700. The site's package
            signer lives beside it, in ``signer/``.
        clock: seconds since the epoch; a parameter so that tests own the time.
    """

    def __init__(self, state_directory: str, clock: Callable[[], float]) -> None:
        self._directory = Path(state_directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clock = clock
        self._session = SessionId()
        self._generated_secret: Path | None = None
        self._roster: Envelope | None = None
        self._hosting = RunHosting()

    def open_run(self, secret_file: str | None, run_id: str | None = None) -> tuple[str, SignerPublic]:
        """Read the run secret, or generate one; returns (run id, the orchestrator's public keys).

        Args:
            secret_file: of the user's own secret; None for a generated one.
            run_id: opens a run that exists, with the secret that was generated for it unless a file is given.

        Raises:
            ConfigError: ``run_secret`` if the file cannot be used or is another run's, ``run_unknown``,
                ``secret_destroyed``.
        """
        if run_id is not None and not (_RUN_ID.fullmatch(run_id) and state_file(self._directory, run_id).is_file()):
            raise ConfigError(
                "run_unknown", f"there is no run '{run_id}' in {self._directory}.", "Check RAYCLOAK_HOME."
            )
        if secret_file is not None:
            secret = load_secret(Path(secret_file))
        elif run_id is not None:
            self._generated_secret, secret = kept_secret(self._directory, run_id)
        else:
            self._generated_secret, secret = create_secret(self._directory)
        self._run_id = run_id_of(secret)
        if run_id not in (None, self._run_id):
            raise ConfigError(
                "run_secret",
                f"{secret_file} is the secret of run {self._run_id}, not of {run_id}.",
                "Give the file that the run began with.",
            )
        self._keys = RunKeys(secret, self._run_id)
        identity = derive(secret, Purpose.ORCHESTRATOR_IDENTITY)
        self._key = IdentityKey.from_seed(identity)
        signer = HybridSigner(identity, derive(secret, Purpose.ORCHESTRATOR_ML_DSA))
        self._state = OrchestratorState(state_file(self._directory, self._run_id))
        self._log = EvidenceLog(self._state.db, self._run_id, signer, self._state.transactions)
        self._commits = CommitBook(self._state, self._log)
        self._slices = SliceBook(self._state, self._log)
        self._refusals = RefusalLog(self._log, self._state.transaction)
        own = self._own_transaction
        self._admissions = Admissions(self._state, self._log, self._refusals, own, self._run_id, self._now)
        self._draws = DrawBook(self._state.db)
        self._releases = ReleaseDesk(
            keys=self._keys,
            signer=self._key,
            admissions=self._admissions,
            draws=self._draws,
            log=self._log,
            refusals=self._refusals,
            transaction=own,
            clock=self._now,
        )
        self._packages = PackageDesk(
            run_id=self._run_id,
            run_secret=secret,
            log=self._log,
            commits=self._commits,
            transaction=self._state.transaction,
            manifest_digest=lambda: self._session.manifest,
            signer_folder=self._directory.parent / "signer",
        )
        # Only the next session ends the former one: whoever opens a run as new may yet find that it is under way.
        self._is_new = run_id is None
        return self._run_id, signer.public

    def key_commitments(self, key_context: bytes, virtual_workers: int, epochs: int) -> tuple[bytes, ...]:
        """Per epoch, the digest of the commitments to all its keys, for the manifest."""
        return tuple(
            commitments_digest(self._keys.commitments(key_context, virtual_workers, epoch)) for epoch in range(epochs)
        )

    def begin(self, terms: RunTerms, session: str) -> None:
        """Fix the terms of the run, and start a session or go on with it.

        Args:
            session: text that the driver draws for one execution of the run. The one on disk goes on: its members
                whose evidence is still valid, their epochs and the ratchet are restored. Any other starts afresh.
        """
        self._terms = terms
        self._session = SessionId(session, terms.manifest_digest)
        if self._is_new or not self._state.is_current(self._session):
            self._start_session()
        self._is_new = False
        self._admissions.begin(terms)
        self._releases.begin(session, terms)

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """Judge by newer ``collateral`` from now on; who is admitted stays so until its evidence expires."""
        self._admissions.take_collateral(collateral)

    def present(self, source: EvidenceSource) -> Envelope:
        """This orchestrator's own evidence for the manifest of the session; see `attestation.mutual`."""
        return present_orchestrator(self._key, self._run_id, self._session.manifest, source)

    def challenge(self, member_id: str, role: Role, identity_key: bytes = b"") -> Challenge:
        """A fresh nonce for one presentation by ``member_id`` in ``role``, of ``identity_key`` alone if given."""
        return self._admissions.challenge(member_id, role, identity_key)

    def admit(self, envelope: Envelope) -> Appraisal:
        """Appraise a presentation and admit its sender; logged either way (refusals: `attestation.refusal_log`).

        Guarantee: returns only for evidence that the policy accepts, that answers an unused challenge of this
        orchestrator issued to the same member, role and run, and that binds the presented keys; the nonce is
        consumed by the first presentation that proves possession of its key, whatever the outcome. Nonce, decision
        and log entry are one transaction.

        The presentation that a member was admitted by gives the same appraisal again until it is challenged anew.

        Raises:
            EvidenceError: with the code of the first failing check; ProtocolError as :meth:`open_step`.
        """
        return self._admissions.admit(envelope)

    def release(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> KeyRelease:
        """Seal the keys of ``virtual_workers`` in ``epoch`` to an admitted worker, logged before they leave.

        Args:
            seen: entries under the newest head of the log that the member was shown.

        Returns: the sealed keys, and the proof that the log has the release and extends what the member has seen.

        Raises:
            EvidenceError: ``release_denied`` if the member is not an admitted worker, its evidence has expired, served
                another epoch or was appraised by another policy, or a key was drawn as often as its quota says;
                ``log_forked`` if the member has seen more of the log than there is. The log has the refusal.
        """
        return self.grant(member_id, epoch, virtual_workers, seen).proved(self._log)

    def grant(self, member_id: str, epoch: int, virtual_workers: tuple[int, ...], seen: int = 0) -> Grant:
        """As :meth:`release`, for a caller that has its grants proved later, several under one signed head."""
        grant = self._releases.grant(member_id, epoch, virtual_workers, seen)
        self._hosting.released(member_id, virtual_workers)
        return grant

    def record_data(self, envelope: Envelope) -> None:
        """Record a worker's data commitments; the first of each virtual worker binds the run.

        Raises:
            EvidenceError: ``data_changed`` if a slice differs from the one first opened in this run,
                ``release_denied`` if the sender is not an admitted worker.
            ProtocolError: ``signature``, or ``malformed`` if it names no slices of this run.
        """
        body = parse(DataCommitments, envelope.body)
        admitted = self._admissions.find(body.member_id)
        if admitted is None or admitted.appraisal.role != "worker" or body.run_id != self._run_id:
            raise EvidenceError("release_denied", f"{body.member_id} is not an admitted worker of this run")
        with self._own_transaction():
            body = open_envelope(DataCommitments, envelope, admitted.presentation.identity_key)
            self._slices.record(body, self._terms.virtual_workers)

    def open_step(
        self,
        step: int,
        hosting: Mapping[str, tuple[int, ...]],
        aggregators: tuple[str, ...],
        commits: tuple[StepCommit, ...],
        query: Query = "gradient",
    ) -> Envelope:
        """Commit the given finished steps, and sign the roster of the next attempt of ``step`` of ``query``.

        Guarantee: no two rosters of a (run, query, step) ever carry the same attempt, also across restarts: the
        counter is on disk before the roster returns. Asked again, it signs the next attempt and commits nothing twice.

        Raises:
            EvidenceError: ``evidence_expired`` if a member's evidence is no longer valid, ``data_unknown`` if a host
                has not committed to the slices it is to compute on.
            ProtocolError: ``attempts_exhausted``, ``session_over`` once another session has begun, or as
                :meth:`commit`.
        """
        members = tuple(self._admissions.entry(i, hosting[i]) for i in sorted(hosting))
        members += tuple(self._admissions.entry(i, ()) for i in aggregators)
        with self._own_transaction():
            self._slices.require_opened(hosting)
            self._commits.record(commits, self._session)
            attempt = self._state.next_attempt(query, step)
            if attempt >= MAX_ATTEMPTS_PER_STEP:
                raise ProtocolError("attempts_exhausted", f"step {step} was tried {attempt} times")
            roster = Roster(
                run_id=self._run_id,
                manifest_digest=self._terms.manifest_digest,
                query=query,
                step=step,
                attempt=attempt,
                ratchet=self._state.ratchet,
                nonce=secrets.token_bytes(32),
                members=members,
            )
            body = {"query": query, "step": step, "attempt": attempt, "digest": roster.digest().hex()}
            self._log.append("roster", body)
        self._hosting.rostered(hosting)
        self._roster = seal(roster, self._key)
        return self._roster

    def order_evaluation(
        self, finished_steps: int, parameter_digest: bytes, hosting: Mapping[str, tuple[int, ...]]
    ) -> Envelope:
        """See `attestation.evaluation_order.place_order`; EvidenceError ``evidence_expired`` as :meth:`open_step`."""
        order = EvaluationOrder(
            run_id=self._run_id,
            manifest_digest=self._terms.manifest_digest,
            finished_steps=finished_steps,
            parameter_digest=parameter_digest,
            members=tuple(self._admissions.entry(i, hosting[i]) for i in sorted(hosting)),
        )
        with self._own_transaction():
            place_order(order, self._terms.virtual_workers, self._commits, self._log)
        return seal(order, self._key)

    def bind_vectors(self, step: int, vectors: bytes, query: Query = "gradient") -> None:
        """See `SliceBook.bind_vectors`."""
        with self._own_transaction():
            self._slices.bind_vectors(query, step, vectors)

    def commit(self, commits: tuple[StepCommit, ...]) -> None:
        """Log finished steps as :meth:`open_step` does; one that this session has logged already is skipped.

        Guarantee: a step is committed with one parameter digest only, in whatever session of the run.

        Raises:
            ProtocolError: ``not_reproducible`` if a step was committed with other parameters; nothing is logged then.
        """
        with self._own_transaction():
            self._commits.record(commits, self._session)

    def committed(self) -> tuple[StepCommit, ...]:
        """Every step that any session of the run has committed, in order."""
        return self._commits.steps()

    def most_hosted(self) -> int:
        """Most virtual workers whose keys one worker ever got, in any session of the run."""
        return most_hosted(self._log.entries())

    def expel(self, member_id: str, cause: str) -> None:
        """Remove a member; it gets no keys and no roster entry any more."""
        self._admissions.expel(member_id, cause)
        self._hosting.expelled(member_id)

    def review(self) -> MemberReview:
        """Log what was revoked since, and say who of the members is, and when the others have to present anew.

        Guarantee: who is revoked gets no keys and no roster entry from then on, whether this is asked or not.
        """
        with self._own_transaction():
            return self._admissions.review()

    def finish(self, commits: tuple[StepCommit, ...], log_file: str, destroy: bool) -> None:
        """Commit the last steps, export the log with its signed head, and destroy a generated secret if asked.

        A run that failed is finished too. Repeating it adds nothing to the log, and does what may be missing of the
        rest; the destruction comes last, as nobody can open the run after it.

        Raises:
            ProtocolError: as :meth:`commit`.
        """
        destroys = None if self._is_new else self._state.destroys(self._session)
        self._is_new = False
        if destroys is None:
            destroys = destroy and self._generated_secret is not None
            with self._state.transaction():
                self._commits.record(commits, self._session)
                self._refusals.settle()
                self._log.append("finished", {"secret_destroyed": destroys})
                self._state.finish_session(self._session, destroys)
        self._log.export(Path(log_file))
        if destroys and self._generated_secret is not None and self._generated_secret.exists():
            destroy_secret(self._generated_secret)

    def export_log(self, log_file: str) -> None:
        """Write the log so far, with its signed head, of a run that will go on."""
        self._refusals.settle()
        self._log.export(Path(log_file))

    def close(self) -> None:
        """Close the state; another instance may open the run."""
        self._refusals.close()
        self._state.close()

    def log_position(self) -> LogHead:
        """How many decisions are logged, and the root over them."""
        return self._log.position()

    def log_root_at(self, length: int) -> bytes | None:
        """See `EvidenceLog.root_at`."""
        return self._log.root_at(length)

    def package_signer(self) -> SignerPublic:
        """See `PackageDesk.signer`."""
        return self._packages.signer()

    def package_recipient(self) -> RecipientPublic:
        """See `PackageDesk.recipient`."""
        return self._packages.recipient()

    def sign_package(self, manifest_bytes: bytes) -> bytes:
        """See `PackageDesk.sign`."""
        return self._packages.sign(manifest_bytes)

    def record_published(self, step: int, package_digest: bytes) -> None:
        """See `PackageDesk.record_published`."""
        self._packages.record_published(step, package_digest)

    def newest_published(self) -> PublishedPackage | None:
        """See `PackageDesk.newest_published`."""
        return self._packages.newest_published()

    def open_package(self, info: bytes, wrapped_key: bytes) -> bytes:
        """See `PackageDesk.open`, `ReleaseDesk.open_checkpoint`."""
        return self._releases.open_checkpoint(info, lambda: self._packages.open(info, wrapped_key))

    def evidence_desk(self, hosting: StaticHosting | None = None) -> EvidenceDesk:
        """What the gRPC service of a run that has begun answers from.

        Args:
            hosting: who hosts what where no coordinator says so; by default, a member gets over the service only the
                keys that the run gave it, and the newest roster that was opened.
        """
        return EvidenceDesk(
            run_id=self._run_id,
            end=server_end(self._key),
            orchestrator=self,
            admissions=self._admissions,
            log=self._log,
            refusals=self._refusals,
            transaction=self._state.transaction,
            hosted=hosting.hosted if hosting else self._hosting.of,
            newest_roster=hosting.rosters(self, self._admissions) if hosting else lambda: self._roster,
            now=self._now,
        )

    def view(self) -> OrchestratorView:
        """Facts for metrics: admitted members by role, evidence class, earliest expiry per role."""
        return self._admissions.view()

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        """A transaction of this session; ProtocolError ``session_over`` if another one has begun, as after a resume."""
        with self._state.transaction():
            if not self._state.is_current(self._session):
                raise ProtocolError("session_over", "another execution of this run has begun; this one is over.")
            yield

    def _start_session(self) -> None:
        with self._state.transaction():
            self._admissions.end_session()
            self._state.start_session(self._session)
            body = {
                "session": self._session.name,
                "manifest_digest": self._terms.manifest_digest.hex(),
                "policy_digest": self._terms.policy.digest().hex(),
            }
            self._log.append("session", {**body, "virtual_workers": self._terms.virtual_workers})

    def _now(self) -> int:
        return int(self._clock())
