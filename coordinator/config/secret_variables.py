"""Variables of the environment that hold secrets, and where each secret belongs instead.

Every process of a Ray cluster inherits the environment of whoever started it, and Ray keeps and shows the variables of
a job. Any process of the same user may read what a process was started with. So no secret is to be in any of them.
"""

import os
from collections.abc import Iterable

from raycloak.coordinator.config.run import RunConfig
from raycloak.metrics.errors import ConfigError

_AWS = "Put both keys into ~/.aws/credentials of each machine, mode 0600, or give the machine a role"
_AZURE = "Give each machine an identity, or log it in: az login"
_DRIVER = "Set it for the driver alone"
SECRET_VARIABLES = {
    # No secret, but a library that finds it without the other looks no further.
    "AWS_ACCESS_KEY_ID": _AWS,
    "AWS_SECRET_ACCESS_KEY": _AWS,
    "AWS_SESSION_TOKEN": _AWS,
    "AZURE_CLIENT_SECRET": _AZURE,
    "HF_TOKEN": "Use `hf auth login`",
    "HUGGING_FACE_HUB_TOKEN": "Use `hf auth login`",
    "MLFLOW_TRACKING_PASSWORD": _DRIVER,
    "MLFLOW_TRACKING_TOKEN": _DRIVER,
    "OTEL_EXPORTER_OTLP_HEADERS": _DRIVER,
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": _DRIVER,
    "PGPASSWORD": "Put the password into ~/.pgpass of the driver's machine, mode 0600",
    "RAY_AUTH_TOKEN": "Use RAY_AUTH_TOKEN_PATH and a file of mode 0600",
    "WANDB_API_KEY": "Use `wandb login`",
}
"""The variables in which the libraries of a run take secrets, and what to do instead."""


def require_none_needed(config: RunConfig) -> None:
    """Refuse a run whose actors would need a secret that only this process's environment has.

    Raises:
        ConfigError: ``secret_variable``.
    """
    needed: list[tuple[str, str]] = []
    if (config.ledger.url or "").startswith("postgres"):
        needed.append(("PGPASSWORD", "the ledger"))
    parts = (config.dataset, config.evaluation.dataset if config.evaluation else None)
    # Machines of a cluster that is there have keys of their own.
    for scheme, variable in (("s3://", "AWS_SECRET_ACCESS_KEY"), ("abfs", "AZURE_CLIENT_SECRET")):
        if not os.environ.get("RAY_ADDRESS") and any((part.path or "").startswith(scheme) for part in parts if part):
            needed.append((variable, "a worker"))
    for name, who in needed:
        if name in os.environ:
            raise _refusal(name, f"is in the environment, which is kept from Ray's processes, and {who} is one of them")


def require_none_among(names: Iterable[str], where: str) -> None:
    """Refuse secrets in a job's own variables; ConfigError ``secret_variable``."""
    for name in sorted(SECRET_VARIABLES.keys() & set(names)):
        raise _refusal(name, f"is in {where}")


def _refusal(name: str, why: str) -> ConfigError:
    """Build the error about a variable."""
    return ConfigError("secret_variable", f"{name} {why}.", f"{SECRET_VARIABLES[name]}; then unset {name}.")
