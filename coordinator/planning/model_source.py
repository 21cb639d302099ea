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
    lora = None if model.lora is None else model.lora.model_dump()
    if lora is not None and isinstance(lora["target_modules"], list):
        lora["target_modules"] = tuple(lora["target_modules"])
    return ModelSource.of(HubSpec.model_validate({**model.model_dump(exclude={"lora"}), "lora": lora}))


def compute_mode(config: RunConfig) -> ComputeMode:
    """Return the way in which the workers compute the model."""
    return ComputeMode(config.precision, config.gradient_checkpointing)


def loss_spec(loss: str | LossConfig | list[LossConfig]) -> LossSpec:
    """Return the loss of a run with all its settings."""
    if isinstance(loss, str):
        return LossSpec.of(loss)
    return LossSpec(name=name_of_loss(loss), terms=tuple(map(_loss_term, loss if isinstance(loss, list) else [loss])))


def _loss_term(config: LossConfig) -> LossTerm:
    given = config.model_dump(exclude_none=True)
    return LossTerm.model_validate(
        {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}
    )
