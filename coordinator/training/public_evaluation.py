"""The evaluation of released parameters by the driver, on data that it may see and whose results are public.

`coordinator/training/sealed_evaluation.py` evaluates on data that the driver may not see.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.model_source import loss_spec
from raycloak.coordinator.planning.own_metrics import Metric, OwnMetric, Predictions, own_metrics, try_metrics
from raycloak.coordinator.planning.public_split import PublicSplit, public_split
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.metrics.errors import ConfigError
from raycloak.workers.evaluation import Scorer, metric_of
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.models import ModelSource, build_model, loss_function
from raycloak.workers.terms.loss import LossSpec


class Evaluator:
    """Measures parameter vectors of one model in eval mode, on the CPU.

    Args:
        source, loss, base, seed: as in the run.
        split: see `raycloak.coordinator.planning.public_split`.
        every: steps between two evaluations; kept for the caller.
        own: metrics of the user's own.
        warned: called once with a sentence about each of them that fails on a model that steps were charged for.

    Raises:
        ModelError, ConfigError: what building the model, finding the loss, checking the split or trying the metrics
            raises.
    """

    def __init__(
        self,
        source: ModelSource,
        loss: LossSpec,
        split: PublicSplit,
        base: Path | str,
        seed: int = 0,
        every: int = 1,
        own: tuple[OwnMetric, ...] = (),
        warned: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.every = every
        self.own = own
        self._warned = warned
        self._warned_of: set[str] = set()
        loss_fn, _ = loss_function(loss, base)
        self._metric = metric_of(loss.name)
        module = fed_by_name(build_model(source, base, seed), split.form.inputs)
        # Now, and not at the first evaluation, when steps are charged.
        split.check(module, loss.name)
        self._scorer = Scorer(module, loss_fn, self._metric)
        self._dataset = split.examples
        try_metrics(own, self._scorer, self._dataset)

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
                        self._warned(f"An evaluation lacks {metric.name}: {error.message}")
                    self._warned_of.add(metric.name)
        return Evaluation(self._metric, scores.total / count, count, scores.f1, own)


def public_evaluator(
    config: RunConfig,
    model: ModelSource,
    base: Path | str,
    given: Sequence[Metric] = (),
    warned: Callable[[str], None] = lambda sentence: None,
) -> Evaluator | None:
    """Return the evaluator of ``config``'s split; None without one, or if it is sealed and the workers measure on it.

    Args:
        given: metrics of the user's own, beside those that ``config`` names.
        warned: as :class:`Evaluator`.

    Raises:
        ConfigError, DatasetError, ModelError: as `public_split`, `own_metrics` and :class:`Evaluator`.
    """
    split = public_split(config, base)
    if split is None or config.evaluation is None:
        return None
    own = own_metrics(config.evaluation.metrics, given, base)
    return Evaluator(model, loss_spec(config.loss), split, base, config.seed, config.evaluation.every, own, warned)
