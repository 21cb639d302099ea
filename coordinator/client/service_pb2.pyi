from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceErrorInfo(_message.Message):
    __slots__ = ("code", "message", "remedy", "request_id", "kind", "field", "resource", "retry_after_s", "current_epsilon", "max_epsilon")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPSILON_FIELD_NUMBER: _ClassVar[int]
    MAX_EPSILON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    remedy: str
    request_id: str
    kind: str
    field: str
    resource: str
    retry_after_s: float
    current_epsilon: float
    max_epsilon: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., request_id: _Optional[str] = ..., kind: _Optional[str] = ..., field: _Optional[str] = ..., resource: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., current_epsilon: _Optional[float] = ..., max_epsilon: _Optional[float] = ...) -> None: ...

class CapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("version", "tenant", "datasets", "models", "evidence_class", "largest_batch_bytes", "most_queued", "expires_unix_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_CLASS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_BATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_QUEUED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    tenant: str
    datasets: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    evidence_class: str
    largest_batch_bytes: int
    most_queued: int
    expires_unix_s: float
    def __init__(self, version: _Optional[str] = ..., tenant: _Optional[str] = ..., datasets: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., evidence_class: _Optional[str] = ..., largest_batch_bytes: _Optional[int] = ..., most_queued: _Optional[int] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class CreateClientRequest(_message.Message):
    __slots__ = ("idempotency_key", "config_json")
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    idempotency_key: str
    config_json: str
    def __init__(self, idempotency_key: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class ClientRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class ListClientsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClientsReply(_message.Message):
    __slots__ = ("clients",)
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[Client]
    def __init__(self, clients: _Optional[_Iterable[_Union[Client, _Mapping]]] = ...) -> None: ...

class DpMetrics(_message.Message):
    __slots__ = ("epsilon_spent", "epsilon_cap", "epsilon_planned", "delta", "steps_charged", "steps_planned", "noise_multiplier", "sample_rate", "max_grad_norm", "accountant", "private")
    EPSILON_SPENT_FIELD_NUMBER: _ClassVar[int]
    EPSILON_CAP_FIELD_NUMBER: _ClassVar[int]
    EPSILON_PLANNED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    STEPS_CHARGED_FIELD_NUMBER: _ClassVar[int]
    STEPS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTANT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, epsilon_spent: _Optional[float] = ..., epsilon_cap: _Optional[float] = ..., epsilon_planned: _Optional[float] = ..., delta: _Optional[float] = ..., steps_charged: _Optional[int] = ..., steps_planned: _Optional[int] = ..., noise_multiplier: _Optional[float] = ..., sample_rate: _Optional[float] = ..., max_grad_norm: _Optional[float] = ..., accountant: _Optional[str] = ..., private: _Optional[bool] = ...) -> None: ...

class Client(_message.Message):
    __slots__ = ("client_id", "name", "status", "step", "dp_metrics", "run_id", "evidence_class", "account", "metadata", "created_unix_s", "error", "config_json", "phase", "revision", "model_digest", "queued", "manifest_json", "operations")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DP_METRICS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_CLASS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    name: str
    status: str
    step: int
    dp_metrics: DpMetrics
    run_id: str
    evidence_class: str
    account: str
    metadata: _containers.ScalarMap[str, str]
    created_unix_s: float
    error: ServiceErrorInfo
    config_json: str
    phase: str
    revision: int
    model_digest: str
    queued: int
    manifest_json: str
    operations: int
    def __init__(self, client_id: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., step: _Optional[int] = ..., dp_metrics: _Optional[_Union[DpMetrics, _Mapping]] = ..., run_id: _Optional[str] = ..., evidence_class: _Optional[str] = ..., account: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., created_unix_s: _Optional[float] = ..., error: _Optional[_Union[ServiceErrorInfo, _Mapping]] = ..., config_json: _Optional[str] = ..., phase: _Optional[str] = ..., revision: _Optional[int] = ..., model_digest: _Optional[str] = ..., queued: _Optional[int] = ..., manifest_json: _Optional[str] = ..., operations: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("client_id", "idempotency_key", "forward_backward", "optim_step", "save_state", "load_state", "sample")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    idempotency_key: str
    forward_backward: ForwardBackward
    optim_step: OptimStep
    save_state: SaveState
    load_state: LoadState
    sample: Sample
    def __init__(self, client_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., forward_backward: _Optional[_Union[ForwardBackward, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStep, _Mapping]] = ..., save_state: _Optional[_Union[SaveState, _Mapping]] = ..., load_state: _Optional[_Union[LoadState, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ...) -> None: ...

class ForwardBackward(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptimStep(_message.Message):
    __slots__ = ("apply_dp_noise",)
    APPLY_DP_NOISE_FIELD_NUMBER: _ClassVar[int]
    apply_dp_noise: bool
    def __init__(self, apply_dp_noise: _Optional[bool] = ...) -> None: ...

class SaveState(_message.Message):
    __slots__ = ("metadata",)
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METADATA_FIELD_NUMBER: _ClassVar[int]
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LoadState(_message.Message):
    __slots__ = ("artifact_id",)
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    def __init__(self, artifact_id: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("prompts", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "completions")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    completions: int
    def __init__(self, prompts: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., completions: _Optional[int] = ...) -> None: ...

class BatchHead(_message.Message):
    __slots__ = ("client_id", "idempotency_key", "examples", "example_hashes", "bytes", "sha256")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_HASHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    idempotency_key: str
    examples: int
    example_hashes: bytes
    bytes: int
    sha256: bytes
    def __init__(self, client_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., examples: _Optional[int] = ..., example_hashes: _Optional[bytes] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class BatchPiece(_message.Message):
    __slots__ = ("head", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: BatchHead
    data: bytes
    def __init__(self, head: _Optional[_Union[BatchHead, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class OperationRequest(_message.Message):
    __slots__ = ("client_id", "operation_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    operation_id: str
    def __init__(self, client_id: _Optional[str] = ..., operation_id: _Optional[str] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("operation_id", "client_id", "kind", "state", "number", "revision", "submitted_unix_s", "error", "forward_backward", "optim_step", "save_state", "load_state", "sample", "idempotency_key")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    client_id: str
    kind: str
    state: str
    number: int
    revision: int
    submitted_unix_s: float
    error: ServiceErrorInfo
    forward_backward: ForwardBackwardResult
    optim_step: OptimStepResult
    save_state: SaveStateResult
    load_state: LoadStateResult
    sample: SampleResult
    idempotency_key: str
    def __init__(self, operation_id: _Optional[str] = ..., client_id: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., number: _Optional[int] = ..., revision: _Optional[int] = ..., submitted_unix_s: _Optional[float] = ..., error: _Optional[_Union[ServiceErrorInfo, _Mapping]] = ..., forward_backward: _Optional[_Union[ForwardBackwardResult, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStepResult, _Mapping]] = ..., save_state: _Optional[_Union[SaveStateResult, _Mapping]] = ..., load_state: _Optional[_Union[LoadStateResult, _Mapping]] = ..., sample: _Optional[_Union[SampleResult, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class ForwardBackwardResult(_message.Message):
    __slots__ = ("step", "loss", "grad_norm", "tokens", "examples_sent", "dp_metrics")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_SENT_FIELD_NUMBER: _ClassVar[int]
    DP_METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    grad_norm: float
    tokens: int
    examples_sent: int
    dp_metrics: DpMetrics
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., grad_norm: _Optional[float] = ..., tokens: _Optional[int] = ..., examples_sent: _Optional[int] = ..., dp_metrics: _Optional[_Union[DpMetrics, _Mapping]] = ...) -> None: ...

class OptimStepResult(_message.Message):
    __slots__ = ("step", "model_digest", "dp_metrics", "loss", "evaluation_accuracy", "evaluation_loss", "seconds", "grad_norm")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DP_METRICS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    step: int
    model_digest: str
    dp_metrics: DpMetrics
    loss: float
    evaluation_accuracy: float
    evaluation_loss: float
    seconds: float
    grad_norm: float
    def __init__(self, step: _Optional[int] = ..., model_digest: _Optional[str] = ..., dp_metrics: _Optional[_Union[DpMetrics, _Mapping]] = ..., loss: _Optional[float] = ..., evaluation_accuracy: _Optional[float] = ..., evaluation_loss: _Optional[float] = ..., seconds: _Optional[float] = ..., grad_norm: _Optional[float] = ...) -> None: ...

class SaveStateResult(_message.Message):
    __slots__ = ("artifact",)
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    artifact: Artifact
    def __init__(self, artifact: _Optional[_Union[Artifact, _Mapping]] = ...) -> None: ...

class LoadStateResult(_message.Message):
    __slots__ = ("artifact_id", "step", "model_digest")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    step: int
    model_digest: str
    def __init__(self, artifact_id: _Optional[str] = ..., step: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("prompt", "text", "finish_reason", "tokens")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    text: str
    finish_reason: str
    tokens: int
    def __init__(self, prompt: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class SampleResult(_message.Message):
    __slots__ = ("completions", "step", "model_digest")
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    step: int
    model_digest: str
    def __init__(self, completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., step: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("client_id", "since")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    since: int
    def __init__(self, client_id: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("operation_id", "step", "epsilon", "tokens_per_second", "phase")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    step: int
    epsilon: float
    tokens_per_second: float
    phase: str
    def __init__(self, operation_id: _Optional[str] = ..., step: _Optional[int] = ..., epsilon: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., phase: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("operation_id", "completion", "text")
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    completion: int
    text: str
    def __init__(self, operation_id: _Optional[str] = ..., completion: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("operation", "client", "progress", "tokens")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    client: Client
    progress: Progress
    tokens: Tokens
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., client: _Optional[_Union[Client, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("artifact_id", "client_id", "step", "package_digest", "model_digest", "metadata", "created_unix_s", "bytes")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    client_id: str
    step: int
    package_digest: str
    model_digest: str
    metadata: _containers.ScalarMap[str, str]
    created_unix_s: float
    bytes: int
    def __init__(self, artifact_id: _Optional[str] = ..., client_id: _Optional[str] = ..., step: _Optional[int] = ..., package_digest: _Optional[str] = ..., model_digest: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., created_unix_s: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class ListArtifactsReply(_message.Message):
    __slots__ = ("artifacts",)
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[Artifact]
    def __init__(self, artifacts: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ...) -> None: ...

class ArtifactRequest(_message.Message):
    __slots__ = ("client_id", "artifact_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    artifact_id: str
    def __init__(self, client_id: _Optional[str] = ..., artifact_id: _Optional[str] = ...) -> None: ...

class ArtifactPiece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
