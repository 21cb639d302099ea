"""TrainingConfig: the fields of a run that a user of a training service decides, by the names of the CLI.

It is a part of `raycloak.coordinator.config.run.RunConfig`: every field that both have is the same. Fields that the
service decides are refused by name. Checks between fields, of the data and of the model are made by the service, which
completes the configuration to a run's.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from raycloak.coordinator.config.losses import LossField
from raycloak.coordinator.config.run import ModelField, RunConfig
from raycloak.coordinator.config.section import ALTERNATIVES, Section, problem_of
from raycloak.coordinator.config.sections import (
    DatasetConfig,
    DPConfig,
    EarlyStoppingConfig,
    KeyServiceConfig,
    LoraConfig,
    MeasurementsConfig,
    ModelConfig,
    OptimizerConfig,
)
from raycloak.metrics.service_errors import ServiceValidationError

MOST_METADATA: Final = 32
"""Entries of metadata. They are for a person who looks for a client or an artifact, so a page of them is enough."""
Name = Annotated[str, Field(min_length=1, max_length=64)]
Note = Annotated[
    str, Field(max_length=512), BeforeValidator(lambda note: str(note) if isinstance(note, int | float) else note)
]
Metadata = Annotated[dict[Name, Note], Field(max_length=MOST_METADATA)]


# By the kind that was given, an error is of one alternative and names its field.
DatasetField = Annotated[
    Annotated[Name, Tag("registered")] | Annotated[DatasetConfig, Tag("sent")],
    Discriminator(lambda dataset: "sent" if isinstance(dataset, dict | DatasetConfig) else "registered"),
]


class TrainingConfig(Section):
    """A training run on a service, as far as its user decides it.

    Attributes:
        name: of the client, and prefix of the run directory.
        model: name of a model that the service registers; a Hugging Face model by configuration; or
            ``module:function``, which the service must allow you by name.
        lora: the adapter to train, of a Hugging Face model or a registered one; ``model.lora`` says the same.
        loss: see `RunConfig`; the model's own, or ``cross_entropy``, if absent.
        optimizer, dp_config, measurements, early_stopping: see `RunConfig`. The split that is evaluated comes with a
            registered dataset.
        dataset: name of a dataset that the service registers; or a `DatasetConfig` of kind ``sent``, of the
            examples that this client sends.
        key_service: of the owner of data that this client sends, as `DataKeys.key_service` gives it. Its contract is
            the content of the file, not a path. Needed there, and nowhere else.
        expected_batch_size: the public divisor of a step's sum, in examples.
        micro_batch_size: most physical rows per forward pass; as many as memory holds, if absent.
        steps, epochs: planned steps, or passes over the data on average; at most one, 200 steps if both are absent.
        seed: public seed of the model's initial parameters.
        precision, gradient_checkpointing: see `RunConfig`.
        metadata: notes for yourself; at most 32 entries, of 64 characters for 512.

    Raises:
        ServiceValidationError: ``config``, with the first wrong field in ``field``, and all of them in the message.
    """

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$", max_length=100)
    model: ModelField
    lora: LoraConfig | None = None
    loss: LossField | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    dp_config: DPConfig
    dataset: DatasetField
    key_service: KeyServiceConfig | None = None
    measurements: MeasurementsConfig = MeasurementsConfig()
    early_stopping: EarlyStoppingConfig | None = None
    expected_batch_size: float = Field(gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, gt=0, le=2**31)
    epochs: float | None = Field(default=None, gt=0, le=2**20)
    seed: int = Field(default=0, ge=0, lt=2**63)
    precision: Literal["float32", "bf16"] = "float32"
    gradient_checkpointing: bool = False
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _what_the_service_decides(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        decided = sorted((RunConfig.model_fields.keys() - cls.model_fields.keys()) & raw.keys())
        if "batch_size_per_worker" in decided:
            raise ValueError("batch_size_per_worker: the service decides how many workers; give expected_batch_size")
        if decided:
            raise ValueError(f"{decided[0]}: the service decides this field; leave it out")
        return raw

    @field_validator("model")
    @classmethod
    def _some_model(cls, model: str | ModelConfig | None) -> str | ModelConfig:
        if not model:
            raise ValueError("name a model")
        return model

    @field_validator("dataset")
    @classmethod
    def _registered_or_sent(cls, dataset: str | DatasetConfig) -> str | DatasetConfig:
        # A path of the service's machines is not a client's to name.
        if isinstance(dataset, DatasetConfig) and str(dataset.kind) != "sent":
            raise ValueError(f"kind {dataset.kind} is registered with the service; give the name it has there")
        return dataset

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.dataset, DatasetConfig) != (self.key_service is not None):
            raise ValueError("key_service belongs to a dataset of kind sent, and is needed there")
        # A path of the service's machines is not a client's to name.
        if self.key_service is not None and self.key_service.text is None:
            raise ValueError("key_service.contract: give the content of the contract's file, a JSON object")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps: epochs are given too; leave one of the two out")
        if self.lora is not None and isinstance(self.model, ModelConfig) and self.model.lora is not None:
            raise ValueError("lora: model.lora is given too; leave one of the two out")
        if self.lora is not None and isinstance(self.model, str) and ":" in self.model:
            raise ValueError("lora belongs to a Hugging Face model; the function of a model adds its own adapter")
        return self

    @classmethod
    def refusal(cls, error: ValidationError) -> ServiceValidationError:
        """Return what the service would say of these fields."""
        fields = [(_field_of(each["loc"]), each) for each in error.errors()]
        wrong = [(field, problem_of(cls, field, each)) for field, each in fields]
        said = "; ".join(f"{field}: {problem}" if field else problem for field, problem in wrong)
        # A refusal of the whole names its field first.
        first = wrong[0][1].partition(":")[0].partition(" ")[0]
        named = first if first in RunConfig.model_fields or first in cls.model_fields else ""
        field = wrong[0][0] or named
        return ServiceValidationError(
            "config", said if said.endswith("?") else f"{said}.", "See docs/service.md.", field=field
        )

    def to_json(self) -> str:
        """Return the configuration as the wire carries it: the fields that were given."""
        return self.model_dump_json(exclude_unset=True)


def parse_training_config(raw: Any) -> TrainingConfig:
    """Return a TrainingConfig from plain data, or from the text of a JSON object.

    Raises:
        ServiceValidationError: ``config``, with the first wrong field in ``field``, and all of them in the message.
    """
    try:
        if isinstance(raw, str | bytes):
            return TrainingConfig.model_validate_json(raw)
        return TrainingConfig.model_validate(raw)
    except ValidationError as error:
        raise TrainingConfig.refusal(error) from None


def _field_of(place: tuple[int | str, ...]) -> str:
    tried = ALTERNATIVES | {("dataset", "sent"), ("dataset", "registered")}
    return ".".join(str(part) for part in place if (place[0], part) not in tried)
