"""The evaluation of released parameters by the driver, on data that it may see and whose results are public.

`coordinator/training/sealed_evaluation.py` evaluates on data that the driver may not see.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.public_split import PublicSplit, public_split
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.model import Model, ModelReader
from raycloak.workers.evaluation import Scorer, metric_of
from raycloak.workers.inputs.models import ModelSource, build_model, loss_function


class Evaluator:
    """Measures parameter vectors of one model in eval mode, on the CPU.

    Args:
        source, loss, base, seed: as in the run.
        split: see `raycloak.coordinator.planning.public_split`.
        every: steps between two evaluations; kept for the caller.

    Raises:
        ModelError, ConfigError: what building the model, finding the loss or checking the split raises.
    """

    def __init__(
        self, source: ModelSource, loss: str, split: PublicSplit, base: Path | str, seed: int = 0, every: int = 1
    ) -> None:
        self.every = every
        loss_fn, _ = loss_function(loss, base)
        self._metric = metric_of(loss)
        module = build_model(source, base, seed)
        # Now, and not at the first evaluation, when steps are charged.
        split.check(module, loss)
        self._scorer = Scorer(module, loss_fn, self._metric)
        self._dataset = split.examples

    def measure(self, parameters: NDArray[np.float32]) -> Evaluation:
        """Return accuracy and F1 under ``cross_entropy``, else the mean loss, of float32 [d] parameters.

        Args:
            parameters: in canonical order.
        """
        count = len(self._dataset)
        self._scorer.load(parameters)
        scores = self._scorer.scores(self._dataset, np.arange(count, dtype=np.int64))
        return Evaluation(self._metric, scores.total / count, count, scores.f1)


@dataclass(frozen=True, slots=True)
class DriverEvaluator:
    """Has released models measured by the driver; see `raycloak.coordinator.training.steps.ModelEvaluator`."""

    evaluator: Evaluator
    reader: ModelReader
    asks_workers: ClassVar[bool] = False

    @property
    def every(self) -> int:
        """Steps between two evaluations."""
        return self.evaluator.every

    def measure(self, model: Model, finished_steps: int) -> Evaluation:
        """Measure ``model``, however many steps gave it; RunFailedError ``state_lost`` as `ModelReader`."""
        return self.evaluator.measure(self.reader.parameters(model))


def public_evaluator(config: RunConfig, model: ModelSource, base: Path | str) -> Evaluator | None:
    """Return the evaluator of ``config``'s split; None without one, or if it is sealed and the workers measure on it.

    Raises:
        ConfigError, DatasetError, ModelError: as `public_split` and :class:`Evaluator`.
    """
    split = public_split(config, base)
    if split is None or config.evaluation is None:
        return None
    return Evaluator(model, config.loss, split, base, config.seed, config.evaluation.every)
