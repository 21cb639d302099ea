"""raycloak: train PyTorch models on private data with explicit Ray actors.

Import from here alone; everything else may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycloak_layout import PackageShadowedError, check_siblings

check_siblings()

from metrics.errors import (  # noqa: E402 - a shadowed package must be named before it is imported
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

if TYPE_CHECKING:
    from attestation.commit_book import StepCommit
    from attestation.policy import simulated_policy
    from attestation.serving_orchestrator import EvidenceOrchestrator
    from attestation.simulator import SimulatedVendor, code_measurement
    from coordinator.actors import actor, start_platforms
    from coordinator.aggregator import MaskedAggregator, ReduceRequest
    from coordinator.config import RunConfig, load_config
    from coordinator.config_sections import (
        CheckpointConfig,
        ClassCountsConfig,
        DatasetConfig,
        DPConfig,
        EvaluationConfig,
        FailureConfig,
        LedgerConfig,
        MeasurementsConfig,
        MetricsConfig,
        OptimizerConfig,
        PlacementConfig,
        PrivateEvaluationConfig,
        RingConfig,
    )
    from coordinator.ledger import PrivacyLedger
    from coordinator.manifest import build_computation, build_manifest, epochs, run_terms
    from coordinator.node_evidence import NodeEvidenceSource
    from coordinator.plan import Plan, make_plan
    from coordinator.ranges import split_ranges
    from coordinator.trainer import Trainer
    from workers.datasets import ArrayDataset, Dataset
    from workers.descriptor import DatasetDescriptor
    from workers.manifest import key_context
    from workers.models import ModelSource
    from workers.numerics import worker_environment
    from workers.parameters import parameter_digest
    from workers.payload import VectorRange
    from workers.receipt import Receipt
    from workers.train_worker import TrainWorker
    from workers.worker_messages import Admission, StepRequest, WorkerSetup

_HOMES = {
    "Admission": "workers.worker_messages",
    "ArrayDataset": "workers.datasets",
    "CheckpointConfig": "coordinator.config_sections",
    "ClassCountsConfig": "coordinator.config_sections",
    "DPConfig": "coordinator.config_sections",
    "Dataset": "workers.datasets",
    "DatasetConfig": "coordinator.config_sections",
    "DatasetDescriptor": "workers.descriptor",
    "EvaluationConfig": "coordinator.config_sections",
    "EvidenceOrchestrator": "attestation.serving_orchestrator",
    "FailureConfig": "coordinator.config_sections",
    "LedgerConfig": "coordinator.config_sections",
    "MaskedAggregator": "coordinator.aggregator",
    "MeasurementsConfig": "coordinator.config_sections",
    "MetricsConfig": "coordinator.config_sections",
    "ModelSource": "workers.models",
    "NodeEvidenceSource": "coordinator.node_evidence",
    "OptimizerConfig": "coordinator.config_sections",
    "PlacementConfig": "coordinator.config_sections",
    "Plan": "coordinator.plan",
    "PrivacyLedger": "coordinator.ledger",
    "PrivateEvaluationConfig": "coordinator.config_sections",
    "Receipt": "workers.receipt",
    "ReduceRequest": "coordinator.aggregator",
    "RingConfig": "coordinator.config_sections",
    "RunConfig": "coordinator.config",
    "SimulatedVendor": "attestation.simulator",
    "StepCommit": "attestation.commit_book",
    "StepRequest": "workers.worker_messages",
    "TrainWorker": "workers.train_worker",
    "Trainer": "coordinator.trainer",
    "VectorRange": "workers.payload",
    "WorkerSetup": "workers.worker_messages",
    "actor": "coordinator.actors",
    "build_computation": "coordinator.manifest",
    "build_manifest": "coordinator.manifest",
    "code_measurement": "attestation.simulator",
    "epochs": "coordinator.manifest",
    "key_context": "workers.manifest",
    "load_config": "coordinator.config",
    "make_plan": "coordinator.plan",
    "parameter_digest": "workers.parameters",
    "run_terms": "coordinator.manifest",
    "simulated_policy": "attestation.policy",
    "split_ranges": "coordinator.ranges",
    "start_platforms": "coordinator.actors",
    "worker_environment": "workers.numerics",
}

__all__ = [
    "Admission",
    "ArrayDataset",
    "BudgetError",
    "CheckpointConfig",
    "ClassCountsConfig",
    "ConfigError",
    "DPConfig",
    "Dataset",
    "DatasetConfig",
    "DatasetDescriptor",
    "DatasetError",
    "EvaluationConfig",
    "EvidenceError",
    "EvidenceOrchestrator",
    "FailureConfig",
    "LedgerConfig",
    "MaskedAggregator",
    "MeasurementsConfig",
    "MetricsConfig",
    "ModelError",
    "ModelSource",
    "NodeEvidenceSource",
    "OptimizerConfig",
    "PackageShadowedError",
    "PlacementConfig",
    "Plan",
    "PrivacyLedger",
    "PrivateEvaluationConfig",
    "ProtocolError",
    "RaycloakError",
    "Receipt",
    "ReduceRequest",
    "RefusedError",
    "RingConfig",
    "RunConfig",
    "RunFailedError",
    "SenderError",
    "SimulatedVendor",
    "StepCommit",
    "StepRequest",
    "TrainWorker",
    "Trainer",
    "VectorRange",
    "WorkerSetup",
    "actor",
    "build_computation",
    "build_manifest",
    "code_measurement",
    "epochs",
    "key_context",
    "load_config",
    "make_plan",
    "parameter_digest",
    "run_terms",
    "simulated_policy",
    "split_ranges",
    "start_platforms",
    "worker_environment",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that reading a configuration does not load torch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raycloak' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
