"""The outset of training: the model that an execution starts from, and everything that its steps need."""

from collections.abc import Mapping

import numpy as np

from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.checkpoints.saver import Checkpoints, Restored
from raycloak.coordinator.checkpoints.writer import PackageOrigin
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.training.admitted import AdmittedRun
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.early_stopping import EarlyStopping
from raycloak.coordinator.training.model import Model, ModelReader
from raycloak.coordinator.training.public_evaluation import DriverEvaluator, Evaluator
from raycloak.coordinator.training.reporting import Reporter
from raycloak.coordinator.training.sealed_evaluation import SealedEvaluator
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.steps import Course, Training


def set_out(order: Order, admitted: AdmittedRun, reporter: Reporter, evaluator: Evaluator | None) -> Training:
    """Return the steps that are left to this execution, from the model of the newest package or of the manifest.

    Args:
        evaluator: measures on public data; None if nothing is measured, or only sealed data is.

    Raises:
        RaycloakError: why the packages cannot be read; nothing was charged.
    """
    config, session, assignment = order.config, order.session, order.assignment
    plan, membership, metrics = admitted.plan, admitted.membership, admitted.metrics
    runner = StepRunner(
        backend=session.backend,
        control=session.control,
        membership=membership,
        manifest=admitted.manifest,
        ranges=admitted.ranges,
        metrics=metrics,
        deadline_s=config.failure.step_deadline_s,
        secure_aggregation=config.secure_aggregation,
        traces=order.reporting.traces,
    )
    restored = assignment.restore(session.control)
    reader = ModelReader(session.backend, config.failure.step_deadline_s)
    sealed = SealedEvaluator.of(config, admitted.evaluation, runner)

    def renew() -> None:
        # Before the renewal, so that fresh evidence is judged by current collateral.
        if session.collateral_now is not None:
            membership.admission.take_collateral(session.collateral_now())
        membership.admission.renew()
        reporter.presented(session.control.orchestrator.view())

    return Training(
        config=config,
        plan=plan,
        course=Course(
            last_step=min(assignment.last_step or plan.mechanism.steps, plan.mechanism.steps),
            committed=admitted.committed,
            charges=assignment.charges,
        ),
        runner=runner,
        membership=membership,
        reporting=order.reporting,
        metrics=metrics,
        evaluator=DriverEvaluator(evaluator, reader) if evaluator else sealed,
        reader=reader,
        stop=assignment.stop,
        checkpoints=_open_checkpoints(order, admitted),
        model=_model(order, admitted, restored),
        finished_steps=restored.finished_steps if restored else 0,
        renew=renew,
        measured=order.folder.keep_released if assignment.charges else lambda released: None,
        stopping=_stopping(order, plan, restored.finished_steps if restored else 0),
    )


def _stopping(order: Order, plan: Plan, finished_steps: int) -> EarlyStopping | None:
    """Return the rule that may end the run early, with what it has seen up to ``finished_steps``.

    Raises:
        ConfigError: ``early_stopping``.
    """
    config, folder = order.config, order.folder
    # A replay ends where it was asked to.
    if config.early_stopping is None or not order.assignment.charges:
        return None
    stopping = EarlyStopping(config.early_stopping, folder.watched(), folder.keep_watched)
    if config.early_stopping.metric.startswith("evaluation_"):
        assert config.evaluation is not None, "the configuration was checked"
        due = range(config.evaluation.every, finished_steps + 1, config.evaluation.every)
    else:
        (every,) = (each.every for each in plan.measurements if each.query == "evaluation")
        # A model is sealed before what is released about it, and the release is then made again.
        due = range(every, finished_steps, every)
    stopping.restore(finished_steps, due)
    return stopping


def _open_checkpoints(order: Order, admitted: AdmittedRun) -> Checkpoints | None:
    assignment = order.assignment
    if not assignment.charges or assignment.archive is None:
        return None
    terms = PackageOrigin(admitted.manifest, admitted.plan.delta, admitted.evidence_class)
    return assignment.archive.open(order.session.control, terms, admitted.metrics)


def _model(order: Order, admitted: AdmittedRun, restored: Restored | None) -> Model:
    backend, manifest, aggregators = order.session.backend, admitted.manifest, admitted.membership.members.aggregators
    flat, digest = admitted.facts.initial_parameters, manifest.computation.initial_parameters
    states = tuple(aggregator.initial_state() for aggregator in aggregators)
    if restored is not None:
        flat, digest = np.concatenate(restored.parameters), restored.parameter_digest
        merged = {key: value for state in restored.states for key, value in state.items()}
        states = tuple(backend.put(_state_of(merged, owned)) for owned in admitted.ranges)
    # Copies: a view would keep the whole vector alive behind each range.
    parameters = tuple(backend.put(flat[owned.start : owned.stop].copy()) for owned in admitted.ranges)
    return Model(parameters, states, digest)


def _state_of(merged: Mapping[str, np.ndarray], owned: ParameterRange) -> dict[str, np.ndarray]:
    """Return the part of an optimizer state that belongs to the tensors of a range."""
    names = {tensor.name for tensor in owned.tensors}
    return {key: value for key, value in merged.items() if key.rpartition("/")[0] in names}
