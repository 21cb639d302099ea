"""A session of plain objects in this process: no Ray, one thread, every breakpoint works.

It runs the whole protocol: evidence (SIMULATED), rosters, receipts, masks. It gives no isolation, so it is for tests
and debugging, not for private data.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from raycloak.attestation.orchestrator.revocations import count_revocations
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.aggregation.aggregator import MaskedAggregator
from raycloak.coordinator.cluster.backend import LocalBackend
from raycloak.coordinator.cluster.control import Control, ControlRole
from raycloak.coordinator.cluster.remote import Actor
from raycloak.coordinator.config.sections import FailureConfig
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.training.assignment import Session
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.threads import WordThreads


def local_session(
    home: Path,
    run_secret: Path | None = None,
    clock: Callable[[], float] = time.time,
    ledger_url: str | None = None,
    witness: str | None = None,
    bind: str | None = None,
) -> tuple[Session, LocalBackend]:
    """Start orchestrator and ledger of one run in this process, with all state below ``home``.

    Args:
        ledger_url: another ledger than the one below ``home``.
        witness: of the ledger.
        bind: where the orchestrator serves; None to serve nothing.
    """
    secret, failure = str(run_secret) if run_secret else None, FailureConfig()
    ledger_url = ledger_url or f"sqlite:///{home / 'ledger.sqlite'}"
    vendor = SimulatedVendor.load_or_create(home / "simulator")
    source = LocalPlatform(vendor.platform("this process"))
    orchestrator = EvidenceOrchestrator(str(home / "orchestrator"), clock, bind, source)
    run_id, key = orchestrator.open_run(secret)
    # For all of them, because they work one after another.
    threads = WordThreads.of_share()
    backend = LocalBackend(
        make_worker=lambda member_id: TrainWorker(member_id, source, clock, word_threads=threads),
        make_aggregator=lambda member_id: MaskedAggregator(member_id, source, threads),
    )
    actors: dict[ControlRole, Actor] = {
        "ledger": Actor("ledger", PrivacyLedger(ledger_url, witness=witness)),
        "orchestrator": Actor("orchestrator", orchestrator),
    }
    incarnations = itertools.count(1)

    def restart(role: ControlRole) -> Actor:
        # Closed first: in one process nothing else releases its files.
        actors[role].handle.close()
        if role == "ledger":
            return Actor(f"ledger-{next(incarnations)}", PrivacyLedger(ledger_url, witness=witness))
        successor = EvidenceOrchestrator(str(home / "orchestrator"), clock, bind, source)
        successor.open_run(secret, run_id)
        return Actor(f"orchestrator-{next(incarnations)}", successor)

    control = Control(backend, actors, restart, failure.control_deadline_s, failure.max_failures)
    session = Session(
        run_id=run_id,
        orchestrator_key=key,
        backend=backend,
        control=control,
        policy=simulated_policy(vendor, code_measurement()),
        collateral=vendor.collateral(int(clock())),
        revocations=partial(count_revocations, state_file(home / "orchestrator", run_id)),
    )
    return session, backend
