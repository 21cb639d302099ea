"""raycloak: train PyTorch models on private data with explicit Ray actors.

Import from here alone; everything else may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycloak.metrics.errors import (
    BudgetError,
    ConfigError,
    DatasetError,
    EvidenceError,
    ModelError,
    ProtocolError,
    RaycloakError,
    RefusedError,
    RunFailedError,
    SenderError,
)
from raycloak.metrics.service_errors import (
    BudgetExceededError,
    FutureCancelledError,
    FutureFailedError,
    FutureTimeoutError,
    ServiceAuthenticationError,
    ServiceConnectionError,
    ServiceError,
    ServiceNotFoundError,
    ServicePermissionError,
    ServiceQueueFullError,
    ServiceRateLimitedError,
    ServiceServerError,
    ServiceStateError,
    ServiceValidationError,
)
from raycloak.version import VERSION

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.commits import StepCommit
    from raycloak.attestation.orchestrator.data_commitments import DataCommitments
    from raycloak.attestation.policy.policy import simulated_policy
    from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
    from raycloak.coordinator.adapter.encrypted_adapter import EncryptedAdapter
    from raycloak.coordinator.aggregation.aggregator import MaskedAggregator, ReduceRequest
    from raycloak.coordinator.aggregation.ranges import split_ranges
    from raycloak.coordinator.client.connection import ServiceCredentials
    from raycloak.coordinator.client.futures import ServiceFuture
    from raycloak.coordinator.client.results import (
        Artifact,
        Capabilities,
        ClientSummary,
        Completion,
        DpMetrics,
        ForwardBackwardResult,
        LoadStateResult,
        OptimStepResult,
        Progress,
        SampleResult,
    )
    from raycloak.coordinator.client.sent_batches import DataKeys, DataTerms, SentRun
    from raycloak.coordinator.client.service_client import ServiceClient
    from raycloak.coordinator.client.training_client import ClientStatus, TrainingClient
    from raycloak.coordinator.client.training_config import TrainingConfig
    from raycloak.coordinator.cluster.actors import actor, start_platforms
    from raycloak.coordinator.cluster.node_evidence import NodeEvidenceSource
    from raycloak.coordinator.config.losses import LossConfig
    from raycloak.coordinator.config.run import RunConfig, load_config
    from raycloak.coordinator.config.sections import (
        CheckpointConfig,
        ClassCountsConfig,
        DatasetConfig,
        DPConfig,
        EarlyStoppingConfig,
        EvaluationConfig,
        FailureConfig,
        LedgerConfig,
        LoggersConfig,
        LoraConfig,
        MasksConfig,
        MeasurementsConfig,
        MetricsConfig,
        MLflowConfig,
        ModelConfig,
        OptimizerConfig,
        ParameterGroupConfig,
        PlacementConfig,
        PrivateEvaluationConfig,
        RingConfig,
        TensorBoardConfig,
        WandbConfig,
    )
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    from raycloak.coordinator.loggers.mlflow_logger import MLflowLogger
    from raycloak.coordinator.loggers.tensorboard_logger import TensorBoardLogger
    from raycloak.coordinator.loggers.wandb_logger import WandbLogger
    from raycloak.coordinator.planning.manifest import build_computation, build_manifest, epochs, run_terms
    from raycloak.coordinator.planning.plan import Plan, make_plan
    from raycloak.coordinator.runs.by_hand import by_hand
    from raycloak.coordinator.runs.released_model import load
    from raycloak.coordinator.runs.search import tunable
    from raycloak.coordinator.runs.trainer import Trainer
    from raycloak.coordinator.training.callbacks import (
        Callback,
        CheckpointReport,
        EvaluationReport,
        MeasurementReport,
        RunEnded,
        RunStarted,
    )
    from raycloak.coordinator.training.hand_loop import HandLoop
    from raycloak.coordinator.training.reporting import MembershipReport, StepReport
    from raycloak.workers.gradients.environment import worker_environment
    from raycloak.workers.inputs.datasets import ArrayDataset, Dataset
    from raycloak.workers.inputs.descriptor import DatasetDescriptor
    from raycloak.workers.messages import Admission, StepRequest, WorkerSetup
    from raycloak.workers.models.model_fixes import fix
    from raycloak.workers.models.models import ModelSource
    from raycloak.workers.terms.binding import vectors_digest
    from raycloak.workers.terms.model_digest import model_digest
    from raycloak.workers.terms.receipt import Receipt, data_root
    from raycloak.workers.train_worker import TrainWorker
    from raycloak.workers.vectors.payload import Header, VectorRange

__version__ = VERSION

_HOMES = {
    "Admission": "raycloak.workers.messages",
    "ArrayDataset": "raycloak.workers.inputs.datasets",
    "Artifact": "raycloak.coordinator.client.results",
    "Callback": "raycloak.coordinator.training.callbacks",
    "Capabilities": "raycloak.coordinator.client.results",
    "CheckpointConfig": "raycloak.coordinator.config.sections",
    "CheckpointReport": "raycloak.coordinator.training.callbacks",
    "ClassCountsConfig": "raycloak.coordinator.config.sections",
    "ClientStatus": "raycloak.coordinator.client.training_client",
    "ClientSummary": "raycloak.coordinator.client.results",
    "Completion": "raycloak.coordinator.client.results",
    "DPConfig": "raycloak.coordinator.config.sections",
    "DataCommitments": "raycloak.attestation.orchestrator.data_commitments",
    "DataKeys": "raycloak.coordinator.client.sent_batches",
    "DataTerms": "raycloak.coordinator.client.sent_batches",
    "Dataset": "raycloak.workers.inputs.datasets",
    "DatasetConfig": "raycloak.coordinator.config.sections",
    "DatasetDescriptor": "raycloak.workers.inputs.descriptor",
    "DpMetrics": "raycloak.coordinator.client.results",
    "EarlyStoppingConfig": "raycloak.coordinator.config.sections",
    "EncryptedAdapter": "raycloak.coordinator.adapter.encrypted_adapter",
    "EvaluationConfig": "raycloak.coordinator.config.sections",
    "EvaluationReport": "raycloak.coordinator.training.callbacks",
    "EvidenceOrchestrator": "raycloak.attestation.service.serving_orchestrator",
    "FailureConfig": "raycloak.coordinator.config.sections",
    "ForwardBackwardResult": "raycloak.coordinator.client.results",
    "HandLoop": "raycloak.coordinator.training.hand_loop",
    "Header": "raycloak.workers.vectors.payload",
    "LedgerConfig": "raycloak.coordinator.config.sections",
    "LoadStateResult": "raycloak.coordinator.client.results",
    "LoggersConfig": "raycloak.coordinator.config.sections",
    "LoraConfig": "raycloak.coordinator.config.sections",
    "LossConfig": "raycloak.coordinator.config.losses",
    "MLflowConfig": "raycloak.coordinator.config.sections",
    "MLflowLogger": "raycloak.coordinator.loggers.mlflow_logger",
    "MaskedAggregator": "raycloak.coordinator.aggregation.aggregator",
    "MasksConfig": "raycloak.coordinator.config.sections",
    "MeasurementReport": "raycloak.coordinator.training.callbacks",
    "MeasurementsConfig": "raycloak.coordinator.config.sections",
    "MembershipReport": "raycloak.coordinator.training.reporting",
    "MetricsConfig": "raycloak.coordinator.config.sections",
    "ModelConfig": "raycloak.coordinator.config.sections",
    "ModelSource": "raycloak.workers.models.models",
    "NodeEvidenceSource": "raycloak.coordinator.cluster.node_evidence",
    "OptimStepResult": "raycloak.coordinator.client.results",
    "OptimizerConfig": "raycloak.coordinator.config.sections",
    "ParameterGroupConfig": "raycloak.coordinator.config.sections",
    "PlacementConfig": "raycloak.coordinator.config.sections",
    "Plan": "raycloak.coordinator.planning.plan",
    "PrivacyLedger": "raycloak.coordinator.ledger.ledger",
    "PrivateEvaluationConfig": "raycloak.coordinator.config.sections",
    "Progress": "raycloak.coordinator.client.results",
    "Receipt": "raycloak.workers.terms.receipt",
    "ReduceRequest": "raycloak.coordinator.aggregation.aggregator",
    "RingConfig": "raycloak.coordinator.config.sections",
    "RunConfig": "raycloak.coordinator.config.run",
    "RunEnded": "raycloak.coordinator.training.callbacks",
    "RunStarted": "raycloak.coordinator.training.callbacks",
    "SampleResult": "raycloak.coordinator.client.results",
    "SentRun": "raycloak.coordinator.client.sent_batches",
    "ServiceClient": "raycloak.coordinator.client.service_client",
    "ServiceCredentials": "raycloak.coordinator.client.connection",
    "ServiceFuture": "raycloak.coordinator.client.futures",
    "SimulatedVendor": "raycloak.attestation.simulators.tdx_vendor",
    "StepCommit": "raycloak.attestation.orchestrator.commits",
    "StepReport": "raycloak.coordinator.training.reporting",
    "StepRequest": "raycloak.workers.messages",
    "TensorBoardConfig": "raycloak.coordinator.config.sections",
    "TensorBoardLogger": "raycloak.coordinator.loggers.tensorboard_logger",
    "TrainWorker": "raycloak.workers.train_worker",
    "Trainer": "raycloak.coordinator.runs.trainer",
    "TrainingClient": "raycloak.coordinator.client.training_client",
    "TrainingConfig": "raycloak.coordinator.client.training_config",
    "VectorRange": "raycloak.workers.vectors.payload",
    "WandbConfig": "raycloak.coordinator.config.sections",
    "WandbLogger": "raycloak.coordinator.loggers.wandb_logger",
    "WorkerSetup": "raycloak.workers.messages",
    "actor": "raycloak.coordinator.cluster.actors",
    "build_computation": "raycloak.coordinator.planning.manifest",
    "build_manifest": "raycloak.coordinator.planning.manifest",
    "by_hand": "raycloak.coordinator.runs.by_hand",
    "code_measurement": "raycloak.attestation.simulators.tdx_vendor",
    "data_root": "raycloak.workers.terms.receipt",
    "epochs": "raycloak.coordinator.planning.manifest",
    "fix": "raycloak.workers.models.model_fixes",
    "load": "raycloak.coordinator.runs.released_model",
    "load_config": "raycloak.coordinator.config.run",
    "make_plan": "raycloak.coordinator.planning.plan",
    "model_digest": "raycloak.workers.terms.model_digest",
    "run_terms": "raycloak.coordinator.planning.manifest",
    "simulated_policy": "raycloak.attestation.policy.policy",
    "split_ranges": "raycloak.coordinator.aggregation.ranges",
    "start_platforms": "raycloak.coordinator.cluster.actors",
    "tunable": "raycloak.coordinator.runs.search",
    "vectors_digest": "raycloak.workers.terms.binding",
    "worker_environment": "raycloak.workers.gradients.environment",
}

__all__ = [
    "Admission",
    "ArrayDataset",
    "Artifact",
    "BudgetError",
    "BudgetExceededError",
    "Callback",
    "Capabilities",
    "CheckpointConfig",
    "CheckpointReport",
    "ClassCountsConfig",
    "ClientStatus",
    "ClientSummary",
    "Completion",
    "ConfigError",
    "DPConfig",
    "DataCommitments",
    "DataKeys",
    "DataTerms",
    "Dataset",
    "DatasetConfig",
    "DatasetDescriptor",
    "DatasetError",
    "DpMetrics",
    "EarlyStoppingConfig",
    "EncryptedAdapter",
    "EvaluationConfig",
    "EvaluationReport",
    "EvidenceError",
    "EvidenceOrchestrator",
    "FailureConfig",
    "ForwardBackwardResult",
    "FutureCancelledError",
    "FutureFailedError",
    "FutureTimeoutError",
    "HandLoop",
    "Header",
    "LedgerConfig",
    "LoadStateResult",
    "LoggersConfig",
    "LoraConfig",
    "LossConfig",
    "MLflowConfig",
    "MLflowLogger",
    "MaskedAggregator",
    "MasksConfig",
    "MeasurementReport",
    "MeasurementsConfig",
    "MembershipReport",
    "MetricsConfig",
    "ModelConfig",
    "ModelError",
    "ModelSource",
    "NodeEvidenceSource",
    "OptimStepResult",
    "OptimizerConfig",
    "ParameterGroupConfig",
    "PlacementConfig",
    "Plan",
    "PrivacyLedger",
    "PrivateEvaluationConfig",
    "Progress",
    "ProtocolError",
    "RaycloakError",
    "Receipt",
    "ReduceRequest",
    "RefusedError",
    "RingConfig",
    "RunConfig",
    "RunEnded",
    "RunFailedError",
    "RunStarted",
    "SampleResult",
    "SenderError",
    "SentRun",
    "ServiceAuthenticationError",
    "ServiceClient",
    "ServiceConnectionError",
    "ServiceCredentials",
    "ServiceError",
    "ServiceFuture",
    "ServiceNotFoundError",
    "ServicePermissionError",
    "ServiceQueueFullError",
    "ServiceRateLimitedError",
    "ServiceServerError",
    "ServiceStateError",
    "ServiceValidationError",
    "SimulatedVendor",
    "StepCommit",
    "StepReport",
    "StepRequest",
    "TensorBoardConfig",
    "TensorBoardLogger",
    "TrainWorker",
    "Trainer",
    "TrainingClient",
    "TrainingConfig",
    "VectorRange",
    "WandbConfig",
    "WandbLogger",
    "WorkerSetup",
    "__version__",
    "actor",
    "build_computation",
    "build_manifest",
    "by_hand",
    "code_measurement",
    "data_root",
    "epochs",
    "fix",
    "load",
    "load_config",
    "make_plan",
    "model_digest",
    "run_terms",
    "simulated_policy",
    "split_ranges",
    "start_platforms",
    "tunable",
    "vectors_digest",
    "worker_environment",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that reading a configuration does not load torch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raycloak' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
