"""The loss in a configuration: a name, a built-in loss with settings, or several that are added up."""

from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from raycloak.coordinator.config.section import Section
from raycloak.coordinator.config.sections import require_known
from raycloak.workers.terms.loss import LOSSES_OF_CLASSES, LOSSES_OF_TOKENS, SEVERAL, LossName

LOSSES: tuple[str, ...] = get_args(LossName)
"""The losses that have a name; `raycloak.workers.models.losses` computes them."""


class LossConfig(Section):
    """A built-in loss with settings, which are public constants; or one of several losses that are added up.

    Attributes:
        name: ``cross_entropy``, ``token_cross_entropy``, ``next_token_cross_entropy``, ``binary_cross_entropy``,
            ``mse`` or ``huber``.
        class_weights: factor of each class's loss, of a cross entropy over classes, in the order of the classes.
        positive_weights: factor of the positive labels of each output, of ``binary_cross_entropy``.
        label_smoothing: share of each label that is spread over all classes, of a cross entropy; 0 if absent.
        delta: the error beyond which ``huber`` is a line, in units of the label; 1 if absent.
        outputs: columns of the model's output that it takes, as one of several losses. ``cross_entropy`` takes one
            column of the labels, any other as many as outputs.
        weight: its factor, as one of several losses; 1 if absent.
    """

    name: str
    class_weights: Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=2)] | None = None
    positive_weights: Annotated[list[Annotated[float, Field(gt=0, le=1e6)]], Field(min_length=1)] | None = None
    label_smoothing: float | None = Field(default=None, ge=0, lt=1)
    delta: float | None = Field(default=None, gt=0, le=1e9)
    outputs: int | None = Field(default=None, gt=0, le=2**20)
    weight: float | None = Field(default=None, gt=0, le=1e6)

    @field_validator("name")
    @classmethod
    def _built_in(cls, name: str) -> str:
        if ":" in name:
            raise ValueError(f"a loss of your own has no settings here; write loss: {name}")
        return require_known(name, LOSSES, "loss", "your own, as loss: module:function")

    @model_validator(mode="after")
    def _settings_of_the_loss(self) -> Self:
        owners = {
            "class_weights": LOSSES_OF_CLASSES,
            "positive_weights": ("binary_cross_entropy",),
            "label_smoothing": (*LOSSES_OF_CLASSES, "binary_cross_entropy"),
            "delta": ("huber",),
        }
        for field, names in owners.items():
            if getattr(self, field) is not None and self.name not in names:
                raise ValueError(f"{field} belongs to {', '.join(names)}")
        if self.class_weights is not None and not any(self.class_weights):
            raise ValueError("class_weights has no class that counts")
        return self


def _check_losses(loss: str | LossConfig | list[LossConfig]) -> str | LossConfig | list[LossConfig]:
    """Refuse what one loss has and several have not, and the reverse."""
    if isinstance(loss, str):
        return require_known(loss, LOSSES, "loss", "module:function")
    if isinstance(loss, LossConfig):
        if loss.outputs is not None or loss.weight is not None:
            raise ValueError("outputs and weight belong to one of several losses, in a list")
        return loss
    for index, each in enumerate(loss):
        if each.name in LOSSES_OF_TOKENS:
            raise ValueError(f"entry {index}: {each.name} takes all outputs, so it cannot be one of several")
        if each.outputs is None or (each.outputs < 2 and each.name == "cross_entropy"):
            raise ValueError(
                f"entry {index}: give outputs, the number of outputs it takes; cross_entropy takes 2 or more"
            )
        given = each.class_weights or each.positive_weights
        if given is not None and len(given) != each.outputs:
            raise ValueError(f"entry {index} has {each.outputs} outputs and {len(given)} weights; give one for each")
    return loss


def _form_of_loss(loss: Any) -> str:
    if isinstance(loss, list):
        return "several"
    return "with_settings" if isinstance(loss, dict | LossConfig) else "named"


# By the form that was given, an error is of one alternative and names its field.
LossField = Annotated[
    Annotated[str, Tag("named")]
    | Annotated[LossConfig, Tag("with_settings")]
    | Annotated[list[LossConfig], Field(min_length=2), Tag("several")],
    Discriminator(_form_of_loss),
    AfterValidator(_check_losses),
]
"""A loss's name, a loss with settings, or several losses that are added up."""


def name_of_loss(loss: str | LossConfig | list[LossConfig]) -> str:
    """Return the name of a loss; `SEVERAL` for more than one."""
    if isinstance(loss, list):
        return SEVERAL
    return loss if isinstance(loss, str) else loss.name
