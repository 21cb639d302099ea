"""The books of a run: everything that its orchestrator keeps on disk, opened together.

They share one SQLite file, so their records of one transaction become durable together, or not at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.commits import CommitBook
from raycloak.attestation.orchestrator.data_commitments import SliceBook
from raycloak.attestation.orchestrator.loads import LoadBook
from raycloak.attestation.orchestrator.machine_book import MachineBook
from raycloak.attestation.orchestrator.nonces import NonceBook
from raycloak.attestation.orchestrator.refusal_log import RefusalLog
from raycloak.attestation.orchestrator.revocations import Revocations
from raycloak.attestation.orchestrator.state import OrchestratorState, SessionId
from raycloak.attestation.policy.key_policy import DrawBook
from raycloak.metrics.errors import ProtocolError


class RunBooks:
    """The durable state of one run.

    Args:
        path: the state file; created if absent.
        signer: signs the heads of the evidence log.

    Attributes:
        state: the file itself, with session, members and attempts.
        log: the evidence log.
        refusals: decides which refusals become entries of ``log``.

    Raises:
        EvidenceError: ``log_broken``, as :class:`EvidenceLog`.
    """

    def __init__(self, path: Path, run_id: str, signer: HybridSigner) -> None:
        self.state = OrchestratorState(path)
        self.log = EvidenceLog(self.state.db, run_id, signer, self.state.transactions)
        self.refusals = RefusalLog(self.log, self.state.transaction)
        self.commits = CommitBook(self.state.db, self.log)
        self.loads = LoadBook(self.log, self.commits)
        self.slices = SliceBook(self.state.db, self.log)
        self.nonces = NonceBook(self.state.db)
        self.revocations = Revocations(self.state.db, self.log, self.state.transactions)
        self.draws = DrawBook(self.state.db)
        self.machines = MachineBook(self.state.db)

    @contextmanager
    def transaction_of(self, session: SessionId) -> Iterator[None]:
        """Open a transaction of ``session``.

        Raises:
            ProtocolError: ``session_over`` if another session has begun, as after a resume.
        """
        with self.state.transaction():
            # Checked under the write lock: no other process can begin a session until this transaction ends.
            if not self.state.is_current(session):
                raise ProtocolError("session_over", "another execution of this run has begun; this one is over.")
            yield

    def close(self) -> None:
        """Log the refusals that were only counted, and close the file."""
        # Before the file is closed, which holds the log.
        self.refusals.close()
        self.state.close()
