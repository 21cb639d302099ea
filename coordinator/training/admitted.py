"""Admitting: from the founders' facts to a run that may charge its first step, with which the ledger registers it.

    plan       what the steps cost, and whether the cap allows for them
    manifest   what every member has to agree with; a resumed or replayed run must arrive at its own again
    account    found, or to be opened, and asked whether it would register the run
    evidence   the orchestrator told of the terms, every member admitted

Nothing is charged here, but all that a prepaid run plans. The order matters: a resumed run that differs from the one on
record is refused before an account is opened or evidence is presented.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raycloak.attestation.core.evidence import Links
from raycloak.attestation.core.roster import Query
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.sealed.sealed_data import SealedSource
from raycloak.coordinator.aggregation.ranges import ParameterRange, ranges_needed, split_ranges
from raycloak.coordinator.aggregation.rule_trial import try_rule
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.control import START_AGAIN
from raycloak.coordinator.cluster.remote import Parameters
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.ledger.rules import PLANNED, RegistrationTerms
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.coordinator.membership.crew import aggregator_id
from raycloak.coordinator.membership.founders import Founders
from raycloak.coordinator.membership.membership import Membership
from raycloak.coordinator.planning.correlated_noise import settled
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.data_check import recorded_check
from raycloak.coordinator.planning.manifest import build_computation, build_manifest, epochs, optimizer_spec, run_terms
from raycloak.coordinator.planning.outlook import with_account
from raycloak.coordinator.planning.payer import (
    PayingAccount,
    account_of,
    accountant_for,
    existing_account,
    opening_terms,
    require_meant,
)
from raycloak.coordinator.planning.plan import Plan, keys_per_machine, make_plan, with_notes
from raycloak.coordinator.planning.references import given_contract, require_other_content, sealed_terms
from raycloak.coordinator.record.same_run import require_ledger, require_same_manifest
from raycloak.coordinator.training.assignment import Order, Session
from raycloak.coordinator.training.reporting import Reporter
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.messages import Admission, WorkerFacts
from raycloak.workers.second_halves import check_key_service
from raycloak.workers.terms.manifest import Manifest, UserCode
from raycloak.workers.terms.model_digest import dimension

Committed = Mapping[tuple[Query, int], StepCommit]


@dataclass(frozen=True, slots=True)
class AdmittedRun:
    """A run whose account would register it and whose members are admitted.

    Attributes:
        start: the initial parameters, float32[d].
        run: what the ledger registers with its first charge.
        committed: steps that earlier executions committed, by query.
        evaluation: terms of the sealed evaluation split; None if nothing sealed is measured.
        evidence_class: the weakest that a member presented.
        links: what evidence shows of the links between a worker's GPUs; None without a GPU.
        colocated: whether an aggregator runs on the orchestrator's node.
        rollback_witness: whether the ledger has a witness on other storage.
    """

    start: Parameters
    plan: Plan
    manifest: Manifest
    run: RegistrationTerms
    committed: Committed
    evaluation: SealedSource | None
    ranges: tuple[ParameterRange, ...]
    membership: Membership
    metrics: RunMetrics
    evidence_class: str
    links: Links | None
    colocated: bool
    rollback_witness: bool


def admit(
    order: Order,
    founders: Founders,
    reporter: Reporter,
    evaluation: SealedSource | None,
    metrics: tuple[UserCode, ...],
) -> AdmittedRun:
    """Plan the run, find its account and admit its members.

    Args:
        metrics: sources of the user's own, which the driver measures.

    Raises:
        RaycloakError: what refuses the run; nothing was charged, but for a prepaid run whose members were refused.
    """
    session, facts = order.session, founders.facts
    config = settled(_recorded_shape(order), facts.num_examples, dimension(facts.tensors))
    require_other_content(config, Path(order.setup.base), facts.data.fingerprint)
    ledger = session.control.ledger.view()
    account = account_of(ledger, config, facts.data, order.data, session.run_id)
    paying = existing_account(ledger, config, account, session.run_id)
    require_meant(config, paying, order.small_epsilon)
    # Not awaited: it takes half a second, as the plan does.
    session.control.ledger.load_accountant(accountant_for(config, paying))
    base = order.setup.base
    try_rule(optimizer_spec(config.optimizer, base), facts.tensors, config.planned_steps, base)
    recorded = order.assignment.recorded
    # A replay by fewer workers masks all pairs, and repeats what the run promised.
    sparse = None if recorded is None else recorded.mask_colluders is not None
    # As the descriptor has it: the configuration knows nothing of examples in memory.
    units = order.setup.dataset.unit_terms
    coefficients = None if recorded is None else recorded.computation.mechanism.coefficients
    as_recorded = facts.largest_rows, sparse, units, coefficients
    planned = make_plan(config, facts.num_examples, dimension(facts.tensors), paying, *as_recorded)
    plan = with_notes(planned, facts.model_notes, facts.left_out)
    for warning in _beside_others(order, facts, plan, ledger, account).warnings:
        reporter.to.warned(warning)
    reporter.to.phase("admitting workers")
    known_answer, plan = _compared(order, founders, plan)
    plan = replace(plan, data_check=recorded_check(facts.data.fingerprint))
    if recorded is not None and not order.assignment.charges:
        # A replay measures nothing.
        metrics = recorded.computation.metrics
    manifest = _manifest(order, config, facts, plan, ledger.public_key, account, known_answer, metrics)
    # Before the account: a resumed run that differs from its record must open and register nothing.
    committed = _committed(order, manifest)
    sealed = sealed_terms(config, Path(order.setup.base))
    run, is_charged = _registration(session, ledger, config, facts, plan, manifest, paying, sealed)
    terms = run_terms(manifest, session.policy, session.collateral, sealed, evaluation, is_charged, plan.masks)
    session.control.orchestrator.begin(terms, secrets.token_hex(16))
    ranges = _ranges(founders, plan)
    membership = Membership.admit(
        founders, _terms(order, manifest), ranges, session.collateral_now, session.revocations, reporter.joined
    )
    # A resumed or replayed run has arrived at the manifest that is there already.
    if order.assignment.recorded is None:
        order.folder.write_manifest(manifest)
    view = session.control.orchestrator.view()
    return AdmittedRun(
        start=founders.start,
        plan=plan,
        manifest=manifest,
        run=run,
        committed=committed,
        evaluation=evaluation,
        ranges=ranges,
        membership=membership,
        metrics=reporter.admitted(manifest, plan, view, membership.members.departures.all),
        evidence_class=view.evidence_class,
        links=view.links or ("not attested" if manifest.computation.numerics.gpu is not None else None),
        colocated=_is_colocated(order, membership),
        rollback_witness=ledger.rollback_witness,
    )


def _ranges(founders: Founders, plan: Plan) -> tuple[ParameterRange, ...]:
    """Cut the parameters, and start the aggregators of ranges beyond those that the crew has.

    Their number is hosting: it is in no manifest and changes no byte, and another execution may find other nodes.
    """
    members, tensors = founders.members, founders.facts.tensors
    needed = ranges_needed(plan.aggregator_bytes, members.backend.aggregator_rooms(), len(tensors))
    count = members.config.aggregators or needed
    for index in range(len(members.aggregators), count):
        members.aggregators.append(members.backend.start_aggregator(aggregator_id(index, index)))
    return split_ranges(tensors, count)


def _recorded_shape(order: Order) -> RunConfig:
    """Return the configuration; what it leaves open of the physical batch is as the run's manifest has it, if any."""
    config, recorded = order.config, order.assignment.recorded
    if recorded is None:
        return config
    computation = recorded.computation
    mechanism = computation.mechanism
    # The batch, and with it the number of steps, where the plan chose it.
    shape: dict[str, object] = {}
    if config.expected_batch_size is None and config.batch_size_per_worker is None:
        shape = {"expected_batch_size": mechanism.expected_batch_size, "steps": mechanism.steps, "epochs": None}
    shape |= {
        "virtual_workers": config.virtual_workers or mechanism.virtual_workers,
        "micro_batch_size": config.micro_batch_size or computation.largest_rows,
        # What it gave are the rows on record.
        "micro_batch_bytes": "auto",
    }
    # Parsed again, because there may now be more workers than virtual ones.
    return parse_config(config.model_dump(mode="json") | shape)


def _beside_others(order: Order, facts: WorkerFacts, plan: Plan, view: LedgerView, name: str) -> Plan:
    """Return ``plan`` with what other runs have left on its account, for the reader alone.

    The run is made from the plan without it, as `raycloak.coordinator.planning.outlook` says.
    """
    session, config = order.session, order.config
    account = next((each for each in view.accounts if each.name == name), None)
    # Where nothing is charged the plan's own reach holds, and the ledger would wait for the price of a tight plan.
    if account is None or not account.spent_epsilon:
        return plan
    # An execution before this one gave the warning, and an outlook would count the run's own charges as another's.
    if any(run.run_id == session.run_id for run in account.runs):
        return plan
    mechanisms = (plan.mechanism, *(each.mechanism for each in plan.measurements))
    public = config.dataset is not None and config.dataset.public
    run = RegistrationTerms(
        session.run_id, name, mechanisms, b"", facts.data, public, config.ledger.prepaid, lineage=PLANNED
    )
    return with_account(plan, name, view, session.control.ledger.outlook(run))


def _compared(order: Order, founders: Founders, plan: Plan) -> tuple[bytes, Plan]:
    """Return the known answer, and ``plan`` with what each accountant finds.

    Workers, ledger and this process compute at the same time, each for up to half a second.

    Raises:
        RunFailedError: as `Founders.known_answer`.
        RefusedError: ``accountants_disagree``.
    """
    compared: list[Plan] = []

    def compare() -> None:
        mechanisms = (plan.mechanism, *(each.mechanism for each in plan.measurements))
        # Not awaited: the registration finds the price, or computes it.
        order.session.control.ledger.price(mechanisms, plan.epsilon_cap, plan.delta, plan.mechanism.accountant)
        compared.append(checked(plan))

    known_answer = founders.known_answer(plan.mechanism, plan.measurements, compare)
    return known_answer, compared[0]


def _manifest(
    order: Order,
    config: RunConfig,
    facts: WorkerFacts,
    plan: Plan,
    ledger_key: bytes,
    account: str,
    known_answer: bytes,
    metrics: tuple[UserCode, ...],
) -> Manifest:
    """Return the run's contract."""
    session, setup = order.session, order.setup
    computation = build_computation(
        config, setup.model.name, setup.dataset, facts, plan.mechanism, plan.measurements, metrics, setup.base
    )
    key_service = given_contract(config.key_service, Path(setup.base))
    recorded = order.assignment.recorded
    masked = plan.masks.colluding_workers if plan.masks else None
    unkeyed = build_manifest(
        computation,
        run_id=session.run_id,
        account=account,
        known_answer=known_answer,
        policy_digest=session.policy.digest(),
        ledger_key=ledger_key,
        orchestrator_key=session.orchestrator_key,
        dataset_fingerprint=facts.data.fingerprint,
        key_service=key_service,
        keys_per_machine=keys_per_machine(config, plan.mechanism.virtual_workers),
        # A replay by fewer workers masks all pairs, which withstands more than the run promised.
        mask_colluders=recorded.mask_colluders if recorded is not None else masked,
        code=order.code,
    )
    # Keys derive from all of the manifest but their own commitments, so those come last.
    commitments = session.control.orchestrator.key_commitments(
        unkeyed.key_context, plan.mechanism.virtual_workers, epochs(config)
    )
    manifest = unkeyed.with_keys(commitments)
    check_key_service(manifest)
    return manifest


def _committed(order: Order, manifest: Manifest) -> Committed:
    """Return the steps that earlier executions committed; first require that this is their run and their ledger."""
    recorded, control = order.assignment.recorded, order.session.control
    if recorded is None:
        return {}
    require_same_manifest(recorded, manifest)
    committed = {(commit.query, commit.step): commit for commit in control.orchestrator.committed()}
    require_ledger(committed.values(), control.ledger.hash_at)
    return committed


def _registration(
    session: Session,
    view: LedgerView,
    config: RunConfig,
    facts: WorkerFacts,
    plan: Plan,
    manifest: Manifest,
    paying: PayingAccount | None,
    sealed: SealedSource | None,
) -> tuple[RegistrationTerms, bool]:
    """Require an account that would register the run; charge the run now if it is prepaid.

    Before any evidence: an account that refuses the run spares all members their presentation. The run is registered,
    and its account opened, with its first charge: a run that ends before leaves nothing that its data is known by.

    Returns:
        What the run is registered with, and whether it was charged by now, in any execution and on whatever host.
    """
    _require_demanded(sealed, manifest)
    run = RegistrationTerms(
        run_id=manifest.run_id,
        account=manifest.account,
        mechanisms=manifest.computation.mechanisms,
        manifest_digest=manifest.digest(),
        data=facts.data,
        public=config.dataset is not None and config.dataset.public,
        prepaid=config.ledger.prepaid,
        opens=opening_terms(config, paying, plan.mechanism.accountant),
        lineage=manifest.lineage,
    )
    ledger = session.control.ledger
    if run.prepaid:
        ledger.register_run(run)
        view = ledger.view()
    registered = [each for account in view.accounts for each in account.runs if each.run_id == run.run_id]
    if not registered:
        ledger.outlook(run)
    return run, any(query.charged for each in registered for query in each.queries)


def _terms(order: Order, manifest: Manifest) -> Admission:
    """Return the terms that each worker presents itself for."""
    config, session = order.config, order.session
    return Admission(
        manifest=manifest,
        policy=session.policy,
        collateral=session.collateral,
        secure_aggregation=config.secure_aggregation,
        orchestrator=session.control.orchestrator.present(),
        key_service=config.key_service.address if config.key_service else None,
    )


def _is_colocated(order: Order, membership: Membership) -> bool:
    session = order.session
    try:
        nodes = {session.backend.node(each) for each in membership.members.aggregators}
    except ActorLost as lost:
        raise RunFailedError(
            "unreachable", f"an aggregator was lost at admission ({lost.cause}).", START_AGAIN
        ) from None
    return session.control.node("orchestrator") in nodes


def _require_demanded(sealed: SealedSource | None, manifest: Manifest) -> None:
    """Refuse what orchestrator and workers would refuse later, before anything is registered for it."""
    if sealed is not None and sealed.header.demand is not None:
        sealed.header.demand.require(manifest.stated)
