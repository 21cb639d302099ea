"""Exact sums over the drawn examples of a step, which a worker may state for public data only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from raycloak.metrics.errors import RefusedError
from raycloak.workers.terms.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class PublicSums:
    """The sums over one virtual worker's drawn examples, or over those of a whole step.

    Attributes:
        loss: sum of the examples' losses, float64.
        examples: how many were drawn.
        tokens: tokens in them without padding; None where examples are no rows of tokens.
    """

    loss: float
    examples: int
    tokens: int | None

    @property
    def mean_loss(self) -> float | None:
        """The mean of the losses; None of no examples."""
        return self.loss / self.examples if self.examples else None

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """Add up sums one by one: in the same order, they give the same float64."""
        loss, examples, tokens = 0.0, 0, 0
        has_tokens = False
        for each in parts:
            loss += each.loss
            examples += each.examples
            tokens += each.tokens or 0
            has_tokens |= each.tokens is not None
        return cls(loss, examples, tokens if has_tokens else None)


def require_public(mechanism: Mechanism) -> None:
    """Refuse to state an exact sum under a mechanism that adds noise; RefusedError ``not_public``."""
    if mechanism.private:
        raise RefusedError("not_public", "an exact sum over private examples does not leave a worker")
