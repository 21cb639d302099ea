"""The loggers that a configuration asks for."""

from pathlib import Path

from raycloak.coordinator.config.sections import LoggersConfig
from raycloak.coordinator.loggers.logger import Logger
from raycloak.coordinator.loggers.mlflow_logger import MLflowLogger
from raycloak.coordinator.loggers.tensorboard_logger import TensorBoardLogger
from raycloak.coordinator.loggers.wandb_logger import WandbLogger


def configured_loggers(config: LoggersConfig, base: Path) -> tuple[Logger, ...]:
    """Return the loggers of a configuration; relative folders start at ``base``.

    Raises:
        ConfigError: ``logger_library``.
    """
    found: list[Logger] = []
    if config.mlflow is not None:
        found.append(MLflowLogger(**config.mlflow.model_dump()))
    if config.wandb is not None:
        found.append(WandbLogger(**config.wandb.model_dump()))
    if config.tensorboard is not None:
        folder = config.tensorboard.log_dir
        found.append(TensorBoardLogger(base / folder if folder is not None else None))
    return tuple(found)
