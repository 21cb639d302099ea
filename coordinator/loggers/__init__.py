"""Loggers: each hides a tracking tool behind a callback. Their libraries are imported when a run begins, not before.

Doors: configured, mlflow_logger, tensorboard_logger, wandb_logger.

May import: `training` and the rooms below; `metrics`.
"""
