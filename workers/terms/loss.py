"""The loss of a run, as its manifest states it."""

from typing import ClassVar, Literal, Self

from raycloak.attestation.core.messages import Message

LossName = Literal[
    "cross_entropy", "token_cross_entropy", "next_token_cross_entropy", "binary_cross_entropy", "mse", "huber"
]
"""The built-in losses, as `workers/models/losses.py` computes them."""

LOSSES_OF_TOKENS: tuple[LossName, ...] = ("token_cross_entropy", "next_token_cross_entropy")
LOSSES_OF_CLASSES: tuple[LossName, ...] = ("cross_entropy", *LOSSES_OF_TOKENS)
"""The losses over one class an example, or one a token."""

SEVERAL = "several"
"""The name of a loss that is the sum of several."""


class LossTerm(Message):
    """A built-in loss with its settings.

    Attributes:
        class_weights: factor of each class's loss, of a cross entropy over classes; none if all are 1.
        positive_weights: factor of each output's positive labels, of binary cross entropy; none if all are 1.
        label_smoothing: share of each label that is spread over all classes, of a cross entropy.
        delta: the error beyond which Huber's loss is a line.
        outputs: columns of the model's output that it takes, as one of several losses; None for all of them.
        weight: its factor, as one of several losses.
    """

    DOMAIN: ClassVar[str] = "raycloak/loss-term/v1"

    name: LossName
    class_weights: tuple[float, ...] = ()
    positive_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    delta: float = 1.0
    outputs: int | None = None
    weight: float = 1.0

    @property
    def labels(self) -> int:
        """The columns of the labels that it takes, as one of several losses."""
        return 1 if self.name == "cross_entropy" else self.outputs or 0

    @property
    def text(self) -> str:
        """The loss for a reader, with the settings that are not at their defaults."""
        plain = type(self)(name=self.name)
        changed = [field for field in type(self).model_fields if getattr(self, field) != getattr(plain, field)]
        given = ", ".join(f"{field} {getattr(self, field)}" for field in changed)
        return f"{self.name} ({given})" if given else self.name


class LossSpec(Message):
    """The loss of a run.

    Attributes:
        name: of a built-in one, `SEVERAL` for a weighted sum of them, or ``module:function``.
        terms: a built-in loss, or several that are added up; none for a loss of the user's own.
    """

    DOMAIN: ClassVar[str] = "raycloak/loss/v1"

    name: str
    terms: tuple[LossTerm, ...] = ()

    @property
    def text(self) -> str:
        """The loss for a reader, with the settings that are not at their defaults."""
        return " + ".join(term.text for term in self.terms) or self.name

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the loss of that name, a built-in one at its defaults."""
        return cls(name=name, terms=() if ":" in name else (LossTerm.model_validate({"name": name}),))


def has_accuracy(loss: str) -> bool:
    """Return whether an accuracy is measured under the loss of this name."""
    return loss in ("cross_entropy", "binary_cross_entropy")
