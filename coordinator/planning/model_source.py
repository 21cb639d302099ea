"""The model that a configuration names, and how it is computed. Apart from other references: models need torch."""

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import ModelConfig
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.compute_mode import ComputeMode
from raycloak.workers.inputs.hub_model import HubSpec
from raycloak.workers.inputs.models import ModelSource


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
