"""The sections of a configuration: fields, defaults, bounds, and contradictions within one section."""

import math
import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from raycloak.attestation.core.counted_noise import MOST_BANDS
from raycloak.attestation.core.secret_urls import secret_in
from raycloak.coordinator.config.section import Section
from raycloak.workers.inputs.augmentation import SHIFT
from raycloak.workers.inputs.descriptor import CLASSES, CONFIGURED, KINDS, LABELS, OF_SOME_KINDS, kinds_with
from raycloak.workers.inputs.units import MOST_CHOSEN
from raycloak.workers.terms.built_in_rules import RULE_SETTINGS, RULES, rules_with
from raycloak.workers.terms.mechanism import EXAMPLE, UnitName, UnitTerms

Kept = Literal["sealed", "clear"]

MOST_VALUES = 2**24
"""Of one sent example, 64 MiB of float32: every worker makes examples of this form before one was sent."""

LARGEST_NOISE = 2.0**40
"""The largest noise multiplier: with more, an accountant's squares would overflow, and no ring could hold the noise."""

METRICS = ("auc", "average_precision", "r2", "mae", "rmse")
"""The metrics that have a name; `raycloak.coordinator.planning.own_metrics` computes them."""

SCHEDULES = ("constant", "linear", "cosine")
"""The schedules that have a name; `raycloak.coordinator.aggregation.update_rules` applies them."""

Setting = bool | int | float | str | None
"""A keyword argument of an update rule."""

LOSS_OF_TASK = {
    "sequence_classification": "cross_entropy",
    "causal_lm": "next_token_cross_entropy",
    "token_classification": "token_cross_entropy",
}
"""The loss of each task of a Hugging Face model."""


def require_known(name: str, built_in: Collection[str], what: str, own: str = "") -> str:
    """Return a built-in's name, or a user's own ``module:...`` where that is ``own``; ValueError for any other text."""
    if name in built_in or (own and ":" in name):
        return name
    near = "".join(f": did you mean {each}?" for each in get_close_matches(name, built_in, n=1)) or "."
    known = ", ".join([*built_in, *([f"and {own}"] if own else [])])
    raise ValueError(f"there is no {what} '{name}'{near} Known are {known}")


def known(built_in: Collection[str], what: str, own: str = "") -> AfterValidator:
    """Return :func:`require_known` as the check of a field."""
    return AfterValidator(partial(require_known, built_in=built_in, what=what, own=own))


MetricName = Annotated[str, known(METRICS, "metric", "module:function")]
RuleName = Annotated[str, known(RULES, "update rule", "module:Class")]
ScheduleName = Annotated[str, known(SCHEDULES, "schedule", "module:function")]
KindName = Annotated[str, known(CONFIGURED, "kind of dataset")]


def metric_name(metric: str) -> str:
    """Return the name by which a metric ``module:function`` is shown."""
    return metric.rpartition(":")[2]


def host_and_port(text: str) -> str:
    """Return an address ``host:port``; ValueError for any other text."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"'{text}' is not an address; write host:port, for example 127.0.0.1:9464")
    return text


def without_secret(text: str) -> str:
    """Return a path or URL that holds no secret; ValueError, which does not repeat it, for any other."""
    if (found := secret_in(text)) is not None:
        raise ValueError(found)
    return text


def witness_place(text: str) -> str:
    """Return a place of a witness that is no URL; ValueError, which does not repeat it, for one."""
    if "://" in text:
        raise ValueError("a URL stands in a file of mode 0600: whoever knows it can write there. Name that file here")
    return text


Address = Annotated[str, AfterValidator(host_and_port)]
Place = Annotated[str, Field(min_length=1), AfterValidator(without_secret)]
"""A path or URL without a secret: Ray keeps what its actors are given."""
Side = Annotated[int, Field(gt=0, le=2**14)]


class NoiseConfig(Section):
    """Noise that is correlated over steps, so that much of it cancels in the weights; see `docs/privacy.md`.

    Attributes:
        correlated: ``auto`` has the plan choose, with averaged weights unless they are switched off. ``off`` gives each
            step noise of its own.
        bands: b, over how many steps, where the plan is not to choose.
    """

    correlated: Literal["off", "auto"] = "off"
    bands: int | None = Field(default=None, ge=2, le=MOST_BANDS)

    @field_validator("correlated", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, given: Any) -> Any:
        # YAML reads a bare off as false.
        return "off" if given is False else given

    @model_validator(mode="after")
    def _bands_of_what(self) -> Self:
        if self.bands is not None and self.correlated == "off":
            raise ValueError("bands belong to correlated noise: set correlated: auto")
        return self


class DPConfig(Section):
    """Differential privacy. Either ``target_epsilon`` or ``noise_multiplier``, never both.

    Attributes:
        enabled: False needs a dataset declared public; the run is then marked NOT PRIVATE.
        target_epsilon: epsilon the planned steps may spend; the noise multiplier is solved from it.
        target_delta: delta of every stated epsilon.
        noise_multiplier: z, if it is given instead of solved.
        epsilon_cap: hard cap of an account that the run opens; ``target_epsilon`` if absent.
        max_grad_norm: C.
        clipping: ``norm`` multiplies a gradient of norm N by min(1, C / N), ``normalised`` by C / (N + 0.01).
        colluding_workers: T, workers whose noise does not count. Each needs its own machine: keys are then counted by
            platform and GPU, and no machine gets more than ``min_workers`` workers make necessary.
        accountant: the accountant that solves the noise and holds the account. ``auto`` is ``pld`` for an account that
            the run opens, and the account's own for one that exists.
        noise: whether the noise of steps is correlated.
    """

    enabled: bool = True
    target_epsilon: float | None = Field(default=None, gt=0)
    target_delta: float = Field(default=1e-5, gt=0, lt=1)
    noise_multiplier: float | None = Field(default=None, gt=0, le=LARGEST_NOISE)
    epsilon_cap: float | None = Field(default=None, gt=0)
    max_grad_norm: float = Field(
        default=1.0, ge=2.0**-100, le=2.0**100
    )  # those of `raycloak.workers.terms.mechanism`, whose import takes long
    clipping: Literal["norm", "normalised"] = "norm"
    colluding_workers: int = Field(default=0, ge=0)
    accountant: Literal["auto", "rdp", "pld"] = "auto"
    noise: NoiseConfig = NoiseConfig()

    @model_validator(mode="after")
    def _one_dial(self) -> Self:
        if self.enabled and (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of target_epsilon and noise_multiplier")
        if self.enabled and self.target_epsilon is None and self.epsilon_cap is None:
            raise ValueError("noise_multiplier needs an epsilon_cap")
        if not self.enabled and self.clipping != "norm":
            raise ValueError("clipping belongs to private runs; without privacy, no gradient is clipped")
        if self.noise.correlated != "off" and not self.enabled:
            raise ValueError("noise.correlated belongs to private runs; without privacy, there is no noise")
        if self.noise.correlated != "off" and self.noise.bands is None and self.target_epsilon is None:
            raise ValueError("noise.correlated: auto chooses bands for a target_epsilon; give noise.bands")
        return self


class InputConfig(Section):
    """One input of a model that takes several by name; a column or a list of columns is short for its ``features``.

    Attributes:
        features: columns and ranges of a table, array name of npz, or column of tokenised text; by default the input's
            own name. Lists of integers in tokenised text are cut or padded to ``max_length``.
        vocabulary: N, if the input holds ids 0 .. N-1, which are int64; any other input is float32.
        padding: what lists of tokenised text are filled with beyond their end.
    """

    features: str | list[str] | None = None
    vocabulary: int | None = Field(default=None, gt=1, le=2**31)
    padding: int = Field(default=0, ge=-(2**31), lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _columns_alone(cls, raw: Any) -> Any:
        if raw is None:
            return {}
        return {"features": raw} if isinstance(raw, str | list) else raw

    def columns(self, name: str) -> tuple[str, ...]:
        """Return the ``features`` of the input called ``name``, or their default."""
        if self.features is None:
            return (name,)
        return (self.features,) if isinstance(self.features, str) else tuple(self.features)


class AugmentConfig(Section):
    """Random versions of each row, of which a step computes some, all of one unit; an evaluation sees none.

    Attributes:
        kind: ``shift``, or ``module:function`` that makes a version of a row from it and a NumPy generator.
        copies: versions of each row in a step that takes it.
        pixels: of shift: most by which an image is moved along each of its last two axes; zeros fill it up.
        flip: of shift: mirrors one version in two along the last axis.
    """

    kind: Annotated[str, known((SHIFT,), "kind of versions", "module:function")]
    copies: int = Field(default=2, gt=0, le=MOST_CHOSEN)
    pixels: int | None = Field(default=None, gt=0, le=2**12)
    flip: bool = False

    @model_validator(mode="after")
    def _fields_of_kind(self) -> Self:
        if self.kind == SHIFT and self.pixels is None:
            raise ValueError("kind shift needs pixels: the most by which an image is moved")
        if self.kind != SHIFT and (self.pixels is not None or self.flip):
            raise ValueError("pixels and flip belong to kind shift")
        return self


class DatasetConfig(Section):
    """The place of the examples, and how they are read.

    Attributes:
        kind: a name of the catalogue `raycloak.workers.inputs.descriptor.KINDS`.
        path: file, folder or pattern of examples, or folder of a sealed dataset, relative to the config file. All
            kinds but ray_data and sealed also take ``s3://bucket/prefix``.
        function: ``module:function`` that returns a `raycloak.workers.inputs.datasets.Dataset`; for ray_data, the
            pipeline that returns a ``ray.data.Dataset``.
        split: ``train`` or ``public`` for ``digits``.
        features: array name of npz, ``images`` by default; columns of a table, or ranges such as ``f0..f99``, by
            default all but the label; column of a parquet table of text, ``text`` by default.
        inputs: features of a model whose ``forward`` takes several by name, each with an `InputConfig`; of kind npz,
            csv, parquet, ray_data, hf and module, in the place of ``features``, ``vocabulary`` and ``scale``.
        labels: array or column name; of npz and tables also a list of them, or ranges of columns: a label [k].
        scale: public constant that every feature is divided by; 255 by default for images, else 1.
        vocabulary: N, if features are integers: they are ids 0 .. N-1. A public constant, compared with no example.
        classes: K, if labels are classes 0 .. K-1. A public constant, compared with the model's head and no example.
            Or the public list of the classes that labels of tables or text, or an imagefolder's folders, name.
        size: height and width of images, or one number for both.
        channels: ``grey`` or ``rgb``, of images.
        tokenizer: of text: a folder relative to the config file, or a name on the Hugging Face hub; the model's if
            absent.
        max_length: T of text: each example is cut or padded to so many tokens.
        allow_void: accepts examples that get no gradient and are charged all the same: with a number that is NaN,
            infinite or missing, or a label or an id outside its range. They are refused otherwise.
        unit: public name of what epsilon protects as a whole, such as ``patient_id``; each example by default. It is
            the column that says whose a row is, or the array of npz. Of imagefolder it is the folder below the class
            that an image lies in, of module what the dataset's ``unit(index)`` returns, of sealed data what it was
            sealed for. The split of an evaluation names it so that nobody is in both.
        rows_per_unit: k: the most rows of a unit in one step, chosen anew in each; a unit's gradient is their mean.
        blocks_per_unit: makes each file of text_blocks a unit, of which at most so many blocks are in one step.
        augment: random versions of each row that a step takes; none by default.
        public: declares that the data needs no protection; of a sealed evaluation split, that results on it need none.
        fingerprint_key: file of 64 hexadecimal digits beside the data, with which every worker computes the marks that
            an account knows its examples by, wherever they lie; one for all data of the same people. Relative to the
            config file.
        key_file: the data owner's key of a sealed dataset, which the orchestrator alone reads; relative to the config
            file.
        shape: of the features of one sent example, which has at most 2^24 values. They are float32, or ids if there is
            a ``vocabulary``.
        label_kind: of a sent example: ``class`` (one of ``classes``), ``token`` (one for each id of the features: one
            of ``classes``, or of the ``vocabulary`` without them, or -100 for none) or ``number`` (float32).
        max_participations: k: most steps of the run that one sent example takes part in. The service counts them, and
            the account pays for k steps at most.
        max_examples_per_step: most examples that a client sends for one step; a step computes so many, padding
            included.
    """

    kind: KindName
    path: Place | None = None
    function: str | None = None
    split: Literal["train", "public"] = "train"
    features: str | list[str] | None = None
    inputs: dict[str, InputConfig] | None = Field(default=None, min_length=1)
    labels: str | Annotated[list[str], Field(min_length=1)] = "labels"
    scale: float = Field(default=1.0, gt=0)
    vocabulary: int | None = Field(default=None, gt=1, le=2**31)
    classes: Annotated[int, Field(gt=0, le=2**31)] | Annotated[list[str], Field(min_length=1)] | None = None
    size: Side | tuple[Side, Side] | None = None
    channels: Literal["grey", "rgb"] = "rgb"
    tokenizer: str | None = Field(default=None, min_length=1)
    max_length: int | None = Field(default=None, gt=0, le=2**20)
    allow_void: bool = False
    unit: UnitName | None = None
    rows_per_unit: int | None = Field(default=None, gt=0, le=MOST_CHOSEN)
    blocks_per_unit: int | None = Field(default=None, gt=0, le=MOST_CHOSEN)
    augment: AugmentConfig | None = None
    public: bool = False
    fingerprint_key: str | None = None
    key_file: str | None = None
    shape: Annotated[list[Annotated[int, Field(gt=0, le=2**20)]], Field(max_length=8)] | None = None
    label_kind: Literal["class", "token", "number"] = "class"
    max_participations: int | None = Field(default=None, gt=0, le=2**31)
    max_examples_per_step: int | None = Field(default=None, gt=0, le=2**24)

    @field_validator("classes", mode="before")
    @classmethod
    def _number_or_names(cls, value: Any) -> Any:
        """Refuse in words what would else be refused once for each alternative."""
        if value is not None and not isinstance(value, int | list):
            raise ValueError("give the number of classes, or the list of their names")
        if isinstance(value, list) and any(not isinstance(each, str) for each in value):
            raise ValueError(
                "a name is text, and YAML reads yes, no, on, off and digits as something else: write each name in "
                "quotes, or give the number of classes if labels are numbers"
            )
        return value

    @field_validator("size", mode="before")
    @classmethod
    def _one_side_or_two(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) != 2:
            raise ValueError("give one number, or height and width")
        return value

    @model_validator(mode="before")
    @classmethod
    def _scale_of_kind(cls, raw: Any) -> Any:
        kind = CONFIGURED.get(str(raw.get("kind"))) if isinstance(raw, dict) else None
        return raw if kind is None else {"scale": kind.scale, **raw}

    @model_validator(mode="after")
    def _fields_of_kind(self) -> Self:
        kind = KINDS[self.kind]
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        given |= {form for form, value in ((LABELS, self.labels), (CLASSES, self.classes)) if isinstance(value, list)}
        for name in OF_SOME_KINDS:
            taken = name in kind.needs or name in kind.takes
            if (name in given and not taken) or (name in kind.needs and name not in given):
                raise ValueError(f"{name} belongs to {kinds_with(name)}")
        for name, why in kind.refuses.items():
            if name in given:
                raise ValueError(why)
        if isinstance(self.classes, list) and len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is listed twice")
        if self.kind == "hf" and self.inputs is None and (self.tokenizer is None) == (self.vocabulary is None):
            raise ValueError("kind hf needs the tokenizer that made its ids, or their number: vocabulary")
        if self.kind == "text" and isinstance(self.features, list) and len(self.features) != 1:
            raise ValueError("text has one column of features; join a pair of texts, since token types are not carried")
        if self.unit == EXAMPLE:
            raise ValueError("unit: example is what each row is without one; give the column another name")
        if self.rows_per_unit is not None and self.unit is None:
            raise ValueError("rows_per_unit needs the unit whose rows they are")
        if self.unit_terms.rows_per_unit > MOST_CHOSEN:
            raise ValueError(f"a step computes at most {MOST_CHOSEN} rows of a unit, augment.copies included")
        if self.kind == "ray_data" and self.path is not None and "://" in self.path:
            raise ValueError("path of kind ray_data is a folder on disk")
        return self

    @model_validator(mode="after")
    def _inputs_by_name(self) -> Self:
        if self.inputs is None:
            return self
        if self.features is not None or self.vocabulary is not None or self.tokenizer is not None:
            raise ValueError("features, vocabulary and tokenizer have no place beside inputs: each input has its own")
        if self.scale != 1.0:
            raise ValueError("scale has no place beside inputs; divide in the model's forward")
        for name, given in self.inputs.items():
            if not name.isidentifier():
                raise ValueError(f"inputs: '{name}' is no name that an argument of forward can have")
            if self.kind in ("npz", "hf") and len(given.columns(name)) != 1:
                raise ValueError(f"inputs.{name}: an input of kind {self.kind} is one array or column")
            if self.kind == "module" and given.features is not None:
                raise ValueError(f"inputs.{name}: the function names its own; give the vocabulary alone")
            if self.kind != "hf" and given.padding:
                raise ValueError(f"inputs.{name}.padding belongs to kind hf")
        return self

    @model_validator(mode="after")
    def _sent_examples(self) -> Self:
        if self.kind != "sent" or self.shape is None:
            return self
        if math.prod(self.shape) > MOST_VALUES:
            raise ValueError(f"shape: an example has at most {MOST_VALUES} values, all lengths multiplied")
        if self.label_kind == "class" and not isinstance(self.classes, int):
            raise ValueError("label_kind class needs the number of classes")
        if self.label_kind == "token" and (self.vocabulary is None or len(self.shape) != 1):
            raise ValueError("label_kind token needs a vocabulary, and a shape of one length")
        if self.label_kind == "number" and self.classes is not None:
            raise ValueError("label_kind number has no classes")
        return self

    @property
    def unit_name(self) -> str | None:
        """The public name of what epsilon protects as a whole; None where it is each example."""
        return self.unit if self.blocks_per_unit is None else "document"

    @property
    def most_rows(self) -> int | None:
        """The most rows of a unit in one step; None where the configuration says nothing."""
        return self.rows_per_unit or self.blocks_per_unit

    @property
    def unit_terms(self) -> UnitTerms:
        """The unit that epsilon protects, and how many rows of one a step computes."""
        copies = 1 if self.augment is None else self.augment.copies
        return UnitTerms(self.unit_name or EXAMPLE, (self.most_rows or 1) * copies, copies)

    @property
    def columns(self) -> tuple[str, ...]:
        """The ``features``, or their default, as a descriptor has them."""
        if self.inputs is not None:
            return ()
        if self.features is None:
            return KINDS[self.kind].features
        return (self.features,) if isinstance(self.features, str) else tuple(self.features)


class LoraConfig(Section):
    """A LoRA adapter by PEFT; all of the model but the adapter and a head of classes is frozen.

    Attributes:
        rank, alpha: r, and the scale alpha / r of what the adapter adds.
        target_modules: last parts of the names of the layers that are adapted, or ``all-linear``; PEFT's choice for
            the type of model if absent.
        bias: which biases are trained too.
    """

    rank: int = Field(default=8, gt=0, le=2**16)
    alpha: float = Field(default=16.0, gt=0)
    target_modules: list[str] | Literal["all-linear"] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"


class ModelConfig(Section):
    """A Hugging Face model.

    Attributes:
        hf: folder relative to the config file, or a name on the hub.
        task: which head it gets; a head that the checkpoint does not have is drawn from ``seed``.
        revision: branch, tag or commit on the hub.
        classes: outputs of the head; the checkpoint's own number if absent.
        allow_remote_code: lets Python files that come with the model run in every worker; the manifest has their
            digest.
        lora: the adapter to train; everything is trained if absent.
        use_liger_kernels: computes RMSNorm, rotary embedding and SwiGLU of the frozen layers in Liger's kernels, for
            ``lora`` on GPUs.
    """

    hf: str = Field(min_length=1)
    task: Literal["sequence_classification", "causal_lm", "token_classification"]
    revision: str | None = None
    classes: int | None = Field(default=None, gt=0, le=2**20)
    allow_remote_code: bool = False
    lora: LoraConfig | None = None
    use_liger_kernels: bool = False

    @model_validator(mode="after")
    def _classes_of_a_head(self) -> Self:
        if self.task == "causal_lm" and self.classes is not None:
            raise ValueError("classes belongs to a classification task; causal_lm predicts tokens")
        return self


class EvaluationConfig(Section):
    """A split on which accuracy, or the loss, is measured every ``every`` steps and at the end.

    Results are exact and shown to everybody. So ``dataset.public`` must declare them public, even where the examples
    themselves are sealed.

    Attributes:
        metrics: ``auc``, ``average_precision``, ``r2``, ``mae``, ``rmse``, or ``module:function`` of the user's own,
            for a split whose examples are public as well. Each gets outputs ``[n, ...]`` and labels ``[n, ...]`` of
            the whole split as tensors, and returns one number.
    """

    dataset: DatasetConfig
    every: int = Field(default=10, gt=0)
    metrics: list[MetricName] = Field(default_factory=list)

    @property
    def kept(self) -> Kept:
        """The way the examples are kept."""
        return "sealed" if self.dataset.kind == "sealed" else "clear"


class ClassCountsConfig(Section):
    """The count of private examples of each class, released once, before the first step.

    Attributes:
        classes: K; labels outside [0, K) are not counted.
        noise_multiplier: standard deviation of the noise in each count, in examples.
    """

    classes: int = Field(gt=0, le=10_000)
    noise_multiplier: float = Field(gt=0, le=LARGEST_NOISE)


class PrivateEvaluationConfig(Section):
    """The model's mean loss on the private training examples, and under a loss that has one the accuracy.

    With ``classes`` also the share of examples of each pair of label and predicted class, from which F1 follows.

    Attributes:
        every: steps between two releases; the last is made at the end.
        noise_multiplier: noise of each release, in units of what one example contributes at most.
        loss_bound: B; each example's loss is cut to [-B, B].
        classes: K, for ``cross_entropy`` alone; labels and predictions outside [0, K) are in no share.
    """

    every: int = Field(default=50, gt=0)
    noise_multiplier: float = Field(gt=0, le=LARGEST_NOISE)
    loss_bound: float = Field(default=5.0, ge=1e-6, le=1e6)
    classes: int | None = Field(default=None, ge=2, le=100)

    @model_validator(mode="before")
    @classmethod
    def _no_own_metrics(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "metrics" in raw:
            raise ValueError(
                "a metric of your own has no known sensitivity, so no noise could protect private examples from it; "
                "name it in evaluation.metrics, for a public split"
            )
        return raw


class MeasurementsConfig(Section):
    """The measurements on private examples beside the gradients, each with its own noise and cost."""

    class_counts: ClassCountsConfig | None = None
    evaluation: PrivateEvaluationConfig | None = None


class EarlyStoppingConfig(Section):
    """The rule by which a run ends before its last planned step, because a result no longer gets better.

    Attributes:
        metric: the result that is watched: on the evaluation split, or a noised release on the private examples.
        patience: results in a row that may fail to be better than the best one; the run ends with the last of them.
        min_delta: by how much a result must be better to count as better.
    """

    metric: Literal[
        "evaluation_accuracy", "evaluation_loss", "measured_evaluation_accuracy", "measured_evaluation_loss"
    ]
    patience: int = Field(default=5, gt=0)
    min_delta: float = Field(default=0.0, ge=0)


class ParameterGroupConfig(Section):
    """Settings of the update rule for the tensors of some names.

    A tensor takes each setting from the last group that has it and gives that setting, else from the rule itself.

    Attributes:
        params: a pattern of names of trained tensors, such as ``head.*`` or ``*.bias``, or a list of them. A pattern
            matches the whole name, with the wildcards of a shell: ``*``, ``?`` and ``[…]``.
        learning_rate: in place of the rule's; the schedule applies to it too.
        weight_decay: in place of the rule's, of a built-in rule.
        settings: keyword arguments of a ``module:Class`` that differ from ``optimizer.settings``.
    """

    params: str | list[str]
    learning_rate: float | None = Field(default=None, gt=0, le=3e38)
    weight_decay: float | None = Field(default=None, ge=0)
    settings: dict[str, Setting | list[Setting]] = Field(default_factory=dict)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, also where one was given."""
        return (self.params,) if isinstance(self.params, str) else tuple(self.params)

    @field_validator("params", mode="before")
    @classmethod
    def _one_pattern_or_some(cls, params: Any) -> Any:
        listed = [params] if isinstance(params, str) else params
        if not isinstance(listed, list) or not listed or any(not isinstance(each, str) or not each for each in listed):
            raise ValueError("give a pattern of names such as 'head.*', or a list of them")
        return params

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None and not self.settings:
            raise ValueError("give the group a setting: learning_rate, weight_decay, or settings of your own rule")
        return self


class OptimizerConfig(Section):
    """The aggregator's update rule, applied to the released average.

    Attributes:
        name: ``sgd``, ``adam``, ``adamw``, ``adafactor``, or ``module:Class`` of a ``torch.optim.Optimizer``.
        settings: keyword arguments of a ``module:Class``, besides ``lr``.
        schedule: ``constant``, ``linear``, ``cosine``, or ``module:function`` of (step, steps) giving the factor of the
            learning rate; steps count from 0.
        groups: settings that differ for some tensors, by their names.
        averaged_weights: keeps an exponential moving average of the weights, of decay (1 + t) / (10 + t) in step t. It
            is what is evaluated, measured and exported; steps go on from the weights themselves. It costs no epsilon.
            On by default where ``dp_config.noise`` may be correlated.
    """

    name: RuleName = "sgd"
    settings: dict[str, Setting | list[Setting]] = Field(default_factory=dict)
    learning_rate: float = Field(default=0.5, gt=0, le=3e38)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    schedule: ScheduleName = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    groups: list[ParameterGroupConfig] = Field(default_factory=list)
    averaged_weights: bool = False

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> Self:
        own, fields = self.name not in RULES, type(self).model_fields
        changed = [each for each in RULE_SETTINGS if getattr(self, each) != fields[each].default]
        if own and changed:
            raise ValueError(f"{changed[0]} belongs to the built-in rules; give it to {self.name} in settings")
        if self.settings and not own:
            raise ValueError(f"settings belong to a rule of your own; {self.name} has fields")
        if "lr" in self.settings:
            raise ValueError("settings.lr is optimizer.learning_rate")
        foreign = [] if own else [each for each in changed if each not in ("weight_decay", *RULES[self.name].settings)]
        if foreign:
            takers = " and ".join(rules_with(foreign[0]))
            raise ValueError(f"{foreign[0]} belongs to {takers}; {self.name} has no such setting, so leave it out")
        if self.warmup_steps and self.schedule not in SCHEDULES:
            raise ValueError(f"warmup_steps belongs to the built-in schedules; {self.schedule} has its own warm-up")
        return self

    @model_validator(mode="after")
    def _settings_of_groups(self) -> Self:
        own = self.name not in RULES
        for index, group in enumerate(self.groups):
            if own and group.weight_decay is not None:
                raise ValueError(
                    f"groups.{index}.weight_decay belongs to the built-in rules; give it to {self.name} in settings"
                )
            if group.settings and not own:
                raise ValueError(f"groups.{index}.settings belong to a rule of your own; {self.name} has fields")
            if "lr" in group.settings:
                raise ValueError(f"groups.{index}.settings.lr is groups.{index}.learning_rate")
        return self


class RingConfig(Section):
    """The integer ring of the updates.

    Attributes:
        bits: width; ``auto`` takes 32 where rounding costs less than 1 % of the sensitivity.
        clamp: bound of a coordinate of one virtual worker's sum; by default it never binds.
    """

    bits: Literal["auto", 32, 64] = "auto"
    clamp: float | None = Field(default=None, gt=0)


class MasksConfig(Section):
    """The mask graph of a large run: which pairs of workers mask with each other.

    Attributes:
        colluding_workers: workers that may help the aggregator. Each worker then masks with as few others as withstand
            that many; absent, all pairs mask, which withstands any number that leaves two. Needs more than 32 workers.
    """

    colluding_workers: int | None = Field(default=None, gt=0)


class LedgerConfig(Section):
    """The ledger and the account that pay.

    Attributes:
        url: of the ledger, without a password; the file in the state folder if absent.
        account: the account that pays; the account of the data if absent.
        witness: absolute folder on other storage, which receives every head of the ledger; or absolute file of mode
            0600 with the http(s) URL of a witness.
        prepaid: whether the whole plan is charged when the run is registered, before anything is computed; what the run
            does not use stays charged.
    """

    url: Place | None = None
    account: str | None = None
    witness: Annotated[str, AfterValidator(witness_place)] | None = None
    prepaid: bool = False


class KeyServiceConfig(Section):
    """The data owner's key service, which gives the second half of every virtual-worker key.

    Attributes:
        address: ``host:port``, as the workers reach it.
        contract: file that the service wrote, from the owner of the data; relative to the config file. Or the content
            of that file, a JSON object, as the client of a training service gives it.
    """

    address: Address
    contract: str

    @property
    def text(self) -> str | None:
        """The contract's content; None if it is in a file."""
        return self.contract if self.contract.startswith("{") else None


class AttestationConfig(Section):
    """The service that shows a run's evidence to others while it runs.

    Attributes:
        bind: ``host:port`` where the orchestrator serves the evidence service, on the driver's node; port 0 takes a
            free one. Without it nothing is served.
    """

    bind: Address | None = None


class BoundaryConfig(Section):
    """The vaults of the machines, which Ray's user cannot enter; see ``docs/boundary.md``.

    Attributes:
        socket: absolute path at which they listen, on each machine the same, with ``{role}`` in place of ``ledger``,
            ``orchestrator``, ``aggregator``, ``worker`` and ``platform``.
    """

    socket: Annotated[str, Field(pattern=r"^/.*\{role\}")]

    def of(self, role: str) -> str:
        """Return the socket of a role."""
        return self.socket.replace("{role}", role)


class FailureConfig(Section):
    """The deadlines in seconds, and how many failures a run survives.

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


UseGpu = Literal[True, False, "if_there"]


class PlacementConfig(Section):
    """The nodes that workers run on, in the terms of Ray's placement groups.

    Attributes:
        strategy: how the initial workers spread over nodes; a newcomer gets its own group.
        accelerator_type: model of the accelerator that each worker needs, as Ray names it.
        resources_per_worker: the resources that each worker reserves; ``CPU`` and ``GPU`` replace the even share.
        labels: labels that a worker's node must carry, with Ray's selector syntax.
        deadline_s: seconds after which the run names and refuses what cannot be placed.
    """

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    accelerator_type: str | None = None
    resources_per_worker: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    deadline_s: float = Field(default=60.0, gt=0)


class CheckpointConfig(Section):
    """The sealed packages of the released model; see `docs/tssp.md`.

    Attributes:
        checkpoint_frequency: steps between two packages; 0 seals one only when the run ends or is stopped.
        num_to_keep: packages that stay; the newest and the best always do.
        keep_best: released metric; the package that is best by it stays as well.
        storage: folder or ``s3://bucket/prefix`` of all packages; ``packages/`` in the state
            folder if absent.
        recipients: files with the public keys of those who may open a package, besides the run itself.
    """

    checkpoint_frequency: int = Field(default=50, ge=0)
    num_to_keep: int = Field(default=2, gt=0)
    keep_best: Literal["evaluation_accuracy", "evaluation_loss"] | None = None
    storage: Place | None = None
    recipients: list[str] = Field(default_factory=list)

    @field_validator("storage")
    @classmethod
    def _path_or_bucket(cls, storage: str | None) -> str | None:
        if storage is not None and "://" in storage and not re.match(r"s3://[^/?]", storage):
            raise ValueError("neither a path nor s3://bucket/prefix")
        return storage


class MetricsConfig(Section):
    """The address of the `/metrics` endpoint, ``host:port``; port 0 takes a free one."""

    bind: Address = "127.0.0.1:0"

    @model_validator(mode="before")
    @classmethod
    def _no_own_metrics(cls, raw: Any) -> Any:
        if isinstance(raw, list | str):
            raise ValueError("this is the address of the endpoint; name metrics of your own in evaluation.metrics")
        return raw


class MLflowConfig(Section):
    """The fields of `raycloak.MLflowLogger`."""

    tracking_uri: str | None = Field(default=None, min_length=1)
    experiment: str | None = Field(default=None, min_length=1)
    log_model: bool = False
    registered_model: str | None = Field(default=None, min_length=1)

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        # The run directory keeps the configuration, and loggers upload it.
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError("no credentials here: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return uri

    @model_validator(mode="after")
    def _registers_what_it_uploads(self) -> Self:
        if self.registered_model is not None and not self.log_model:
            raise ValueError("registered_model needs log_model: true")
        return self


class WandbConfig(Section):
    """The fields of `raycloak.WandbLogger`."""

    project: str | None = Field(default=None, min_length=1)
    entity: str | None = Field(default=None, min_length=1)
    mode: Literal["online", "offline"] | None = None
    log_model: bool = False


class TensorBoardConfig(Section):
    """The field of `raycloak.TensorBoardLogger`; a relative folder starts at the configuration file's folder."""

    log_dir: str | None = Field(default=None, min_length=1)


class LoggersConfig(Section):
    """The tools that a run is logged to, besides ``metrics.jsonl`` in the run directory; see `docs/loggers.md`.

    An empty section asks for a logger with its defaults.
    """

    mlflow: MLflowConfig | None = None
    wandb: WandbConfig | None = None
    tensorboard: TensorBoardConfig | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the requested tools."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)
