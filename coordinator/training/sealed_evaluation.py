"""Evaluation on a sealed split: the workers measure the slices they host; the driver adds up, and sees no example.

    order    orchestrator.order_evaluation(finished steps, model digest, hosting)      logged before it returns
    answers  every worker.evaluate(order, parameters)                                      signed, one score a slice
    failed -> move their virtual workers with their keys, a new order: everybody measures again
    value    scores added in the order of the slices, divided by the number of examples

A result does not depend on the hosting: a slice's score has the same bits on every worker, and addition has one
order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder
from raycloak.attestation.sealed.sealed_data import SealedSource
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.references import evaluation_form
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.step_context import MemberFailures, Model
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.evaluation import EvaluationReply, Metric, metric_of, open_answer
from raycloak.workers.inputs.datasets import slice_ids

Scores = Mapping[int, float]


@dataclass(slots=True)
class SealedEvaluator:
    """Has released models measured by the workers of a session.

    Attributes:
        runner: the runner of the session whose model is measured.
        metric: what the scores are of.
        num_examples: of the split, as its header says.
        every: steps between two evaluations.
    """

    runner: StepRunner
    metric: Metric
    num_examples: int
    every: int

    @classmethod
    def of(cls, config: RunConfig, terms: SealedSource | None, runner: StepRunner) -> Self | None:
        """Return the evaluator of a run; None if it evaluates on nothing sealed."""
        if terms is None or config.evaluation is None:
            return None
        count = evaluation_form(terms).num_examples
        return cls(runner, metric_of(config.loss_name), count, config.evaluation.every)

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
        epoch = context.manifest.computation.epoch_of("gradient", finished_steps - 1)

        def order() -> Envelope:
            hosting = dict(context.membership.hosts.hosting)
            return context.control.orchestrator.order_evaluation(finished_steps, model.digest, hosting)

        while True:
            self.runner.place(epoch)
            scores = self._scores(self.runner.on_fresh_evidence(epoch, order, order), model, failures)
            if scores is not None:
                return Evaluation(self.metric, added(scores) / self.num_examples, self.num_examples)

    def _scores(self, envelope: Envelope, model: Model, failed: MemberFailures) -> Scores | None:
        """Return the score of every slice; None if a worker failed, which is lost then."""
        context = self.runner.context
        order, workers = parse(EvaluationOrder, envelope.body), context.membership.members.workers
        ids = [member.member_id for member in order.members]
        asked = {member_id: workers[member_id].evaluate(envelope, *model.parameters) for member_id in ids}
        ready = context.backend.wait(list(asked.values()), context.deadline_s)
        scores: dict[int, float] = {}
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

    def _verified(self, order: EvaluationOrder, member_id: str, reply: EvaluationReply) -> Scores:
        """Return the scores in a worker's answer; ProtocolError with its own code if it says that it failed."""
        if reply.answer is None or reply.code != "ok":
            code = "answer_mismatch" if reply.code == "ok" else reply.code
            raise ProtocolError(code, f"{member_id} could not measure")
        member, count = order.member(member_id), self.runner.context.manifest.computation.mechanism.virtual_workers
        counts = {v: len(slice_ids(v, count, self.num_examples)) for v in member.virtual_workers}
        return open_answer(reply.answer, order.digest(), member, counts)


def added(scores: Scores) -> float:
    """Return the sum in the order of the slices, not of the answers: float64 addition depends on the order."""
    total = 0.0
    for v in sorted(scores):
        total += scores[v]
    return total
