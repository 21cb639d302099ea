"""`raycloak audit`: trains with canaries through the whole protocol, and measures how much the released model shows.

The run is an ordinary one of the audited configuration. Coordinator, ledger, orchestrator, workers and aggregators are
the ones that run on Ray, here in one process (`coordinator/runs/local_session.py`), with evidence SIMULATED. Sampling
rate, steps, noise and clipping come from the configuration. The update rule is plain SGD, so that every released sum
can be computed from two consecutive models. Any other rule is a function of the same sums.

The run charges its account like any other. Only if the data is declared public, the configuration names no account, and
no account of the ledger knows the data, is the ledger thrown away. The bound is computed from the released models, and
from nothing else about the data.
"""

import json
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.accounting.calibration import epsilon_of
from raycloak.coordinator.audit.bound import Observed, strongest_bound
from raycloak.coordinator.audit.canaries import MODULE, CanaryTask, canary_signs
from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.console.output import attach_log
from raycloak.coordinator.planning.dry_run import mechanism_of
from raycloak.coordinator.planning.model_source import compute_mode, loss_spec, model_source
from raycloak.coordinator.planning.payer import account_cap, data_name
from raycloak.coordinator.record.folder import AUDIT, RunFolder, run_lock
from raycloak.coordinator.record.outcome import Finished
from raycloak.coordinator.runs.local_session import local_session
from raycloak.coordinator.runs.verdict import run_facts
from raycloak.coordinator.training.assignment import NewRun, Order, Session
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.reporting import Reporting, StepReport
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.events import EventWriter
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.terms.mechanism import Mechanism

FEWEST_CANARIES = 32
MOST_CANARIES = 2**16

KEPT = {
    "aggregators",
    "allow_nondeterministic",
    "epoch_steps",
    "failure",
    "micro_batch_bytes",
    "micro_batch_size",
    "min_workers",
    "num_workers",
    "ring",
    "secret_retention",
    "secure_aggregation",
    "seed",
    "virtual_workers",
}
"""The fields that an audit takes unchanged from the configuration. Task, sizes, noise and update rule are its own.
Releases besides the gradients are left out, and so are the settings for resuming and watching a run."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The outcome of an audit. Its fields are the keys of the command's JSON.

    Attributes:
        epsilon_lower: epsilon that the released model refutes, with the confidence: the run is not
            (epsilon', delta) private for any smaller epsilon'. 0 if nothing was refuted.
        confidence: chance that the bound holds, over the coins and the run's randomness.
        epsilon, delta: the ledger's charge for this run.
        sensitivity: most by which taking one synthetic example away moved a clipped sum of the user's own model, in
            units of C, at the first and at the last parameters; 1 is what the noise is made for.
        contradicted: whether the bound exceeds the ledger's epsilon, or the sensitivity 1.
        epsilon_ceiling: the bound if every guess had been right. This audit could not have shown more.
        canaries, included: m, and the number of included ones.
        guesses, correct, score: the basis of the bound; see `raycloak.coordinator.audit.bound`.
        examples: size of the configuration's own dataset.
        steps, sample_rate, noise_multiplier: parameters of the audited mechanism. With correlated noise the rate is of
            the part of the units that a step draws from.
        account: the charged account; None if the ledger was thrown away.
        evidence_class: ``simulated``, because all actors ran in one process.
    """

    epsilon_lower: float
    confidence: float
    epsilon: float
    delta: float
    sensitivity: float
    contradicted: bool
    epsilon_ceiling: float
    canaries: int
    included: int
    guesses: int
    correct: int
    score: str
    examples: int
    steps: int
    sample_rate: float
    noise_multiplier: float
    account: str | None
    evidence_class: str
    run_dir: Path


def audit(
    config: RunConfig,
    base: Path,
    *,
    canaries: int,
    confidence: float = 0.95,
    coins: NDArray[np.bool_] | None = None,
    run_secret: Path | None = None,
    progress: Callable[[StepReport], None] = lambda report: None,
    phase: Callable[[str], None] = lambda what: None,
    small_epsilon: bool = False,
) -> AuditResult:
    """Train ``config`` with canaries and bound epsilon from below.

    Guarantee: if the run is (epsilon, delta) private, ``epsilon_lower`` exceeds epsilon with a chance of at most
    ``1 - confidence``; see :func:`raycloak.coordinator.audit.bound.strongest_bound`.

    Args:
        base: folder that relative paths and ``module:function`` names start from.
        coins: [canaries], drawn from the operating system if absent.
        run_secret: as for a run.
        progress: called after every step.
        phase: called with a few words when another phase begins.
        small_epsilon: whether an epsilon below 0.1 is meant, where the audit opens the account of its data.

    Raises:
        ConfigError: ``audit_canaries``, ``audit_confidence``, ``nothing_to_audit`` (privacy is off), and as a plan.
        RaycloakError: as a plan or a run. Charges stay charged.
    """
    _check(config, canaries, confidence)
    if coins is None:
        drawn = np.frombuffer(secrets.token_bytes(-(-canaries // 8)), np.uint8)
        coins = np.unpackbits(drawn)[:canaries].astype(np.bool_)
    require_bound(len(coins) == canaries, "an audit tosses one coin for each canary")
    with tempfile.TemporaryDirectory(prefix="raycloak-audit-") as home:
        folder = Path(home)
        task = CanaryTask.of(config, base, coins.tolist())
        task.write(folder)
        planned = mechanism_of(config, base)
        audited = _audited(config, planned, canaries)
        paid = None if _is_free(config) else config.ledger
        url = None if paid is None else paid.url or ledger_url()
        session, _ = local_session(folder, run_secret, ledger_url=url, witness=paid.witness if paid else None)
        setup = _setup(audited, folder, task)
        # The audit's own folder is no name of the data.
        data = data_name(config.dataset, base)
        watch = progress, phase
        finished, models, run_dir = _train(audited, session, setup, run_secret, canaries, *watch, data, small_epsilon)
    mechanism, delta, epsilon = finished.plan.mechanism, finished.plan.delta, _epsilon(audited, finished)
    # Each released sum, from two consecutive models.
    moved = -np.diff(models.astype(np.float64), axis=0) * (audited.batch_size / audited.optimizer.learning_rate)
    observed = Observed.of(moved, canary_signs(models[:-1]), mechanism, audited.epoch_steps)
    bound = strongest_bound(observed, coins, mechanism, delta=delta, confidence=confidence)
    sensitivity = task.largest_move(mechanism, finished.parameters, config)
    result = AuditResult(
        epsilon_lower=bound.epsilon,
        confidence=confidence,
        epsilon=epsilon,
        delta=delta,
        sensitivity=sensitivity,
        contradicted=bound.epsilon > epsilon or sensitivity > 1,
        epsilon_ceiling=bound.ceiling,
        canaries=canaries,
        included=int(coins.sum()),
        guesses=bound.guesses,
        correct=bound.correct,
        score=bound.score,
        examples=planned.num_examples,
        steps=finished.steps,
        sample_rate=mechanism.sample_rate,
        noise_multiplier=mechanism.noise_multiplier,
        account=None if paid is None else finished.manifest.account,
        evidence_class=finished.evidence_class,
        run_dir=run_dir,
    )
    (run_dir / AUDIT).write_text(json.dumps(asdict(result), default=str, indent=1) + "\n", encoding="utf-8")
    return result


def _check(config: RunConfig, canaries: int, confidence: float) -> None:
    if not config.dp_config.enabled:
        raise ConfigError(
            "nothing_to_audit", "dp_config.enabled is false: no epsilon is claimed.", "Switch it on to audit it."
        )
    if not FEWEST_CANARIES <= canaries <= MOST_CANARIES:
        raise ConfigError(
            "audit_canaries",
            f"an audit takes {FEWEST_CANARIES} to {MOST_CANARIES} canaries, not {canaries}.",
            "A thousand show an epsilon of up to about 4.",
        )
    if not 0 < confidence < 1:
        raise ConfigError(
            "audit_confidence", f"a confidence of {confidence:g} is not between 0 and 1.", "0.95 is usual."
        )


def _is_free(config: RunConfig) -> bool:
    """Return whether nothing pays: an account that is named may be bound to this very data, whatever is declared."""
    assert config.dataset is not None, "the task was made from it"
    return config.dataset.public and config.ledger.account is None


def _audited(config: RunConfig, planned: Mechanism, canaries: int) -> RunConfig:
    """Replace the configuration's task by the canaries', at the planned sampling rate, steps, noise and bands.

    The coefficients of correlated noise are chosen again, for plain SGD: as many, of another factorisation.
    """
    assert config.dataset is not None, "the task was made from it"
    bands = planned.bands
    correlated = {"correlated": "auto", "bands": bands} if bands > 1 else {"correlated": "off"}
    noise = {"noise_multiplier": planned.noise_multiplier, "target_epsilon": None, "epsilon_cap": account_cap(config)}
    kept = config.model_dump(include=KEPT if _is_free(config) else {*KEPT, "ledger"})
    own = {
        "name": f"{config.name}-audit",
        "model": f"{MODULE}:model",
        "loss": f"{MODULE}:loss",
        "dataset": config.dataset.model_dump(),
        # Each release is read off two consecutive models, which averages of them would blur.
        "optimizer": {"name": "sgd", "learning_rate": config.optimizer.learning_rate, "averaged_weights": False},
        "virtual_workers": planned.virtual_workers,
        # Of the configuration's own examples: more of them make no other number of steps.
        "steps": planned.steps,
        "expected_batch_size": planned.sample_rate * (planned.num_examples + canaries) / bands,
        "dp_config": {**config.dp_config.model_dump(), **noise, "noise": correlated},
    }
    return parse_config({**kept, **own})


def _train(
    config: RunConfig,
    session: Session,
    setup: WorkerSetup,
    run_secret: Path | None,
    canaries: int,
    progress: Callable[[StepReport], None],
    phase: Callable[[str], None],
    data: str,
    small_epsilon: bool,
) -> tuple[Finished, NDArray[np.float32], Path]:
    """Run to the end; return the outcome, the canaries' parameters around each step, and the run directory."""
    models = [np.zeros(canaries, np.float32)]
    with ExitStack() as stack:
        stack.callback(lambda: [actor.handle.close() for actor in session.control.actors.values()])
        stack.enter_context(run_lock(session.run_id))
        secret_file = str(run_secret) if run_secret else None
        run_folder = RunFolder.create(config, session.run_id, setup.base, secret_file)
        attach_log(run_folder.path / "run.log")
        stack.callback(attach_log, None)
        events = stack.enter_context(EventWriter(run_folder.path / "metrics.jsonl"))

        def after_step(report: StepReport) -> None:
            released = coordinator.finished()
            assert released is not None, "a step is done"
            # The canaries' parameters are the last ones. Only they are kept of every model.
            models.append(released.parameters[-canaries:].copy())
            progress(report)

        try:
            reporting = Reporting(
                metrics=lambda manifest, evidence: RunMetrics(run_facts(manifest, evidence, config)),
                events=events,
                progress=after_step,
                phase=phase,
                departure=lambda departure: None,
                joined=lambda member_id: None,
                restart=lambda restart: None,
            )
            run = run_folder, NewRun()
            order = Order(config, session, setup, lambda: None, reporting, *run, data, small_epsilon=small_epsilon)
            coordinator = Coordinator(order)
            finished = coordinator.run()
        except BaseException:
            run_folder.mark("void")  # An audit cannot be resumed: its canaries are forgotten.
            raise
        run_folder.mark("done")
        return finished, np.stack(models), run_folder.path


def _setup(config: RunConfig, folder: Path, task: CanaryTask) -> WorkerSetup:
    """Set up the audit's own task."""
    assert config.model is not None, "the audit's own task is named"
    return WorkerSetup(
        model=model_source(config.model),
        loss=loss_spec(config.loss),
        dataset=task.described(),
        base=str(folder),
        seed=config.seed,
        device="cpu",
        allow_nondeterministic=config.allow_nondeterministic,
        mode=compute_mode(config),
    )


def _epsilon(config: RunConfig, finished: Finished) -> float:
    """Return the ledger's charge for this run alone."""
    if config.ledger.account is None and finished.data.runs == 1:
        return finished.charged_epsilon
    mechanism, delta = finished.plan.mechanism, finished.plan.delta
    steps = mechanism.participations(finished.charged[mechanism.query])
    return epsilon_of(mechanism.sample_rate, mechanism.noise_multiplier, steps, delta, mechanism.accountant)
