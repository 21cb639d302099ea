"""Early stopping: whether a run ends because a result no longer gets better.

Hides how the decision survives a resume. It is made on the step path, from results in the order of their steps, and by
nothing else: no clock, no thread, no member has a part in it. A run that ends so claims what its plan costs, since
results are computed from what was released.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from raycloak.coordinator.config.sections import EarlyStoppingConfig
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.measurement import Released


@dataclass(slots=True)
class EarlyStopping:
    """The rule of one run, which sees results as they are made.

    Guarantee: every execution of a run decides to end after the same step, whatever was lost in between. A result is on
    disk before the model that it is of is sealed, and the first record of a result is the one that counts.

    Attributes:
        known: results that earlier executions have seen, by finished steps.
        keep: puts all results on disk before it returns.
    """

    config: EarlyStoppingConfig
    known: Mapping[int, float | None]
    keep: Callable[[Mapping[int, float | None]], None]
    _seen: int = -1
    _best: float | None = None
    _not_better: int = 0

    @property
    def decided(self) -> bool:
        """Return whether the run ends now."""
        return self._not_better >= self.config.patience

    def restore(self, finished_steps: int, due: Iterable[int]) -> None:
        """Take in the results up to the step that an execution starts from.

        Args:
            due: steps of which there must be a result by now.

        Raises:
            ConfigError: ``early_stopping`` if one of them is not on record: another decision might follow without it.
        """
        lacking = sorted(set(due) - self.known.keys())
        if lacking:
            raise ConfigError(
                "early_stopping",
                f"early_stopping.json in the run directory lacks the result after step {lacking[0]}.",
                "Restore the file as the run wrote it.",
            )
        for steps in sorted(each for each in self.known if each <= finished_steps):
            self._take(steps)

    def evaluated(self, steps: int, evaluation: Evaluation) -> None:
        """See a result on the evaluation split."""
        if self.config.metric in ("evaluation_accuracy", "evaluation_loss"):
            self._see(steps, evaluation.value)

    def measured(self, released: Released) -> None:
        """See a noised release on the private examples."""
        prefix, _, name = self.config.metric.rpartition("_")
        if prefix == f"measured_{released.query}":
            self._see(released.after, released.values[name])

    def _see(self, steps: int, value: float) -> None:
        if steps <= self._seen:
            return
        if steps not in self.known:
            self.known = {**self.known, steps: value if math.isfinite(value) else None}
            self.keep(self.known)
        self._take(steps)

    def _take(self, steps: int) -> None:
        self._seen = steps
        value = self.known[steps]
        sign = 1 if self.config.metric.endswith("accuracy") else -1
        if value is not None and (self._best is None or sign * (value - self._best) > self.config.min_delta):
            self._best, self._not_better = value, 0
        else:
            self._not_better += 1
