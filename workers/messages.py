"""The messages of a worker: all that travels between it and the coordinator, but arrays and what others have signed."""

from typing import ClassVar

from pydantic import Field

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import Envelope, Message
from raycloak.attestation.policy.policy import Policy
from raycloak.workers.device.step_clock import StepUsage
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.models.compute_mode import PLAIN, ComputeMode
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import Manifest, NumericsClass, TensorSpec
from raycloak.workers.terms.model_digest import TensorContent
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.vectors.payload import VectorRange


class WorkerSetup(Message):
    """The model, loss and data of a run: everything that a worker opens by itself.

    Attributes:
        base: directory that relative dataset paths and ``module:function`` names start from.
        seed: public seed of the initial parameters.
        device: ``cpu`` or ``cuda``.
        gpus: number of GPUs that each worker is given; below 1, the share of one. It counts on ``cuda`` alone.
        allow_nondeterministic: whether operations without a deterministic kernel may run; the run is then NOT EXACT.
        micro_batch_bytes: memory that one micro-batch may take; None for what ``device`` spares.
        threads: per worker; part of the numerics class.
        mode: how the model is computed; part of the numerics class.
        evaluation: the split to measure on, sealed or public; workers open a public one for a model that
            :func:`raycloak.workers.models.models.is_left_to_workers`.
        contents: tensors that the run's model has; None for the first workers, which find them.
        code: the policy's list of bundles that code of the user's may come from; None if it has no such list.
    """

    DOMAIN: ClassVar[str] = "raycloak/worker-setup/v1"

    model: ModelSource
    loss: LossSpec
    dataset: DatasetDescriptor
    base: str
    seed: int
    device: str
    gpus: float = Field(default=1.0, gt=0, exclude_if=lambda gpus: gpus == 1)
    allow_nondeterministic: bool = False
    micro_batch_bytes: int | None = Field(default=None, gt=0)
    evaluation: DatasetDescriptor | None = None
    contents: tuple[TensorContent, ...] | None = None
    threads: int = 1
    mode: ComputeMode = PLAIN
    code: tuple[bytes, ...] | None = None


class WorkerFacts(Message):
    """The facts that a prepared worker contributes to the manifest.

    Attributes:
        num_examples: N, of the units that steps are sampled from: examples, where each is a unit of its own.
        data: what the dataset is known by. Alone of all facts it depends on the content of examples, and then is keyed.
        tokenizer: digest of the tokenizer that made examples of text, of the decoder of images, or of the pipeline's
            code; empty for other data.
        model_notes: sentences about what was changed or drawn when the model was built.
        left_out: sentences about what lies beside the examples and is no part of them.
        initial_parameters: parameter digest of the start.
        contents: of all parameters and buffers of the model.
        augment_code: SHA-256 of the source of the user's own versions of rows; empty without.
        largest_rows: of a micro-batch; see `raycloak.workers.gradients.row_memory`.
        code: digest of the bundle that its own code comes from; empty for none, or without a list.
        measures: whether it has opened a split to measure on.
    """

    DOMAIN: ClassVar[str] = "raycloak/worker-facts/v1"

    num_examples: int
    tensors: tuple[TensorSpec, ...]
    initial_parameters: bytes
    contents: tuple[TensorContent, ...]
    model_code: bytes
    loss_code: bytes
    numerics: NumericsClass
    data: DataMarks
    largest_rows: int
    tokenizer: bytes = b""
    model_notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    code: bytes = b""
    measures: bool = False
    augment_code: bytes = b""


class Admission(Message):
    """The documents by which a worker attests itself and appraises its peers.

    Attributes:
        orchestrator: the orchestrator's own evidence, which the worker appraises before it sends anything.
        key_service: ``host:port`` of the data owner's key service; needed where the manifest names one.
        secure_aggregation: whether a roster needs two workers. Without it a single worker may host everything, and its
            vector carries all the noise. Private vectors of several workers are masked in either case.
    """

    DOMAIN: ClassVar[str] = "raycloak/admission/v1"

    manifest: Manifest
    policy: Policy
    collateral: CollateralBundle
    secure_aggregation: bool
    orchestrator: Envelope
    key_service: str | None = None


class StepRequest(Message):
    """One attempt of one step.

    Attributes:
        presentations: of members that may be new to the receiver.
        commitments: to the slices of all virtual workers, in order; the receipt has their root.
        ranges: each aggregator's part of the parameters, in order.
        batches: SHA-256 of each batch that a client sent for the step, in order; empty where data is registered.
        past: number of earlier steps of which models are given, so that sums that this step mixes can be computed.
        input_before: input digest of the step before the oldest model that is given; empty before step 0, and where
            noise is not correlated.
    """

    DOMAIN: ClassVar[str] = "raycloak/step-request/v1"

    roster: Envelope
    presentations: tuple[Envelope, ...]
    commitments: tuple[bytes, ...]
    ranges: tuple[VectorRange, ...]
    batches: tuple[bytes, ...] = ()
    past: int = Field(default=0, ge=0)
    input_before: bytes = b""


class StepReply(Message):
    """A worker's first, small answer: ``code`` is ``ok``, or says why nothing else comes.

    Attributes:
        header: signed; None unless ``ok``.
        seconds: the worker's own time for the whole answer.
        usage: what it took of that by phase, and of a GPU's memory.
        leaving: whether the worker was asked to end and should leave after this step.
        counted: exact sums over the examples of each hosted virtual worker, in their order; None in a private run.
    """

    DOMAIN: ClassVar[str] = "raycloak/step-reply/v1"

    member_id: str
    code: str
    header: Envelope | None = None
    seconds: float = 0.0
    usage: StepUsage = StepUsage()
    leaving: bool = False
    counted: tuple[PublicSums, ...] | None = None
