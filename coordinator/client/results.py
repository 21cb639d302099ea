"""The results of operations, as a caller sees them: frozen, with the names that the wire has."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from raycloak.coordinator.client import service_pb2 as wire


@dataclass(frozen=True)
class DpMetrics:
    """The account and the plan of a client.

    Attributes:
        epsilon_spent: of the account, after the newest charge.
        epsilon_cap: hard cap of the account.
        epsilon_planned: of all planned steps.
        delta: of every epsilon here.
        steps_charged, steps_planned: numbers of steps.
        noise_multiplier: z of one step.
        sample_rate: probability of an example in a step; 1 on data that the client sends.
        max_grad_norm: C, the clipping bound.
        accountant: ``pld`` or ``rdp``.
        private: False where the data was declared public and nothing is noised.
    """

    epsilon_spent: float
    epsilon_cap: float
    epsilon_planned: float
    delta: float
    steps_charged: int
    steps_planned: int
    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    accountant: str
    private: bool


@dataclass(frozen=True)
class ForwardBackwardResult:
    """A step that was charged, computed and masked.

    ``loss`` and ``tokens`` are facts of the drawn examples. They are exact in a run that is not private, whose data was
    declared public. They are None for a step that a service finds finished when it is started again, and on data
    that the client sends.

    Attributes:
        step: number of the step, from 0.
        loss: mean of the drawn examples, for the model before the step. In a private run it is noised, as a measurement
            of this very model released it, else None.
        grad_norm: None: it is known once the step is reduced, see `OptimStepResult`.
        tokens: of the drawn examples without padding; None in a private run, or if examples are no rows of tokens.
        examples_sent: of this call; 0 on registered data.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    tokens: int | None
    examples_sent: int
    dp_metrics: DpMetrics


@dataclass(frozen=True)
class OptimStepResult:
    """A released step.

    Attributes:
        step: finished steps, this one included.
        model_digest: SHA-256 of the released parameters, hexadecimal.
        loss: see `ForwardBackwardResult`.
        grad_norm: l2 norm of the step's average gradient; None in a private run.
        evaluation_accuracy, evaluation_loss: on the public split, where this step was evaluated; else None.
        seconds: duration of the step.
    """

    step: int
    model_digest: str
    dp_metrics: DpMetrics
    loss: float | None
    evaluation_accuracy: float | None
    evaluation_loss: float | None
    seconds: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class Artifact:
    """A sealed package that the service keeps.

    Attributes:
        package_digest: SHA-256 of the package's manifest, hexadecimal.
        model_digest: SHA-256 of the parameters in it, hexadecimal.
        metadata: notes of the caller who saved it.
        created_unix_s: seconds since 1970.
        bytes: length of the file that `ServiceClient.pull_artifact` returns.
    """

    artifact_id: str
    client_id: str
    step: int
    package_digest: str
    model_digest: str
    metadata: dict[str, str]
    created_unix_s: float
    bytes: int


@dataclass(frozen=True)
class LoadStateResult:
    """A loaded package: ``step`` steps were finished when it was saved."""

    artifact_id: str
    step: int
    model_digest: str


@dataclass(frozen=True)
class Completion:
    """A text that the model wrote.

    Attributes:
        prompt: number of its prompt, from 0.
        finish_reason: ``stop`` for a stop text or the model's own end, ``length`` for ``max_tokens``.
        tokens: how many were written, the end's own included.
    """

    prompt: int
    text: str
    finish_reason: Literal["stop", "length"]
    tokens: int


@dataclass(frozen=True)
class SampleResult:
    """The completions of all prompts, in their order; the released model after ``step`` steps wrote them."""

    completions: tuple[Completion, ...]
    step: int
    model_digest: str


@dataclass(frozen=True)
class Progress:
    """A report of a long operation while it runs.

    Attributes:
        operation_id: of the sample in phase ``sampling``, else empty.
        step: finished steps; of the weights in phase ``sampling``.
        tokens_per_second: in phase ``sampling``, the tokens that this sample has generated over the time that they
            took. In phase ``released``, the drawn tokens of the step over its ``seconds``, if the run is not private
            and examples are rows of tokens. Else None.
        phase: words for a person.
    """

    operation_id: str
    step: int
    epsilon: float
    tokens_per_second: float | None
    phase: str


@dataclass(frozen=True)
class ClientSummary:
    """A client of this tenant, as `ServiceClient.list_clients` lists it.

    Attributes:
        status: ``INITIALIZING``, ``READY``, ``BUSY``, ``ERROR`` or ``TERMINATED``.
        step: finished steps.
        dp_metrics: None until the run is admitted.
        queued: operations that wait.
    """

    client_id: str
    name: str
    status: str
    step: int
    dp_metrics: DpMetrics | None
    run_id: str
    evidence_class: str
    account: str
    metadata: dict[str, str]
    created_unix_s: float
    phase: str
    model_digest: str
    queued: int


@dataclass(frozen=True)
class Capabilities:
    """The offer of a service to this tenant.

    Attributes:
        version: of the service.
        datasets, models: registered names that the tenant may use.
        evidence_class: ``hardware``, or ``simulated`` if the policy of the service's runs accepts simulated evidence.
            `ClientSummary` has the class that a run's members presented.
        largest_batch_bytes: of the ciphertext of one ``forward_backward(batch)``.
        most_queued: operations of one client that may wait.
        expires_unix_s: when these credentials end, in seconds since 1970; 0 if they do not.
    """

    version: str
    tenant: str
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    evidence_class: str
    largest_batch_bytes: int
    most_queued: int
    expires_unix_s: float


def result_of(operation: wire.Operation) -> Any:
    """Return the result that a done operation carries; an `Artifact` for ``save_state``."""
    kind = operation.WhichOneof("result")
    if kind is None:
        return None
    message = getattr(operation, kind)
    return from_wire(message.artifact if kind == "save_state" else message)


def from_wire(message: Any) -> Any:
    """Return the record of a message; an absent optional field is None."""
    record = _RECORDS[type(message).__name__]
    return record(**{name: _value(message, name) for name in record.__dataclass_fields__})


def _value(message: Any, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return tuple(from_wire(each) if field.message_type else each for each in value)
    return from_wire(value) if field.message_type else value


_RECORDS: Final[dict[str, Any]] = {
    "Artifact": Artifact,
    "Capabilities": Capabilities,
    "Client": ClientSummary,
    "Completion": Completion,
    "DpMetrics": DpMetrics,
    "ForwardBackwardResult": ForwardBackwardResult,
    "LoadStateResult": LoadStateResult,
    "OptimStepResult": OptimStepResult,
    "Progress": Progress,
    "SampleResult": SampleResult,
}
