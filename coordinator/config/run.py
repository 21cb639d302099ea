"""RunConfig: the one typed configuration, the same from Python and YAML.

Unknown fields are refused. Contradictions between fields are refused here and in `coordinator/config/sections.py`.
Checks that need the data or the model (capacity, budget, layers) are in `coordinator/planning/plan.py`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from raycloak.attestation.core.mask_graph import LARGEST_COMPLETE
from raycloak.attestation.files.yaml_reader import parse_yaml, read_yaml
from raycloak.coordinator.config.losses import LossField, name_of_loss
from raycloak.coordinator.config.section import Section, validated
from raycloak.coordinator.config.sections import (
    LOSS_OF_TASK,
    AttestationConfig,
    BoundaryConfig,
    CheckpointConfig,
    DatasetConfig,
    DPConfig,
    EarlyStoppingConfig,
    EvaluationConfig,
    FailureConfig,
    KeyServiceConfig,
    LedgerConfig,
    LoggersConfig,
    MasksConfig,
    MeasurementsConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    RingConfig,
    UseGpu,
)
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.descriptor import TABLES
from raycloak.workers.terms.loss import has_accuracy
from raycloak.workers.terms.mechanism import UnitTerms

DEFAULT_STEPS = 200
"""Steps of a run that gives neither steps nor epochs."""

MOST_VIRTUAL_WORKERS = 8
"""Virtual workers of a run that does not say how many, unless fewer save rows or there are more workers."""


# By the kind that was given, an error is of one alternative and names its field.
ModelField = (
    Annotated[
        Annotated[str, Tag("function")] | Annotated[ModelConfig, Tag("hub")],
        Discriminator(lambda model: "hub" if isinstance(model, dict | ModelConfig) else "function"),
    ]
    | None
)

# For the same reason: the error of a wrong number does not add that it is not the word either.
BytesField = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[int, Field(gt=0), Tag("bytes")],
    Discriminator(lambda given: "auto" if given == "auto" else "bytes"),
]


class RunConfig(Section):
    """A training run.

    Attributes:
        name: prefix of the run directory.
        num_workers: TrainWorkers to start, and to keep.
        min_workers: the fewest with which the run continues.
        max_workers: the most that it grows to if the cluster has room; ``num_workers`` by default.
        use_gpu: gives each worker a share of a GPU; ``if_there`` lets all compute on the CPU where none can be given.
        virtual_workers: V, fixed for the run; the result does not depend on how workers host them. The plan chooses it
            if absent.
        batch_size_per_worker, expected_batch_size: the public batch size, one of the two. With ``epochs`` and noise
            that the plan may correlate it takes neither, and the plan chooses.
        micro_batch_size: most physical rows per forward pass; if absent, as many as memory holds.
        micro_batch_bytes: memory that one micro-batch may take beside the model, in bytes; ``auto`` is 1 GiB on a CPU,
            and on a GPU 16 GiB, or half of what the model leaves of the worker's share if that is less.
        steps, epochs: planned steps, or average passes over the data; at most one of the two, 200 steps by default.
        model: ``module:function`` that returns a ``torch.nn.Module``, or a Hugging Face model by configuration; a
            Trainer may be given a callable instead.
        loss: ``cross_entropy``, ``token_cross_entropy``, ``next_token_cross_entropy``, ``binary_cross_entropy``,
            ``mse``, ``huber`` or ``module:function`` of (output, label) giving one loss per example; a built-in one
            with settings; or a list of those, which are added up. A Hugging Face model has its task's by default.
        early_stopping: ends the run once a public or released result no longer gets better.
        seed: public seed of the model's initial parameters.
        aggregators: S, number of parameter ranges; if absent, one, or as many as the memory of the nodes needs.
        epoch_steps: E; virtual-worker keys change every E steps, on fresh evidence.
        secret_retention: whether a generated run secret is destroyed (``run``) or kept (``keep``) when the run is
            complete.
        policy: evidence policy file; without one, simulated evidence is accepted and the run says SIMULATED.
        collateral: file that names the vendors' collateral; needed if the policy accepts hardware only.
        key_service: the data owner's key service; without one, every key comes from the run secret alone.
        attestation: whether others can follow the run's evidence over gRPC.
        cpu_capability: instruction set that the CPU kernels keep to: ``avx2``, ``avx512``, ``avx512_bf16`` or ``amx``;
            ``auto`` is the widest of these that all nodes share as the run begins, and ``default`` whatever each has.
        threads_per_worker: threads of one torch operation in a worker; another number is another computation.
        precision: of the forward and backward pass, ``float32`` or ``bf16``; parameters and sums stay as they are.
        gradient_checkpointing: recomputes the blocks of a Hugging Face model in the backward pass, for less memory.
        callbacks: the user's own classes, ``module:Class``, which are told of the run; see `docs/extending.md`.
        loggers: tracking tools that are told of the run; see `docs/loggers.md`.
        allow_nondeterministic: lets operations without a deterministic kernel run; the run is then marked NOT EXACT.
    """

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$", max_length=100)
    num_workers: int = Field(default=3, gt=0)
    min_workers: int | None = Field(default=None, gt=0)
    max_workers: int | None = Field(default=None, gt=0)
    virtual_workers: int | None = Field(default=None, gt=0)
    use_gpu: UseGpu = False
    batch_size_per_worker: int | None = Field(default=None, gt=0)
    expected_batch_size: float | None = Field(default=None, gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    micro_batch_bytes: BytesField = "auto"
    steps: int | None = Field(default=None, gt=0, le=2**31)
    epochs: float | None = Field(default=None, gt=0, le=2**20)
    model: ModelField = None
    loss: LossField = "cross_entropy"
    seed: int = Field(default=0, ge=0, lt=2**63)
    dataset: DatasetConfig | None = None
    evaluation: EvaluationConfig | None = None
    measurements: MeasurementsConfig = MeasurementsConfig()
    early_stopping: EarlyStoppingConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    dp_config: DPConfig
    secure_aggregation: bool = True
    masks: MasksConfig = MasksConfig()
    ring: RingConfig = RingConfig()
    aggregators: int | None = Field(default=None, gt=0)
    epoch_steps: int = Field(default=100, gt=0)
    ledger: LedgerConfig = LedgerConfig()
    policy: str | None = None
    collateral: str | None = None
    key_service: KeyServiceConfig | None = None
    attestation: AttestationConfig = AttestationConfig()
    secret_retention: Literal["run", "keep"] = "run"
    failure: FailureConfig = FailureConfig()
    boundary: BoundaryConfig | None = None
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    cpu_capability: Literal["auto", "default", "avx2", "avx512", "avx512_bf16", "amx"] = "auto"
    threads_per_worker: int = Field(default=1, gt=0, le=1024)
    precision: Literal["float32", "bf16"] = "float32"
    gradient_checkpointing: bool = False
    allow_nondeterministic: bool = False
    callbacks: list[str] = Field(default_factory=list)
    loggers: LoggersConfig = LoggersConfig()

    @model_validator(mode="before")
    @classmethod
    def _default_steps(cls, raw: Any) -> Any:
        """Plan `DEFAULT_STEPS` steps where neither number is given; a dump of a configuration keeps which one was."""
        if isinstance(raw, dict) and raw.get("steps") is None and raw.get("epochs") is None:
            return {**raw, "steps": DEFAULT_STEPS}
        return raw

    @model_validator(mode="before")
    @classmethod
    def _follow_the_model(cls, raw: Any) -> Any:
        """Take the loss from the model's task, and the tokenizer of text from the model."""
        if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict | ModelConfig):
            return raw
        given = raw["model"]
        model = given.model_dump() if isinstance(given, ModelConfig) else given
        if "loss" not in raw and model.get("task") in LOSS_OF_TASK:
            raw = {**raw, "loss": LOSS_OF_TASK[model["task"]]}
        if isinstance(raw.get("dataset"), dict):
            raw = {**raw, "dataset": _with_tokenizer(raw["dataset"], model.get("hf"))}
        split = raw.get("evaluation")
        if isinstance(split, dict) and isinstance(split.get("dataset"), dict):
            raw = {**raw, "evaluation": {**split, "dataset": _with_tokenizer(split["dataset"], model.get("hf"))}}
        return raw

    @model_validator(mode="before")
    @classmethod
    def _average_what_noise_leaves(cls, raw: Any) -> Any:
        """Keep averaged weights where noise may be correlated and nothing else is said: it cancels over steps."""
        if not isinstance(raw, dict):
            return raw
        try:
            noise = DPConfig.model_validate(raw.get("dp_config")).noise
        except ValidationError:
            # Its own field says what is wrong with it.
            return raw
        given = raw.get("optimizer", {})
        fields = given.model_dump(exclude_unset=True) if isinstance(given, OptimizerConfig) else given
        if noise.correlated == "off" or not isinstance(fields, dict) or "averaged_weights" in fields:
            return raw
        return {**raw, "optimizer": {**fields, "averaged_weights": True}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = (self.batch_size_per_worker is not None) + (self.expected_batch_size is not None)
        if given > 1 or (given == 0 and not self.leaves_the_batch):
            raise ValueError("give exactly one of batch_size_per_worker and expected_batch_size")
        if self.micro_batch_size is not None and self.micro_batch_bytes != "auto":
            raise ValueError("give micro_batch_size, which takes no measurement, or micro_batch_bytes, not both")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        if self.virtual_workers is not None and self.virtual_workers < self.num_workers:
            raise ValueError(
                f"virtual_workers ({self.virtual_workers}) must be at least num_workers ({self.num_workers})"
            )
        if self.min_workers is None and self.fewest_workers > self.num_workers:
            raise ValueError(
                f"num_workers ({self.num_workers}): secure_aggregation masks each worker with another, so take 2 or "
                "more, or set secure_aggregation: false"
            )
        if self.fewest_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.fewest_workers}) must not exceed num_workers ({self.num_workers})")
        if self.most_workers < self.num_workers:
            raise ValueError(f"max_workers ({self.most_workers}) must be at least num_workers ({self.num_workers})")
        if self.virtual_workers is not None and self.most_workers > self.virtual_workers:
            raise ValueError(
                f"max_workers ({self.most_workers}) must not exceed virtual_workers ({self.virtual_workers})"
            )
        if self.secure_aggregation and self.fewest_workers < 2:
            raise ValueError(
                "secure_aggregation needs min_workers of at least 2: a single worker has no peer to mask with"
            )
        if not self.secure_aggregation and self.dp_config.enabled and self.most_workers > 1:
            raise ValueError(
                "secure_aggregation: false with several workers would show the aggregator vectors that carry only a "
                "share of the noise; use one worker, or leave it on"
            )
        if self.steps is not None and self.optimizer.warmup_steps > self.steps:
            raise ValueError(f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) exceeds steps ({self.steps})")
        if self.placement.resources_per_worker.get("GPU") and not self.use_gpu:
            raise ValueError("placement.resources_per_worker reserves GPUs, but use_gpu is false")
        if self.dataset is not None and self.dataset.kind == "sealed" and self.dataset.public:
            raise ValueError("dataset: sealed training data is not public; train on it in the clear if it is")
        if not self.dp_config.enabled and self.measurements != MeasurementsConfig():
            raise ValueError("measurements are noised and need dp_config.enabled; measure public data with evaluation")
        if self.dp_config.enabled and self.dp_config.colluding_workers >= max(self.fewest_workers - 1, 1):
            raise ValueError("colluding_workers must leave two honest workers out of min_workers")
        return self

    @model_validator(mode="after")
    def _sent_step_by_step(self) -> Self:
        """Refuse what needs the examples of a dataset, where a client sends them for one step at a time."""
        if self.evaluation is not None and self.evaluation.dataset.kind == "sent":
            raise ValueError("evaluation.dataset: kind sent is for training; evaluate on a split that is public")
        if self.dataset is None or self.dataset.kind != "sent":
            return self
        if self.epochs is not None:
            raise ValueError("epochs: nobody knows how many examples a client will send; give steps")
        if self.measurements != MeasurementsConfig():
            raise ValueError("measurements: the examples that a client sent are not kept, so none can be measured")
        if not self.dp_config.enabled:
            raise ValueError("dp_config.enabled: data that a client sends is private; train on public data as a file")
        return self

    @model_validator(mode="after")
    def _nothing_between_mixed_steps(self) -> Self:
        if self.dp_config.noise.correlated == "off":
            return self
        if self.dataset is not None and self.dataset.kind == "sent":
            raise ValueError("dp_config.noise.correlated: a client chooses the steps of what it sends, so leave it off")
        if self.measurements != MeasurementsConfig():
            raise ValueError(
                "dp_config.noise.correlated: no proof covers measurements between its steps; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _masks_withstand_it(self) -> Self:
        colluding = self.masks.colluding_workers
        if colluding is None:
            return self
        if not self.secure_aggregation:
            raise ValueError("masks.colluding_workers needs secure_aggregation")
        if self.num_workers <= LARGEST_COMPLETE:
            raise ValueError(
                f"masks.colluding_workers needs more than {LARGEST_COMPLETE} workers, and there are "
                f"{self.num_workers}: leave it out, and all pairs mask, which withstands more"
            )
        if colluding > self.fewest_workers - 2:
            raise ValueError(
                f"masks.colluding_workers ({colluding}) must leave two honest workers out of min_workers "
                f"({self.fewest_workers}): raise min_workers to {colluding + 2}"
            )
        return self

    @model_validator(mode="after")
    def _classes_of_the_loss(self) -> Self:
        measured = self.measurements.evaluation
        if measured is not None and measured.classes is not None and self.loss_name != "cross_entropy":
            raise ValueError("measurements.evaluation.classes belongs to cross_entropy: no other loss predicts a class")
        return self

    @model_validator(mode="after")
    def _stops_by_what_is_measured(self) -> Self:
        if self.early_stopping is None:
            return self
        metric = self.early_stopping.metric
        on_split = metric.startswith("evaluation_")
        section = "evaluation" if on_split else "measurements.evaluation"
        if (self.evaluation if on_split else self.measurements.evaluation) is None:
            raise ValueError(f"early_stopping.metric {metric} needs {section}")
        is_accuracy = has_accuracy(self.loss_name)
        if metric.endswith("accuracy") and not is_accuracy:
            raise ValueError(f"early_stopping.metric: {section} has no accuracy under {self.loss_name}")
        if metric == "evaluation_loss" and is_accuracy:
            raise ValueError(f"early_stopping.metric: under {self.loss_name} evaluation measures the accuracy")
        return self

    @model_validator(mode="after")
    def _rows_of_units(self) -> Self:
        if self.dataset is not None and self.dataset.unit is not None and self.dataset.rows_per_unit is None:
            raise ValueError("dataset.rows_per_unit: say how many rows of a unit take part in one step at most")
        if self.evaluation is not None and self.evaluation.dataset.most_rows is not None:
            raise ValueError(
                "evaluation.dataset: rows_per_unit and blocks_per_unit are for training; a split is read whole"
            )
        if self.evaluation is not None and self.evaluation.dataset.augment is not None:
            raise ValueError("evaluation.dataset.augment: a split is measured as it is")
        return self

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        if self.dataset is None or self.evaluation is None:
            return self
        lists = [part.classes for part in (self.dataset, self.evaluation.dataset) if part.kind in TABLES]
        if len(lists) == 2 and lists[0] != lists[1] and any(isinstance(each, list) for each in lists):
            raise ValueError("evaluation.dataset.classes must be dataset.classes: a label has one number")
        trained, measured = self.dataset.tokenizer, self.evaluation.dataset.tokenizer
        if trained is not None and measured is not None and trained != measured:
            raise ValueError("evaluation.dataset.tokenizer must be dataset.tokenizer: the model knows one vocabulary")
        return self

    @property
    def loss_name(self) -> str:
        """The name of the loss; ``several`` for a list of them."""
        return name_of_loss(self.loss)

    @property
    def fewest_workers(self) -> int:
        """The ``min_workers``, or its default: 2 with secure aggregation, else 1."""
        if self.min_workers is not None:
            return self.min_workers
        return 2 if self.secure_aggregation else 1

    @property
    def most_workers(self) -> int:
        """The ``max_workers``, or its default: ``num_workers``."""
        return self.max_workers if self.max_workers is not None else self.num_workers

    @property
    def first_aggregators(self) -> int:
        """The aggregators to start before the model's size is known."""
        return self.aggregators or 1

    @property
    def slices(self) -> int:
        """The number of slices that data is sealed in: ``virtual_workers``, or its default."""
        if self.virtual_workers is not None:
            return self.virtual_workers
        return max(MOST_VIRTUAL_WORKERS, self.most_workers)

    @property
    def has_sealed_data(self) -> bool:
        """Return whether training or evaluation data is sealed."""
        parts = (self.dataset, self.evaluation.dataset if self.evaluation else None)
        return any(part is not None and part.kind == "sealed" for part in parts)

    def sized(self, num_examples: int) -> "RunConfig":
        """Return the configuration with its epochs counted as steps; itself if it gives steps.

        Raises:
            ConfigError: ``config`` if the optimizer warms up for longer.
        """
        if self.epochs is None:
            return self
        # A batch size that divides the examples must not cost one more step by a rounding error.
        steps = max(1, math.ceil(self.epochs * num_examples / self.batch_size * (1 - 1e-12)))
        return parse_config(self.model_dump(mode="json") | {"steps": steps, "epochs": None})

    @property
    def planned_steps(self) -> int:
        """The number of planned steps, of a configuration that gives it or is :meth:`sized`."""
        assert self.steps is not None, "epochs become steps once the data is known"
        return self.steps

    @property
    def max_participations(self) -> int | None:
        """The k of data that a client sends: most steps that one example takes part in; None for a dataset."""
        return self.dataset.max_participations if self.dataset is not None else None

    @property
    def unit_terms(self) -> UnitTerms:
        """The unit that epsilon protects of ``dataset``; of examples in memory their descriptor tells it."""
        return UnitTerms() if self.dataset is None else self.dataset.unit_terms

    @property
    def leaves_the_batch(self) -> bool:
        """True if there is enough for the plan to choose the batch, should none be given."""
        dp = self.dp_config
        chooses = dp.enabled and dp.noise.correlated == "auto" and dp.noise.bands is None
        return chooses and dp.target_epsilon is not None and self.epochs is not None

    @property
    def batch_size(self) -> float:
        """The public divisor: expected number of units in a step."""
        if self.expected_batch_size is not None:
            return self.expected_batch_size
        assert self.batch_size_per_worker is not None
        return float(self.num_workers * self.batch_size_per_worker)


def _with_tokenizer(dataset: dict[str, Any], hf: Any) -> dict[str, Any]:
    kind = dataset.get("kind")
    takes_it = kind in ("text", "text_blocks") or (kind == "hf" and not {"vocabulary", "inputs"} & dataset.keys())
    return {"tokenizer": hf, **dataset} if takes_it else dataset


def parse_config(raw: Any, overrides: list[str] | None = None) -> RunConfig:
    """Return a RunConfig from plain data, after ``dotted.key=value`` overrides (values are YAML).

    Raises:
        ConfigError: ``config``, with every wrong field named on one line.
    """
    if not isinstance(raw, dict):
        raise ConfigError("config", "the configuration must be a mapping of fields.", "See docs/configuration.md.")
    for override in overrides or []:
        apply_override(raw, override)
    return validated(RunConfig, raw)


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file; the same errors as :func:`parse_config`."""
    return parse_config(read_yaml(Path(path), "config"), overrides)


def require_config(config: object) -> None:
    """Raise ConfigError ``config`` where a program gives fields or a path in the place of a configuration."""
    if not isinstance(config, RunConfig):
        raise ConfigError(
            "config",
            f"a {type(config).__name__} is no configuration.",
            "Give a raycloak.RunConfig, or raycloak.load_config of a file.",
        )


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set the field that ``dotted.key=value`` names; ConfigError ``config`` if it names none."""
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError("config", f"--set {override}: expected dotted.key=value.", "For example --set steps=10.")
    node = raw
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError("config", f"--set {key}: {parent} is not a section.", "See docs/configuration.md.")
    node[last] = parse_yaml(value, f"--set {override}", "config")
