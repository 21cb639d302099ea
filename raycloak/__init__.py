"""raycloak: train PyTorch models on private data with explicit Ray actors.

Import from here alone; everything else may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycloak.metrics.errors import BudgetError as BudgetError
from raycloak.metrics.errors import ConfigError as ConfigError
from raycloak.metrics.errors import DatasetError as DatasetError
from raycloak.metrics.errors import EvidenceError as EvidenceError
from raycloak.metrics.errors import ModelError as ModelError
from raycloak.metrics.errors import ProtocolError as ProtocolError
from raycloak.metrics.errors import RaycloakError as RaycloakError
from raycloak.metrics.errors import RefusedError as RefusedError
from raycloak.metrics.errors import RunFailedError as RunFailedError
from raycloak.metrics.errors import SenderError as SenderError
from raycloak.metrics.service_errors import BudgetExceededError as BudgetExceededError
from raycloak.metrics.service_errors import FutureCancelledError as FutureCancelledError
from raycloak.metrics.service_errors import FutureFailedError as FutureFailedError
from raycloak.metrics.service_errors import FutureTimeoutError as FutureTimeoutError
from raycloak.metrics.service_errors import ServiceAuthenticationError as ServiceAuthenticationError
from raycloak.metrics.service_errors import ServiceConnectionError as ServiceConnectionError
from raycloak.metrics.service_errors import ServiceError as ServiceError
from raycloak.metrics.service_errors import ServiceNotFoundError as ServiceNotFoundError
from raycloak.metrics.service_errors import ServicePermissionError as ServicePermissionError
from raycloak.metrics.service_errors import ServiceQueueFullError as ServiceQueueFullError
from raycloak.metrics.service_errors import ServiceRateLimitedError as ServiceRateLimitedError
from raycloak.metrics.service_errors import ServiceServerError as ServiceServerError
from raycloak.metrics.service_errors import ServiceStateError as ServiceStateError
from raycloak.metrics.service_errors import ServiceValidationError as ServiceValidationError
from raycloak.version import VERSION

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.commits import StepCommit as StepCommit
    from raycloak.attestation.orchestrator.data_commitments import DataCommitments as DataCommitments
    from raycloak.attestation.policy.policy import simulated_policy as simulated_policy
    from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator as EvidenceOrchestrator
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor as SimulatedVendor
    from raycloak.attestation.simulators.tdx_vendor import code_measurement as code_measurement
    from raycloak.coordinator.aggregation.aggregator import MaskedAggregator as MaskedAggregator
    from raycloak.coordinator.aggregation.aggregator import ReduceRequest as ReduceRequest
    from raycloak.coordinator.aggregation.ranges import split_ranges as split_ranges
    from raycloak.coordinator.client.connection import ServiceCredentials as ServiceCredentials
    from raycloak.coordinator.client.futures import ServiceFuture as ServiceFuture
    from raycloak.coordinator.client.results import Artifact as Artifact
    from raycloak.coordinator.client.results import Capabilities as Capabilities
    from raycloak.coordinator.client.results import ClientSummary as ClientSummary
    from raycloak.coordinator.client.results import Completion as Completion
    from raycloak.coordinator.client.results import DpMetrics as DpMetrics
    from raycloak.coordinator.client.results import ForwardBackwardResult as ForwardBackwardResult
    from raycloak.coordinator.client.results import LoadStateResult as LoadStateResult
    from raycloak.coordinator.client.results import OptimStepResult as OptimStepResult
    from raycloak.coordinator.client.results import Progress as Progress
    from raycloak.coordinator.client.results import SampleResult as SampleResult
    from raycloak.coordinator.client.sent_batches import DataKeys as DataKeys
    from raycloak.coordinator.client.sent_batches import DataTerms as DataTerms
    from raycloak.coordinator.client.sent_batches import SentRun as SentRun
    from raycloak.coordinator.client.service_client import ServiceClient as ServiceClient
    from raycloak.coordinator.client.training_client import ClientStatus as ClientStatus
    from raycloak.coordinator.client.training_client import TrainingClient as TrainingClient
    from raycloak.coordinator.client.training_config import TrainingConfig as TrainingConfig
    from raycloak.coordinator.cluster.actors import actor as actor
    from raycloak.coordinator.cluster.actors import start_platforms as start_platforms
    from raycloak.coordinator.cluster.node_evidence import NodeEvidenceSource as NodeEvidenceSource
    from raycloak.coordinator.config.losses import LossConfig as LossConfig
    from raycloak.coordinator.config.run import RunConfig as RunConfig
    from raycloak.coordinator.config.run import load_config as load_config
    from raycloak.coordinator.config.sections import CheckpointConfig as CheckpointConfig
    from raycloak.coordinator.config.sections import ClassCountsConfig as ClassCountsConfig
    from raycloak.coordinator.config.sections import DatasetConfig as DatasetConfig
    from raycloak.coordinator.config.sections import DPConfig as DPConfig
    from raycloak.coordinator.config.sections import EarlyStoppingConfig as EarlyStoppingConfig
    from raycloak.coordinator.config.sections import EvaluationConfig as EvaluationConfig
    from raycloak.coordinator.config.sections import FailureConfig as FailureConfig
    from raycloak.coordinator.config.sections import LedgerConfig as LedgerConfig
    from raycloak.coordinator.config.sections import LoggersConfig as LoggersConfig
    from raycloak.coordinator.config.sections import LoraConfig as LoraConfig
    from raycloak.coordinator.config.sections import MasksConfig as MasksConfig
    from raycloak.coordinator.config.sections import MeasurementsConfig as MeasurementsConfig
    from raycloak.coordinator.config.sections import MetricsConfig as MetricsConfig
    from raycloak.coordinator.config.sections import MLflowConfig as MLflowConfig
    from raycloak.coordinator.config.sections import ModelConfig as ModelConfig
    from raycloak.coordinator.config.sections import NoiseConfig as NoiseConfig
    from raycloak.coordinator.config.sections import OptimizerConfig as OptimizerConfig
    from raycloak.coordinator.config.sections import ParameterGroupConfig as ParameterGroupConfig
    from raycloak.coordinator.config.sections import PlacementConfig as PlacementConfig
    from raycloak.coordinator.config.sections import PrivateEvaluationConfig as PrivateEvaluationConfig
    from raycloak.coordinator.config.sections import RingConfig as RingConfig
    from raycloak.coordinator.config.sections import TensorBoardConfig as TensorBoardConfig
    from raycloak.coordinator.config.sections import WandbConfig as WandbConfig
    from raycloak.coordinator.ledger.ledger import PrivacyLedger as PrivacyLedger
    from raycloak.coordinator.loggers.mlflow_logger import MLflowLogger as MLflowLogger
    from raycloak.coordinator.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from raycloak.coordinator.loggers.wandb_logger import WandbLogger as WandbLogger
    from raycloak.coordinator.planning.manifest import build_computation as build_computation
    from raycloak.coordinator.planning.manifest import build_manifest as build_manifest
    from raycloak.coordinator.planning.manifest import epochs as epochs
    from raycloak.coordinator.planning.manifest import run_terms as run_terms
    from raycloak.coordinator.planning.plan import Plan as Plan
    from raycloak.coordinator.planning.plan import make_plan as make_plan
    from raycloak.coordinator.runs.by_hand import by_hand as by_hand
    from raycloak.coordinator.runs.released_model import load as load
    from raycloak.coordinator.runs.search import tunable as tunable
    from raycloak.coordinator.runs.trainer import Trainer as Trainer
    from raycloak.coordinator.training.callbacks import Callback as Callback
    from raycloak.coordinator.training.callbacks import CheckpointReport as CheckpointReport
    from raycloak.coordinator.training.callbacks import EvaluationReport as EvaluationReport
    from raycloak.coordinator.training.callbacks import MeasurementReport as MeasurementReport
    from raycloak.coordinator.training.callbacks import RunEnded as RunEnded
    from raycloak.coordinator.training.callbacks import RunStarted as RunStarted
    from raycloak.coordinator.training.hand_loop import HandLoop as HandLoop
    from raycloak.coordinator.training.reporting import MembershipReport as MembershipReport
    from raycloak.coordinator.training.reporting import StepReport as StepReport
    from raycloak.workers.gradients.environment import worker_environment as worker_environment
    from raycloak.workers.inputs.datasets import ArrayDataset as ArrayDataset
    from raycloak.workers.inputs.datasets import Dataset as Dataset
    from raycloak.workers.inputs.descriptor import DatasetDescriptor as DatasetDescriptor
    from raycloak.workers.messages import Admission as Admission
    from raycloak.workers.messages import StepRequest as StepRequest
    from raycloak.workers.messages import WorkerSetup as WorkerSetup
    from raycloak.workers.models.model_fixes import fix as fix
    from raycloak.workers.models.models import ModelSource as ModelSource
    from raycloak.workers.terms.binding import vectors_digest as vectors_digest
    from raycloak.workers.terms.model_digest import model_digest as model_digest
    from raycloak.workers.terms.receipt import Receipt as Receipt
    from raycloak.workers.terms.receipt import data_root as data_root
    from raycloak.workers.train_worker import TrainWorker as TrainWorker
    from raycloak.workers.vectors.payload import Header as Header
    from raycloak.workers.vectors.payload import VectorRange as VectorRange

__version__ = VERSION

_HOMES = {
    "raycloak.attestation.orchestrator.commits": "StepCommit",
    "raycloak.attestation.orchestrator.data_commitments": "DataCommitments",
    "raycloak.attestation.policy.policy": "simulated_policy",
    "raycloak.attestation.service.serving_orchestrator": "EvidenceOrchestrator",
    "raycloak.attestation.simulators.tdx_vendor": "SimulatedVendor code_measurement",
    "raycloak.coordinator.aggregation.aggregator": "MaskedAggregator ReduceRequest",
    "raycloak.coordinator.aggregation.ranges": "split_ranges",
    "raycloak.coordinator.client.connection": "ServiceCredentials",
    "raycloak.coordinator.client.futures": "ServiceFuture",
    "raycloak.coordinator.client.results": (
        "Artifact Capabilities ClientSummary Completion DpMetrics ForwardBackwardResult LoadStateResult "
        "OptimStepResult Progress SampleResult"
    ),
    "raycloak.coordinator.client.sent_batches": "DataKeys DataTerms SentRun",
    "raycloak.coordinator.client.service_client": "ServiceClient",
    "raycloak.coordinator.client.training_client": "ClientStatus TrainingClient",
    "raycloak.coordinator.client.training_config": "TrainingConfig",
    "raycloak.coordinator.cluster.actors": "actor start_platforms",
    "raycloak.coordinator.cluster.node_evidence": "NodeEvidenceSource",
    "raycloak.coordinator.config.losses": "LossConfig",
    "raycloak.coordinator.config.run": "RunConfig load_config",
    "raycloak.coordinator.config.sections": (
        "CheckpointConfig ClassCountsConfig DPConfig DatasetConfig EarlyStoppingConfig EvaluationConfig "
        "FailureConfig LedgerConfig LoggersConfig LoraConfig MLflowConfig MasksConfig MeasurementsConfig "
        "MetricsConfig ModelConfig NoiseConfig OptimizerConfig ParameterGroupConfig PlacementConfig "
        "PrivateEvaluationConfig RingConfig TensorBoardConfig WandbConfig"
    ),
    "raycloak.coordinator.ledger.ledger": "PrivacyLedger",
    "raycloak.coordinator.loggers.mlflow_logger": "MLflowLogger",
    "raycloak.coordinator.loggers.tensorboard_logger": "TensorBoardLogger",
    "raycloak.coordinator.loggers.wandb_logger": "WandbLogger",
    "raycloak.coordinator.planning.manifest": "build_computation build_manifest epochs run_terms",
    "raycloak.coordinator.planning.plan": "Plan make_plan",
    "raycloak.coordinator.runs.by_hand": "by_hand",
    "raycloak.coordinator.runs.released_model": "load",
    "raycloak.coordinator.runs.search": "tunable",
    "raycloak.coordinator.runs.trainer": "Trainer",
    "raycloak.coordinator.training.callbacks": (
        "Callback CheckpointReport EvaluationReport MeasurementReport RunEnded RunStarted"
    ),
    "raycloak.coordinator.training.hand_loop": "HandLoop",
    "raycloak.coordinator.training.reporting": "MembershipReport StepReport",
    "raycloak.workers.gradients.environment": "worker_environment",
    "raycloak.workers.inputs.datasets": "ArrayDataset Dataset",
    "raycloak.workers.inputs.descriptor": "DatasetDescriptor",
    "raycloak.workers.messages": "Admission StepRequest WorkerSetup",
    "raycloak.workers.models.model_fixes": "fix",
    "raycloak.workers.models.models": "ModelSource",
    "raycloak.workers.terms.binding": "vectors_digest",
    "raycloak.workers.terms.model_digest": "model_digest",
    "raycloak.workers.terms.receipt": "Receipt data_root",
    "raycloak.workers.train_worker": "TrainWorker",
    "raycloak.workers.vectors.payload": "Header VectorRange",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *(name for name in globals() if name.endswith("Error")), "__version__"])


def __getattr__(name: str) -> Any:
    """Import on first use, so that reading a configuration does not load torch and Ray."""
    if name not in _HOME:
        raise AttributeError(f"module 'raycloak' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
