"""The evaluation of released models: by the driver on a public split, or by the workers.

The driver measures on data that it may see and whose results are public. On a sealed split, and for a model that is too
large for a driver, the workers measure the slices they host. The driver adds up:

    order    orchestrator.order_evaluation(finished steps, model digest, hosting)      logged before it returns
    answers  every worker.evaluate(order, parameters)                                      signed, one score a slice
    failed -> move their virtual workers with their keys, a new order: everybody measures again
    value    scores added in the order of the slices, divided by the number of examples

A result does not depend on the hosting: a slice's score has the same bits on every worker, and addition has one
order. Of a public split, a worker's answer counts only if it read the same examples as the driver.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder
from raycloak.attestation.sealed.sealed_data import SealedSource
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.model_source import loss_spec, micro_batch_bytes
from raycloak.coordinator.planning.own_metrics import Metric, OwnMetric, Predictions, own_metrics, try_metrics
from raycloak.coordinator.planning.public_split import PublicSplit, public_split
from raycloak.coordinator.planning.references import evaluation_form
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.step_context import MemberFailures, Model
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers import evaluation
from raycloak.workers.evaluation import EvaluationReply, Scorer, Scores, metric_of, open_answer
from raycloak.workers.gradients.row_memory import scored_rows
from raycloak.workers.inputs.datasets import slice_digest, slice_ids
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.models import ModelSource, build_model, loss_function
from raycloak.workers.models.text_model import TextModel
from raycloak.workers.terms.loss import LossSpec


@dataclass(slots=True)
class OrderedEvaluator:
    """Has released models measured by the workers of a session, each by an order of the orchestrator.

    Attributes:
        runner: the runner of the session whose model is measured.
        metric: what the scores are of.
        counts: number of examples of each slice of the split.
        every: steps between two evaluations.
        contents: digest of each slice of a public split; None for a sealed one.
    """

    runner: StepRunner
    metric: evaluation.Metric
    counts: Mapping[int, int]
    every: int
    contents: Mapping[int, bytes] | None

    @classmethod
    def of(cls, config: RunConfig, split: SealedSource | PublicSplit | None, runner: StepRunner) -> Self | None:
        """Return the evaluator of a run whose workers measure on ``split``; None without one.

        Raises:
            DatasetError: ``dataset_small`` if a public split has no example for each virtual worker.
        """
        if split is None or config.evaluation is None:
            return None
        slices = runner.context.manifest.computation.mechanism.virtual_workers
        count = len(split.examples) if isinstance(split, PublicSplit) else evaluation_form(split).num_examples
        ids = {v: slice_ids(v, slices, count) for v in range(slices)}
        counts, contents = {v: len(own) for v, own in ids.items()}, None
        if isinstance(split, PublicSplit):
            contents = {v: slice_digest(split.examples, own) for v, own in ids.items()}
        return cls(runner, metric_of(config.loss_name), counts, config.evaluation.every, contents)

    def measure(self, model: Model, finished_steps: int) -> Evaluation:
        """Measure ``model``, which ``finished_steps`` steps gave; they are committed first.

        Raises:
            RefusedError: ``too_few_workers``.
            RunFailedError: what failed: every worker alike, or more members than the run survives.
        """
        context = self.runner.context
        failures = MemberFailures(context, model, f"the evaluation after step {finished_steps - 1}", finished_steps)
        # First, because an order is for committed parameters alone.
        self.runner.commit()
        model = context.as_exported(model)
        epoch = context.manifest.computation.epoch_of("gradient", finished_steps - 1)

        def order() -> Envelope:
            hosting = dict(context.membership.hosts.hosting)
            return context.control.orchestrator.order_evaluation(finished_steps, model.digest, hosting)

        while True:
            self.runner.place(epoch)
            scores = self._scores(self.runner.on_fresh_evidence(epoch, order, order), model, failures)
            if scores is not None:
                whole, count = Scores.added(scores), sum(self.counts.values())
                return Evaluation(self.metric, whole.total / count, count, whole.f1)

    def _scores(self, envelope: Envelope, model: Model, failed: MemberFailures) -> dict[int, Scores] | None:
        """Return the score of every slice; None if a worker failed, which is lost then."""
        context = self.runner.context
        order, workers = parse(EvaluationOrder, envelope.body), context.membership.members.workers
        ids = [member.member_id for member in order.members]
        asked = {member_id: workers[member_id].evaluate(envelope, *model.parameters) for member_id in ids}
        ready = context.backend.wait(list(asked.values()), context.deadline_s)
        scores: dict[int, Scores] = {}
        failures: dict[str, str] = {}
        for member_id, reference in asked.items():
            try:
                if reference not in ready:
                    raise ActorLost("deadline")
                scores |= self._verified(order, member_id, context.backend.fetch(reference, context.deadline_s))
            except ActorLost as lost:
                failures[member_id] = lost.cause
            except ProtocolError as refusal:
                failures[member_id] = refusal.code
        if not failures:
            return scores
        failed.take(failures, everybody=len(failures) == len(asked))
        return None

    def _verified(self, order: EvaluationOrder, member_id: str, reply: EvaluationReply) -> dict[int, Scores]:
        """Return the scores in a worker's answer; ProtocolError with its own code if it says that it failed."""
        if reply.answer is None or reply.code != "ok":
            code = "answer_mismatch" if reply.code == "ok" else reply.code
            raise ProtocolError(code, f"{member_id} could not measure")
        return open_answer(reply.answer, order.digest(), order.member(member_id), self.counts, self.contents)


@dataclass(eq=False)
class Evaluator:
    """Measures parameter vectors of one model in eval mode, on the CPU.

    Args:
        source, loss, base, seed: as in the run.
        split: see `raycloak.coordinator.planning.public_split`.
        every: steps between two evaluations; kept for the caller.
        own: metrics of the user's own.
        most_bytes: memory of the rows that are scored at once; None for what a CPU spares.
        warned: called once with a sentence about each of them that fails on a model that steps were charged for.

    Raises:
        ModelError, ConfigError: what building the model, finding the loss, checking the split or trying the metrics
            raises.
    """

    source: InitVar[ModelSource]
    loss: InitVar[LossSpec]
    split: InitVar[PublicSplit]
    base: InitVar[Path | str]
    seed: InitVar[int] = 0
    most_bytes: InitVar[int | None] = None
    every: int = 1
    own: tuple[OwnMetric, ...] = ()
    warned: Callable[[str], None] = lambda sentence: None

    def __post_init__(
        self,
        source: ModelSource,
        loss: LossSpec,
        split: PublicSplit,
        base: Path | str,
        seed: int,
        most_bytes: int | None,
    ) -> None:
        self._warned_of: set[str] = set()
        loss_fn, _ = loss_function(loss, base)
        self._metric = metric_of(loss.name)
        module = fed_by_name(build_model(source, base, seed), split.form.inputs)
        # Now, and not at the first evaluation, when steps are charged.
        split.check(module, loss.name)
        vocabulary = module.vocabulary if isinstance(module, TextModel) else None
        rows = scored_rows(module.eval(), split.form, loss_fn, vocabulary, most_bytes)
        self._scorer = Scorer(module, loss_fn, self._metric, rows)
        self._dataset = split.examples
        try_metrics(self.own, self._scorer, self._dataset)

    def measure(self, parameters: NDArray[np.float32]) -> Evaluation:
        """Return accuracy and F1 under ``cross_entropy``, else the mean loss, of float32 [d] parameters.

        The user's own metrics come on top. One that fails is left out and told of: the steps are charged already.

        Args:
            parameters: in canonical order.
        """
        count = len(self._dataset)
        self._scorer.load(parameters)
        predictions = Predictions() if self.own else None
        each = predictions.add if predictions else None
        scores = self._scorer.scores(self._dataset, np.arange(count, dtype=np.int64), each)
        own = {}
        if predictions is not None:
            outputs, labels = predictions.whole
            for metric in self.own:
                try:
                    own[metric.name] = metric.value(outputs, labels)
                except ConfigError as error:
                    if metric.name not in self._warned_of:
                        self.warned(f"An evaluation lacks {metric.name}: {error.message}")
                    self._warned_of.add(metric.name)
        return Evaluation(self._metric, scores.total / count, count, scores.f1, own)


@dataclass(frozen=True, slots=True)
class PublicEvaluation:
    """A run's public split, and what to measure on it, whoever does.

    Attributes:
        split: its examples.
        own: metrics of the user's own; only the driver measures them.
        evaluator: builds the model, for a driver that measures itself; errors as :class:`Evaluator`.
    """

    split: PublicSplit
    own: tuple[OwnMetric, ...]
    evaluator: Callable[[], Evaluator]


def public_evaluation(
    config: RunConfig,
    model: ModelSource,
    base: Path | str,
    given: Sequence[Metric] = (),
    warned: Callable[[str], None] = lambda sentence: None,
) -> PublicEvaluation | None:
    """Open ``config``'s public split; None without one.

    Args:
        given: metrics of the user's own, beside those that ``config`` names.
        warned: as :class:`Evaluator`.

    Raises:
        ConfigError, DatasetError: as `public_split` and `own_metrics`.
    """
    split = public_split(config, base)
    if split is None or config.evaluation is None:
        return None
    own, every = own_metrics(config.evaluation.metrics, given, base), config.evaluation.every
    of_model = model, loss_spec(config.loss), split, base, config.seed, micro_batch_bytes(config)
    return PublicEvaluation(split, own, partial(Evaluator, *of_model, every, own, warned))
