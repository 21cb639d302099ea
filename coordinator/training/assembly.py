"""Assembly of the training: the model that an execution starts from, and everything that its steps need."""

from collections.abc import Callable

from raycloak.coordinator.checkpoints.saver import Checkpoints
from raycloak.coordinator.checkpoints.writer import PackageOrigin
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.record.batch_files import BatchFiles
from raycloak.coordinator.training.admitted import AdmittedRun
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.early_stopping import EarlyStopping
from raycloak.coordinator.training.model import Model, ModelReader
from raycloak.coordinator.training.public_evaluation import DriverEvaluator, Evaluator
from raycloak.coordinator.training.reporting import Reporter
from raycloak.coordinator.training.sealed_evaluation import SealedEvaluator
from raycloak.coordinator.training.sent import BatchesOfSteps
from raycloak.coordinator.training.state_requests import StateKeeper
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.step_context import StepContext
from raycloak.coordinator.training.steps import Course, Training
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.sent_rows import row_bytes


def assemble(order: Order, admitted: AdmittedRun, reporter: Reporter, evaluator: Evaluator | None) -> Training:
    """Return the steps that are left to this execution, from the model of the newest package or of the manifest.

    Args:
        evaluator: measures on public data; None if nothing is measured, or only sealed data is.

    Raises:
        RaycloakError: why the packages cannot be read; nothing was charged.
    """
    config, session, assignment = order.config, order.session, order.assignment
    plan, membership, metrics = admitted.plan, admitted.membership, admitted.metrics

    def renew() -> None:
        membership.admission.renew()
        reporter.presented(session.control.orchestrator.view())

    runner = step_runner(order, admitted, renew)
    restored = assignment.restore(session.control)
    reader = ModelReader(session.backend, config.failure.step_deadline_s)
    # A run that begins has none.
    loads = session.control.orchestrator.loads() if assignment.recorded is not None else ()
    states = StateKeeper(runner.context, assignment.archive, admitted.ranges, order.folder)
    sealed = SealedEvaluator.of(config, admitted.evaluation, runner)

    return Training(
        config=config,
        plan=plan,
        course=Course(
            last_step=min(assignment.last_step or plan.mechanism.steps, plan.mechanism.steps),
            committed=admitted.committed,
            charges=assignment.charges,
            # Of several in one place, the last one counts.
            loads={load.after_step: load for load in loads},
        ),
        runner=runner,
        membership=membership,
        reporting=order.reporting,
        metrics=metrics,
        evaluator=DriverEvaluator(evaluator, reader) if evaluator else sealed,
        reader=reader,
        stop=assignment.stop,
        checkpoints=_open_checkpoints(order, admitted, states.wanted(loads)),
        model=states.take(restored) if restored else _initial(order, admitted),
        finished_steps=restored.finished_steps if restored else 0,
        renew=renew,
        measured=order.folder.keep_released if assignment.charges else lambda released: None,
        states=states,
        stopping=_stopping(order, plan, restored.finished_steps if restored else 0),
        sent=_sent(order, admitted),
        pace=order.pace,
    )


def step_runner(order: Order, admitted: AdmittedRun, renew: Callable[[], None]) -> StepRunner:
    """Return what runs the steps of an admitted run.

    Args:
        renew: gets fresh evidence of every member.
    """
    context = StepContext(
        backend=order.session.backend,
        control=order.session.control,
        membership=admitted.membership,
        manifest=admitted.manifest,
        metrics=admitted.metrics,
        deadline_s=order.config.failure.step_deadline_s,
        renew=renew,
        traces=order.reporting.traces,
    )
    return StepRunner(context, admitted.run, admitted.ranges, order.config.secure_aggregation, order.pace)


def _sent(order: Order, admitted: AdmittedRun) -> BatchesOfSteps | None:
    """Return where the batches of steps are found; None if the run's data is registered.

    Raises:
        ConfigError: ``key_service`` if sent examples could be opened by nobody.
    """
    form = order.setup.dataset.sent
    if form is None:
        return None
    if admitted.manifest.key_service is None:
        raise ConfigError(
            "key_service",
            "the examples are sent by a client, and no key service gives workers its half of the keys.",
            "Give key_service; see docs/sending.md.",
        )
    return BatchesOfSteps(
        backend=order.session.backend,
        control=order.session.control,
        manifest=admitted.manifest,
        files=BatchFiles(order.folder.path),
        offered=order.pace.batches,
        row_bytes=row_bytes(form),
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


def _open_checkpoints(order: Order, admitted: AdmittedRun, wanted: set[bytes]) -> Checkpoints | None:
    assignment = order.assignment
    if not assignment.charges or assignment.archive is None:
        return None
    terms = PackageOrigin(admitted.manifest, admitted.plan.delta, admitted.evidence_class)
    return assignment.archive.open(order.session.control, terms, admitted.metrics, wanted)


def _initial(order: Order, admitted: AdmittedRun) -> Model:
    backend, flat = order.session.backend, admitted.start
    states = tuple(aggregator.initial_state() for aggregator in admitted.membership.members.aggregators)
    # Copies: a view would keep the whole vector alive behind each range.
    parameters = tuple(backend.put(flat[owned.start : owned.stop].copy()) for owned in admitted.ranges)
    return Model(parameters, states, admitted.manifest.computation.initial_parameters)
