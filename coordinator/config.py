"""RunConfig: the one typed configuration, the same from Python and YAML.

Unknown fields are refused. What is contradictory on its face is refused here; what needs the data or the model
(capacity, budget, layers) is refused by `coordinator/plan.py`.
"""

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attestation.yaml_files import parse_yaml, read_yaml
from metrics.errors import ConfigError

S = TypeVar("S", bound="Section")
Kept = Literal["sealed", "clear"]


class Section(BaseModel):
    """Base of all sections: unknown fields refused, frozen, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DPConfig(Section):
    """Differential privacy. Either ``target_epsilon`` or ``noise_multiplier``, never both.

    Attributes:
        enabled: False needs a dataset declared public; the run is then marked NOT PRIVATE.
        target_epsilon: epsilon the planned steps may spend; the noise multiplier is solved from it.
        target_delta: delta of every stated epsilon.
        noise_multiplier: z, if it is given instead of solved.
        epsilon_cap: hard cap of the run's own account; ``target_epsilon`` if absent.
        max_grad_norm: C.
        colluding_workers: T, workers whose noise is not counted on.
        accountant: with which noise is solved and the account is held. ``auto`` is ``pld`` for the run's own account
            and the named account's for one that runs share.
    """

    enabled: bool = True
    target_epsilon: float | None = Field(default=None, gt=0)
    target_delta: float = Field(default=1e-5, gt=0, lt=1)
    noise_multiplier: float | None = Field(default=None, gt=0)
    epsilon_cap: float | None = Field(default=None, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    colluding_workers: int = Field(default=0, ge=0)
    accountant: Literal["auto", "rdp", "pld"] = "auto"

    @model_validator(mode="after")
    def _one_dial(self) -> Self:
        if self.enabled and (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of target_epsilon and noise_multiplier")
        if self.enabled and self.target_epsilon is None and self.epsilon_cap is None:
            raise ValueError("noise_multiplier needs an epsilon_cap")
        return self


class DatasetConfig(Section):
    """Where the examples are.

    Attributes:
        kind: ``digits`` (scikit-learn's 1,797 images), ``npz``, ``parquet``, ``module`` (``module:function``) or
            ``sealed`` (what ``raycloak data seal`` wrote).
        path: file of an npz or parquet dataset, folder of a sealed one, relative to the config file.
        function: ``module:function`` that returns a `workers.datasets.Dataset`.
        split: ``train`` or ``public`` for ``digits``.
        features, labels: array or column names of npz and parquet.
        scale: public constant that every feature is divided by.
        public: declares that the data needs no protection; of a sealed evaluation split, that results on it need none.
        fingerprint_key: file of 64 hexadecimal digits beside the data, with which every worker computes the
            fingerprint that an account may be bound to; relative to the config file.
        key_file: the data owner's key of a sealed dataset, which the orchestrator alone reads; relative to the config
            file.
    """

    kind: Literal["digits", "npz", "parquet", "module", "sealed"]
    path: str | None = None
    function: str | None = None
    split: Literal["train", "public"] = "train"
    features: str | list[str] = "images"
    labels: str = "labels"
    scale: float = Field(default=1.0, gt=0)
    public: bool = False
    fingerprint_key: str | None = None
    key_file: str | None = None

    @model_validator(mode="after")
    def _fields_of_kind(self) -> Self:
        if (self.kind in ("npz", "parquet", "sealed")) != (self.path is not None):
            raise ValueError("path belongs to kind npz, parquet or sealed, and is needed there")
        if (self.kind == "sealed") != (self.key_file is not None):
            raise ValueError("key_file belongs to kind sealed, and is needed there")
        if self.kind == "sealed" and (self.fingerprint_key is not None or self.scale != 1.0):
            raise ValueError("a sealed dataset has no fingerprint_key or scale; seal what they give")
        if (self.kind == "module") != (self.function is not None):
            raise ValueError("function belongs to kind module, and is needed there")
        return self


class EvaluationConfig(Section):
    """A split on which accuracy, or the loss, is measured every ``every`` steps and at the end.

    Results are exact and shown to everybody, so ``dataset.public`` must declare them public, also where the examples
    themselves are sealed.
    """

    dataset: DatasetConfig
    every: int = Field(default=10, gt=0)

    @property
    def kept(self) -> Kept:
        """How the examples are kept."""
        return "sealed" if self.dataset.kind == "sealed" else "clear"


class ClassCountsConfig(Section):
    """How many private examples each class has, released once, before the first step.

    Attributes:
        classes: K; labels outside [0, K) are not counted.
        noise_multiplier: standard deviation of the noise in each count, in examples.
    """

    classes: int = Field(gt=0, le=10_000)
    noise_multiplier: float = Field(gt=0)


class PrivateEvaluationConfig(Section):
    """Mean loss, and accuracy under ``cross_entropy``, of the model on the private training examples.

    Attributes:
        every: steps between two releases; the last is made at the end.
        noise_multiplier: noise of each release, in units of what one example contributes at most.
        loss_bound: B; each example's loss is cut to [-B, B].
    """

    every: int = Field(default=50, gt=0)
    noise_multiplier: float = Field(gt=0)
    loss_bound: float = Field(default=5.0, gt=0, le=1e6)


class MeasurementsConfig(Section):
    """What is released about the private examples beside the gradients, each with noise and a cost of its own."""

    class_counts: ClassCountsConfig | None = None
    evaluation: PrivateEvaluationConfig | None = None


class OptimizerConfig(Section):
    """Update rule of the aggregator, applied to the released average."""

    name: Literal["sgd", "adam", "adamw", "adafactor"] = "sgd"
    learning_rate: float = Field(default=0.5, gt=0, le=3e38)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)


class RingConfig(Section):
    """Integer ring of the updates.

    Attributes:
        bits: width; ``auto`` takes 32 where rounding costs less than 1 % of the sensitivity.
        clamp: bound of a coordinate of one virtual worker's sum; by default it never binds.
    """

    bits: Literal["auto", 32, 64] = "auto"
    clamp: float | None = Field(default=None, gt=0)


class LedgerConfig(Section):
    """Which ledger and account pay.

    Attributes:
        url: of the ledger; the file in the state folder if absent. A password in it is written and shown nowhere.
        account: that pays; without a name the run opens its own.
        witness: absolute folder on other storage, or http(s) URL, that is told every head of the ledger.
    """

    url: str | None = Field(default=None, repr=False)
    account: str | None = None
    witness: str | None = None


class KeyServiceConfig(Section):
    """The data owner's key service, which gives the second half of every virtual-worker key.

    Attributes:
        address: ``host:port``, as the workers reach it.
        contract: file that the service wrote, from the owner of the data; relative to the config file.
    """

    address: str = Field(pattern=r"^.+:[0-9]+$")
    contract: str


class AttestationConfig(Section):
    """How a run's evidence is shown to others while it goes on.

    Attributes:
        bind: ``host:port`` where the orchestrator serves the evidence service, on the driver's node; port 0 takes a
            free one. Without it nothing is served.
    """

    bind: str | None = Field(default=None, pattern=r"^.+:[0-9]{1,5}$")


class FailureConfig(Section):
    """Deadlines in seconds, and how many failures a run survives.

    Attributes:
        admission_deadline_s: for a member to open its data and to present its evidence.
        step_deadline_s: for a worker or aggregator to answer in a step; one that does not is killed and replaced.
        control_deadline_s: for the ledger or the orchestrator to answer; one that does not is restarted from disk.
        join_timeout_s: how long a run with fewer than ``min_workers`` waits for replacements before it ends.
        max_failures: members that may be lost before the run gives up.
    """

    admission_deadline_s: float = Field(default=120.0, gt=0)
    step_deadline_s: float = Field(default=120.0, gt=0)
    control_deadline_s: float = Field(default=30.0, gt=0)
    join_timeout_s: float = Field(default=120.0, ge=0)
    max_failures: int = Field(default=100, ge=0)


class PlacementConfig(Section):
    """Where the workers run, in the terms of Ray's placement groups.

    Attributes:
        strategy: how the initial workers spread over nodes; a joiner gets a group of its own.
        accelerator_type: model of the accelerator that each worker needs, as Ray names it.
        resources_per_worker: what each worker reserves; ``CPU`` and ``GPU`` replace the even share.
        labels: labels that a worker's node must carry, with Ray's selector syntax.
        deadline_s: after which what cannot be placed is named and refused.
    """

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    accelerator_type: str | None = None
    resources_per_worker: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    deadline_s: float = Field(default=60.0, gt=0)


class CheckpointConfig(Section):
    """Sealed packages of the released model; see `docs/tssp.md`.

    Attributes:
        checkpoint_frequency: steps between two packages; 0 seals one only when the run ends or is stopped.
        num_to_keep: packages that stay; the newest and the best always do.
        keep_best: released metric of which the best package stays as well.
        storage: folder or ``s3://bucket/prefix`` of all packages; ``packages/`` in the state
            folder if absent.
        recipients: files with the public keys of those who may open a package, besides the run itself.
    """

    checkpoint_frequency: int = Field(default=50, ge=0)
    num_to_keep: int = Field(default=2, gt=0)
    keep_best: Literal["evaluation_accuracy", "evaluation_loss"] | None = None
    storage: str | None = None
    recipients: list[str] = Field(default_factory=list)


class MetricsConfig(Section):
    """Address of the `/metrics` endpoint, ``host:port``; port 0 takes a free one."""

    bind: str = "127.0.0.1:0"


class RunConfig(Section):
    """A training run.

    Attributes:
        name: prefix of the run directory.
        num_workers, min_workers, max_workers: TrainWorkers to start and to hold on to, the fewest the run goes on
            with, and the most it grows to where the cluster has room; ``num_workers`` by default.
        virtual_workers: V, fixed for the run; the result does not depend on how workers host them.
        batch_size_per_worker, expected_batch_size: the public batch size, one of the two.
        micro_batch_size: physical rows per forward pass.
        steps: planned steps.
        model: ``module:function`` that returns a ``torch.nn.Module``; a Trainer may be given a callable instead.
        loss: ``cross_entropy``, ``mse`` or ``module:function`` of (output, label) giving one loss per example.
        seed: public seed of the model's initial parameters.
        aggregators: S, number of parameter ranges.
        epoch_steps: E; virtual-worker keys change every E steps, on fresh evidence.
        secret_retention: whether a generated run secret is destroyed (``run``) or kept (``keep``) when the run is
            complete.
        policy: evidence policy file; without one, simulated evidence is accepted and the run says SIMULATED.
        collateral: file that names the vendors' collateral; needed where the policy accepts hardware only.
        key_service: of the data owner; without one, every key comes from the run secret alone.
        attestation: whether others can follow the run's evidence over gRPC.
        cpu_capability: instruction set the CPU kernels are held to, ``avx2`` or ``avx512`` or ``default``.
        allow_nondeterministic: lets operations without a deterministic kernel run; the run is then marked NOT EXACT.
    """

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    num_workers: int = Field(default=3, gt=0)
    min_workers: int | None = Field(default=None, gt=0)
    max_workers: int | None = Field(default=None, gt=0)
    virtual_workers: int = Field(default=8, gt=0)
    use_gpu: bool = False
    batch_size_per_worker: int | None = Field(default=None, gt=0)
    expected_batch_size: float | None = Field(default=None, gt=0)
    micro_batch_size: int = Field(default=64, gt=0)
    steps: int = Field(default=200, gt=0)
    model: str | None = None
    loss: str = "cross_entropy"
    seed: int = Field(default=0, ge=0, lt=2**63)
    dataset: DatasetConfig | None = None
    evaluation: EvaluationConfig | None = None
    measurements: MeasurementsConfig = MeasurementsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    dp_config: DPConfig
    secure_aggregation: bool = True
    ring: RingConfig = RingConfig()
    aggregators: int = Field(default=1, gt=0)
    epoch_steps: int = Field(default=100, gt=0)
    ledger: LedgerConfig = LedgerConfig()
    policy: str | None = None
    collateral: str | None = None
    key_service: KeyServiceConfig | None = None
    attestation: AttestationConfig = AttestationConfig()
    secret_retention: Literal["run", "keep"] = "run"
    failure: FailureConfig = FailureConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    cpu_capability: Literal["default", "avx2", "avx512"] = "avx2"
    allow_nondeterministic: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.batch_size_per_worker is None) == (self.expected_batch_size is None):
            raise ValueError("give exactly one of batch_size_per_worker and expected_batch_size")
        if self.virtual_workers < self.num_workers:
            raise ValueError(
                f"virtual_workers ({self.virtual_workers}) must be at least num_workers ({self.num_workers})"
            )
        if self.fewest_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.fewest_workers}) must not exceed num_workers ({self.num_workers})")
        if self.most_workers < self.num_workers:
            raise ValueError(f"max_workers ({self.most_workers}) must be at least num_workers ({self.num_workers})")
        if self.most_workers > self.virtual_workers:
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
        if self.dataset is not None and self.dataset.kind == "sealed" and self.dataset.public:
            raise ValueError("dataset: sealed training data is not public; train on it in the clear if it is")
        if not self.dp_config.enabled and self.measurements != MeasurementsConfig():
            raise ValueError("measurements are noised and need dp_config.enabled; measure public data with evaluation")
        if self.dp_config.enabled and self.dp_config.colluding_workers >= max(self.fewest_workers - 1, 1):
            raise ValueError("colluding_workers must leave two honest workers out of min_workers")
        return self

    @property
    def fewest_workers(self) -> int:
        """``min_workers``, or its default: 2 with secure aggregation, else 1."""
        if self.min_workers is not None:
            return self.min_workers
        return 2 if self.secure_aggregation else 1

    @property
    def most_workers(self) -> int:
        """``max_workers``, or its default: ``num_workers``."""
        return self.max_workers if self.max_workers is not None else self.num_workers

    @property
    def batch_size(self) -> float:
        """The public divisor: expected number of examples in a step."""
        if self.expected_batch_size is not None:
            return self.expected_batch_size
        assert self.batch_size_per_worker is not None
        return float(self.num_workers * self.batch_size_per_worker)


def parse_config(raw: Any, overrides: list[str] | None = None) -> RunConfig:
    """A RunConfig from plain data, after ``dotted.key=value`` overrides (values are YAML).

    Raises:
        ConfigError: ``config``, with every wrong field named on one line.
    """
    if not isinstance(raw, dict):
        raise ConfigError("config", "the configuration must be a mapping of fields.", "See docs/configuration.md.")
    for override in overrides or []:
        _apply_override(raw, override)
    return validated(RunConfig, raw)


def validated(section: type[S], raw: Any, described_in: str = "docs/configuration.md") -> S:
    """A section from plain data; errors as :func:`parse_config`."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        found = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors())
        wrong = "; ".join(f"{field}: {problem}" if field else problem for field, problem in found)
        raise ConfigError("config", f"{wrong}.", f"See {described_in}.") from None


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file; the same errors as :func:`parse_config`."""
    return parse_config(read_yaml(path, "config"), overrides)


def _apply_override(raw: dict[str, Any], override: str) -> None:
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
