"""The model and loss of a configuration, and how they are computed. Apart from other references: they need torch."""

from raycloak.coordinator.config.losses import LossConfig, name_of_loss
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import ModelConfig
from raycloak.metrics.errors import ConfigError
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.hub_model import HubSpec
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec, LossTerm


def model_source(model: str | ModelConfig | None) -> ModelSource:
    """Return the source of the model that a configuration names; ConfigError ``config`` if it names none."""
    if model is None:
        raise ConfigError("config", "no model is named.", "Name one in the configuration.")
    if isinstance(model, str):
        return ModelSource.of(model)
    # Not strict: what a section has as lists, messages have as tuples.
    return ModelSource.of(HubSpec.model_validate(model.model_dump(), strict=False))


def compute_mode(config: RunConfig) -> ComputeMode:
    """Return the way in which the workers compute the model."""
    return ComputeMode(config.precision, config.gradient_checkpointing)


def micro_batch_bytes(config: RunConfig) -> int | None:
    """Return the memory that one micro-batch may take, in bytes; None for what its device spares."""
    return None if config.micro_batch_bytes == "auto" else config.micro_batch_bytes


def loss_spec(loss: str | LossConfig | list[LossConfig]) -> LossSpec:
    """Return the loss of a run with all its settings."""
    if isinstance(loss, str):
        return LossSpec.of(loss)
    given = [each.model_dump(exclude_none=True) for each in (loss if isinstance(loss, list) else [loss])]
    # Not strict: what a section has as lists, messages have as tuples.
    terms = tuple(LossTerm.model_validate(each, strict=False) for each in given)
    return LossSpec(name=name_of_loss(loss), terms=terms)
