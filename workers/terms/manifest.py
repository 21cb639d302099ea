"""The manifest: everything that can change a gradient, and everybody who may sign, fixed before the first step.

``Computation`` says what is computed; the manifest adds who pays, who judges and who signs. Virtual-worker keys derive
from all of it. Neither holds a worker count, a path, a time or a range count: these may differ between two executions
that must give the same bytes.
"""

import json
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.evidence import CodeDigest
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.mask_graph import SPLIT_PROBABILITY
from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.roster import Query
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.sealed.demand import StatedRun
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism, check_together

BY_HAND = "by hand"
"""The name of an update that the caller of `raycloak.by_hand` makes, and no aggregator; no configuration has it."""


class TensorSpec(Message):
    """One trainable tensor, in canonical order (the order of the model's ``named_parameters``)."""

    DOMAIN: ClassVar[str] = "raycloak/tensor/v1"

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class UserCode(Message):
    """The user's own function or class: its name, and the SHA-256 of its ``source``; empty for a built-in one."""

    DOMAIN: ClassVar[str] = "raycloak/user-code/v1"

    name: str
    source: bytes


class ParameterGroup(Message):
    """Settings of the update rule for the tensors of some names; None leaves a setting as it is.

    Attributes:
        params: patterns of names, with the wildcards of a shell: ``*``, ``?`` and ``[…]``.
        settings: keyword arguments of a rule of the user's own that differ, a canonical JSON object.
    """

    DOMAIN: ClassVar[str] = "raycloak/parameter-group/v1"

    params: tuple[str, ...]
    learning_rate: float | None
    weight_decay: float | None
    settings: str

    @property
    def text(self) -> str:
        """The group for a reader."""
        given = {"learning rate": self.learning_rate, "weight decay": self.weight_decay}
        shown = [f"{name} {value:g}" for name, value in given.items() if value is not None]
        shown += [f"settings {self.settings}"] if self.settings != "{}" else []
        return f"{', '.join(self.params)}: {', '.join(shown)}"


def matches(pattern: str, name: str) -> bool:
    """Return whether the ``pattern`` of a group matches the whole ``name`` of a tensor."""
    return fnmatchcase(name, pattern)


class OptimizerSpec(Message):
    """The update rule and its learning-rate schedule, as `coordinator/aggregation/update_rules.py` applies them.

    Attributes:
        name: of a built-in rule, or ``module:Class``.
        settings: keyword arguments of a rule of the user's own, a canonical JSON object.
        schedule: ``constant``, ``linear``, ``cosine`` or ``module:function``.
        code, schedule_code: SHA-256 of the source of the user's own; empty for a built-in.
        groups: what differs for some tensors; where two groups give one setting, the later one counts.
        averaged_weights: whether an average of the weights is kept, which is evaluated and exported in their place.
            Left out of the bytes where it is not.
    """

    DOMAIN: ClassVar[str] = "raycloak/optimizer/v2"

    name: str
    settings: str = "{}"
    code: bytes = b""
    learning_rate: float
    momentum: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    schedule: str
    schedule_code: bytes = b""
    warmup_steps: int
    groups: tuple[ParameterGroup, ...] = ()
    averaged_weights: bool = Field(default=False, exclude_if=lambda kept: not kept)

    def of_tensor(self, name: str) -> "OptimizerSpec":
        """Return what applies to the tensor ``name``; a specification without groups.

        Guarantee: a function of this specification and of the name, so of no other tensor of a parameter range.
        """
        if not self.groups:
            return self
        changed: dict[str, object] = {"groups": ()}
        settings = json.loads(self.settings)
        for group in self.groups:
            if any(matches(pattern, name) for pattern in group.params):
                given = {"learning_rate": group.learning_rate, "weight_decay": group.weight_decay}
                changed |= {field: value for field, value in given.items() if value is not None}
                settings |= json.loads(group.settings)
        return self.model_copy(update={**changed, "settings": settings_text(settings)})


def settings_text(settings: Mapping[str, object]) -> str:
    """Return keyword arguments as a canonical JSON object; ValueError for NaN and infinities."""
    return canonical_json(settings).decode()


class GpuClass(Message):
    """Everything that chooses a kernel on a GPU, besides its model.

    Attributes:
        compute_capability: of the GPU, such as ``9.0``.
        multiprocessors: that this process may use; a share of a GPU can have fewer.
        cublas: version of the library that is loaded, whatever torch was built with.
        cudnn: version of the library that is loaded.
        triton: version of the package, empty where it is not installed.
        kernels: digest of the source of our kernels, which it compiles.
        variables: of the environment that choose kernels or round, as ``NAME=value``, sorted.
    """

    DOMAIN: ClassVar[str] = "raycloak/gpu-class/v1"

    compute_capability: str
    multiprocessors: int
    cublas: str
    cudnn: int
    triton: str
    kernels: bytes
    variables: tuple[str, ...]


class NumericsClass(Message):
    """Everything that the last bits of a gradient depend on, besides code and data.

    Attributes:
        device, cpu_capability: model of the device, and the instruction set that CPU kernels are held to.
        gpu: of a GPU, what else chooses its kernels; None on a CPU.
        threads: per worker.
        engine: how gradients are computed and added up.
        torch, numpy, python: versions.
        model_libraries: libraries that compute a Hugging Face model, with versions, and the attention.
        precision: of the forward and backward pass: ``float32``, or ``bf16`` for products in bfloat16.
        gradient_checkpointing: whether the model's blocks are computed again in the backward pass.
        deterministic: whether operations without a deterministic kernel are refused; if not, the run is NOT EXACT.
    """

    DOMAIN: ClassVar[str] = "raycloak/numerics/v4"

    device: str
    gpu: GpuClass | None = Field(default=None, exclude_if=lambda gpu: gpu is None)
    cpu_capability: str
    threads: int
    engine: str
    torch: str
    numpy: str
    python: str
    model_libraries: str = ""
    precision: Literal["float32", "bf16"] = "float32"
    gradient_checkpointing: bool = False
    deterministic: bool

    def computes_like(self, other: "NumericsClass") -> bool:
        """Return whether both give the same bits in an update rule, which runs on one thread of the CPU in float32."""
        apart = {
            "device": "",
            "gpu": None,
            "engine": "",
            "model_libraries": "",
            "precision": "float32",
            "gradient_checkpointing": False,
            "deterministic": True,
            "threads": 1,
        }
        return self.model_copy(update=apart) == other.model_copy(update=apart)


class Computation(Message):
    """Everything that determines the bytes of the weights, given the keys and the data.

    Attributes:
        measurements: the other releases beside the gradients, in their order.
        largest_rows: most rows of a micro-batch of any of them, given or measured once; a resume takes it.
        model: ``module:function``, the qualified name of a callable, or the last part of a Hugging Face model's
            path or name, for the reader.
        model_code: SHA-256 of the model's source, or of a Hugging Face model's settings and Python files.
        loss_code: SHA-256 of a custom loss's source, empty for a built-in one.
        augment_code: SHA-256 of the source of the user's own versions of rows. Left out of the bytes where it is empty.
        tensors: trainable tensors in canonical order.
        parameter_dtype, accumulation_dtype: of parameters and of gradients, and of clipped sums before the ring.
        initial_parameters: model digest of the start.
        frozen: digest of every other parameter and buffer of the model; see `workers/terms/model_digest.py`.
        dataset: digest of the dataset descriptor's identity (not of its location).
        tokenizer: digest of the tokenizer that made examples of text, of the decoder of images, or of the pipeline's
            code; empty for other data.
        metrics: the user's own, which the driver measures on a public split; they change no weight.
        epoch_steps: E; keys of step s belong to epoch s // E.
    """

    DOMAIN: ClassVar[str] = "raycloak/computation/v3"

    mechanism: Mechanism
    measurements: tuple[Measurement, ...] = ()
    largest_rows: int
    model: str
    model_code: bytes
    loss: LossSpec
    loss_code: bytes
    tensors: tuple[TensorSpec, ...]
    parameter_dtype: Literal["float32"] = "float32"
    accumulation_dtype: Literal["float64"] = "float64"
    initial_parameters: bytes
    frozen: bytes
    optimizer: OptimizerSpec
    numerics: NumericsClass
    dataset: bytes
    tokenizer: bytes = b""
    metrics: tuple[UserCode, ...] = ()
    epoch_steps: int
    augment_code: bytes = Field(default=b"", exclude_if=lambda code: not code)

    @model_validator(mode="after")
    def _mechanisms_are_of_one_run(self) -> Self:
        check_together(self.mechanisms)
        return self

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """All mechanisms that the run may release by, the gradient's first."""
        return (self.mechanism, *(measurement.mechanism for measurement in self.measurements))

    @property
    def code_elsewhere(self) -> tuple[str, ...]:
        """The names of the user's own code that no worker runs: update rule, schedule and metrics."""
        rule = self.optimizer
        own = ((rule.name, rule.code), (rule.schedule, rule.schedule_code), *((m.name, m.source) for m in self.metrics))
        return tuple(name for name, source in own if source)

    @property
    def releases(self) -> int:
        """The most releases that the run may make, by all its mechanisms."""
        return sum(mechanism.steps for mechanism in self.mechanisms)

    def measurement(self, query: Query) -> Measurement:
        """Return the measurement with that query; ProtocolError ``query_unknown`` if the run has none."""
        for measurement in self.measurements:
            if measurement.query == query:
                return measurement
        raise ProtocolError("query_unknown", f"the run has no measurement '{query}'")

    def mechanism_of(self, query: Query) -> Mechanism:
        """Return the mechanism with that query; ProtocolError ``query_unknown`` if the run has none."""
        return self.mechanism if query == "gradient" else self.measurement(query).mechanism

    def epoch_of(self, query: Query, step: int) -> int:
        """Return the key epoch of a step of ``query``; a measurement has that of the training step it comes before."""
        if query != "gradient":
            after = self.measurement(query).after(step, self.mechanism.steps)
            # No training step comes after the last one, and no key epoch either.
            step = min(after, self.mechanism.steps - 1)
        return step // self.epoch_steps

    def reach(self, step: int) -> int:
        """Return how many training steps before ``step`` its release mixes in: of its key epoch, and b - 1 at most."""
        return min(self.mechanism.bands - 1, step % self.epoch_steps)

    def mixed_sums(self, query: Query, step: int) -> int:
        """Return how many sums of each virtual worker a vector of ``step`` mixes; 0 where noise is not correlated."""
        return 1 + self.reach(step) if self.mechanism_of(query).bands > 1 else 0

    @property
    def exact(self) -> bool:
        """Return whether every operation of the run has a deterministic kernel; if not, the run is NOT EXACT."""
        return self.numerics.deterministic


class Manifest(KeyContract):
    """The run's contract; its digest is in every piece of evidence, header, receipt and roster.

    Virtual-worker keys derive from its :attr:`key_context`.

    Attributes:
        format: of all files of a run, which share one version: manifest, evidence log, state and parameters.
        known_answer: digest of the encoded, noised vector of the public synthetic batch; see
            `workers/known_answer.py`. It changes with code that no digest of a source file sees, such as an installed
            package.
        orchestrator_key, orchestrator_ml_dsa: the orchestrator's Ed25519 key, which signs all its messages, and its
            ML-DSA-65 key, which signs the heads of its evidence log as well.
        dataset_fingerprint: as every worker computed it, see `workers/inputs/fingerprint.py`; empty without a key for
            data in the clear.
        keys_per_machine: set where the noise of some virtual workers is not counted on, and then at most as many; None
            elsewhere.
        key_service: contract of the data owner's service, which gives the second half of every virtual-worker key.
            ``key_commitments`` are then of the first half; the contract has the commitments to the second.
        mask_colluders: number of colluding workers that the masks must withstand at least; None where all pairs of
            workers must mask. See `raycloak.attestation.core.mask_graph`.
        code: digest of the bundle that all code of the user's comes from, under a policy that lists such digests; see
            `raycloak.workers.inputs.code_bundle`. Left out of the bytes where it is empty.
    """

    DOMAIN: ClassVar[str] = "raycloak/manifest/v1"

    format: Literal[2] = 2
    computation: Computation
    account: str
    ledger_key: bytes
    orchestrator_key: bytes
    orchestrator_ml_dsa: bytes
    dataset_fingerprint: bytes = b""
    key_service: ServiceContract | None = None
    mask_colluders: int | None = None
    code: CodeDigest = Field(default=b"", exclude_if=lambda code: not code)

    @model_validator(mode="after")
    def _uncounted_noise_is_bounded(self) -> Self:
        uncounted, most = self.computation.mechanism.uncounted_shares, self.keys_per_machine
        # So many of whole machines: each that colludes knows the noise of `most`.
        fits = uncounted == 0 if most is None else 1 <= most <= uncounted and uncounted % most == 0
        if not fits:
            raise ValueError(f"{uncounted} virtual workers' noise is not counted on, and one machine may have {most}")
        return self

    @model_validator(mode="after")
    def _masks_withstand_what_delta_and_noise_count_on(self) -> Self:
        mechanism, colluders = self.computation.mechanism, self.mask_colluders
        paid = mechanism.mask_split_probability
        if (paid != 0) if colluders is None else (paid < SPLIT_PROBABILITY and mechanism.private):
            raise ValueError(f"delta pays for masks that fall apart with a chance of {paid:g}")
        if colluders is not None and mechanism.uncounted_shares > colluders:
            raise ValueError(f"the masks withstand {colluders} workers, and more shares of noise may be known")
        return self

    @property
    def key_owners(self) -> int:
        """The number of virtual workers."""
        return self.computation.mechanism.virtual_workers

    @property
    def lineage(self) -> Lineage | None:
        """The terms by which each model follows from the one before; None where the run's caller makes the updates."""
        if self.computation.optimizer.name == BY_HAND:
            return None
        initial = self.computation.initial_parameters
        return Lineage(orchestrator_key=self.orchestrator_key, initial_parameters=initial)

    @property
    def stated(self) -> StatedRun:
        """The part that an owner of sealed data may make demands of."""
        return StatedRun.of(self.ledger_key, self.account, self.computation.mechanisms, self.code)

    @property
    def log_owner(self) -> SignerPublic:
        """The signer of the run's evidence log heads; ProtocolError ``malformed`` if a key has another length."""
        try:
            return SignerPublic(ed25519=self.orchestrator_key, ml_dsa_65=self.orchestrator_ml_dsa)
        except ValidationError:
            raise ProtocolError("malformed", "the manifest does not name the orchestrator's two keys") from None
