"""The settings of `raycloak serve`: what the operator decides, and how a client's configuration becomes a run's."""

from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from raycloak.attestation.files.yaml_reader import read_yaml
from raycloak.coordinator.client.connection import is_loopback
from raycloak.coordinator.client.training_config import TrainingConfig, parse_training_config
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.section import Section, problem_of, validated
from raycloak.coordinator.config.sections import (
    Address,
    DatasetConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    Place,
)
from raycloak.coordinator.service.limits import LimitsConfig
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.service_errors import (
    ServiceError,
    ServiceNotFoundError,
    ServicePermissionError,
    ServiceValidationError,
)
from raycloak.workers.inputs.user_code import require_module

# The key service of registered data is its owner's, and so the operator's to name.
NOT_THE_SERVICES: Final = frozenset(TrainingConfig.model_fields) - {"metadata", "key_service"} | {
    "evaluation",
    "batch_size_per_worker",
}
"""Fields of a run that ``run`` may not have: a client or a registered dataset gives them."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=64)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TlsConfig(Section):
    """The service's certificate and key in PEM, relative to the settings' file.

    Attributes:
        client_ca: certificates that every client's own certificate must be signed by; without it, clients have none.
    """

    certificate: str
    key: str
    client_ca: str | None = None


class RegisteredDataset(Section):
    """A dataset that clients know by its name alone.

    Attributes:
        account: that pays for runs on it. If absent, the account of the data, with the cap of the client that was the
            first to train on it: only where clients are on this machine, or the data is public.
    """

    dataset: DatasetConfig
    evaluation: EvaluationConfig | None = None
    account: str | None = None

    @field_validator("dataset")
    @classmethod
    def _not_sent(cls, dataset: DatasetConfig) -> DatasetConfig:
        if str(dataset.kind) == "sent":
            raise ValueError("kind sent is a client's to configure, and is not registered")
        return dataset


class TokenConfig(Section):
    """A token of which only the hash is known.

    Attributes:
        sha256: SHA-256 of the token, as `raycloak serve --token` printed it. Only a token with 256 random bits is safe
            under a plain hash.
        expires: when it ends, in UTC; never if absent.
    """

    sha256: Hash
    expires: datetime | None = None

    @field_validator("expires")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class TenantConfig(Section):
    """A tenant: how it is recognised, and what it may use.

    Attributes:
        certificates: common names of its client certificates.
        datasets, models: registered names.
        code: ``module:function`` names that its configurations may have; they run in attested workers.
        key_services: addresses of the data owners' key services that its runs may ask.
        account: that pays for data which its clients send; the tenant's name if absent.
    """

    token_sha256: list[TokenConfig] = Field(default_factory=list)
    certificates: list[str] = Field(default_factory=list)
    datasets: list[Name] = Field(default_factory=list)
    models: list[Name] = Field(default_factory=list)
    code: list[str] = Field(default_factory=list)
    key_services: list[Address] = Field(default_factory=list)
    account: Name | None = None

    @model_validator(mode="after")
    def _can_be_recognised(self) -> Self:
        if not self.token_sha256 and not self.certificates:
            raise ValueError("a tenant needs token_sha256 or certificates")
        return self


class ServiceSettings(Section):
    """The settings of a service.

    Attributes:
        bind: ``host:port``; port 0 takes a free one.
        tls: required unless ``bind`` is a loopback address.
        store: ``postgresql://...``; without a password; SQLite in the state folder if absent.
        run: fields of a run that the service decides for all clients.
        models: ``hf`` models, or ``module:function`` names, that clients know by a name.
    """

    bind: Address
    tls: TlsConfig | None = None
    store: Annotated[Place, Field(min_length=1)] | None = None
    run: dict[str, Any] = Field(default_factory=dict)
    datasets: dict[Name, RegisteredDataset] = Field(default_factory=dict)
    models: dict[Name, ModelConfig | str] = Field(default_factory=dict)
    tenants: dict[Name, TenantConfig] = Field(min_length=1)
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _safe_elsewhere(self) -> Self:
        if self.tls is None and not is_loopback(self.bind):
            raise ValueError("tls is required, since bind is not a loopback address: tokens and results leave here")
        if any(tenant.certificates for tenant in self.tenants.values()) and (
            self.tls is None or self.tls.client_ca is None
        ):
            raise ValueError("certificates of tenants need tls.client_ca, which says who may sign them")
        for name, each in self.datasets.items():
            if each.account is None and not each.dataset.public and not is_loopback(self.bind):
                raise ValueError(f"datasets.{name}.account: name an open account, or clients choose its cap")
        return self

    @model_validator(mode="after")
    def _run_of_the_service(self) -> Self:
        for field in sorted(self.run):
            if field in NOT_THE_SERVICES:
                raise ValueError(f"run.{field} is for a client or a registered dataset to give")
        # Completed by what a client gives at least, so that a wrong field is found before a client meets it.
        sample = {"dataset": {"kind": "digits"}, "model": "module:function", "expected_batch_size": 1.0}
        budget = {"dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 1.0}}
        try:
            RunConfig.model_validate({**self.run, **sample, **budget})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"run.{place}: {problem_of(RunConfig, place, first)}") from None
        return self

    @model_validator(mode="after")
    def _names_are_registered(self) -> Self:
        seen: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for what in ("datasets", "models"):
                if missing := sorted(set(getattr(tenant, what)) - set(getattr(self, what))):
                    raise ValueError(f"tenants.{name}.{what}: there is no {missing[0]} in {what}")
            for each in (*(token.sha256 for token in tenant.token_sha256), *tenant.certificates):
                if each in seen:
                    raise ValueError(f"tenants.{name} and tenants.{seen[each]} share a token or a certificate")
                seen[each] = name
        return self


def load_settings(path: Path) -> ServiceSettings:
    """Read the settings' file; ConfigError ``config`` with every wrong field named."""
    return validated(ServiceSettings, read_yaml(path, "config"), "docs/service.md")


def require_modules(settings: ServiceSettings, base: Path) -> None:
    """Require that the modules of all registered functions are there, and import none of them.

    Args:
        base: folder that ``module:function`` names start from.

    Raises:
        ConfigError: ``module_function``, with the field that names the function.
    """
    named = {f"models.{name}": each for name, each in settings.models.items() if isinstance(each, str)}
    for name, tenant in settings.tenants.items():
        named |= {f"tenants.{name}.code[{index}]": each for index, each in enumerate(tenant.code)}
    for field, function in named.items():
        try:
            require_module(function, base)
        except ConfigError as error:
            raise ConfigError(error.code, f"{field}: {error.message}", error.remedy) from None


def completed(settings: ServiceSettings, tenant: str, config_json: str) -> tuple[TrainingConfig, RunConfig]:
    """Return a client's configuration, and the run that it becomes under the settings.

    Raises:
        ServiceValidationError: with the wrong field.
        ServiceNotFoundError: a dataset or model that the tenant may not use, or that does not exist.
        ServicePermissionError: code that the tenant may not run.
    """
    training = parse_training_config(config_json)
    raw = training.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    rights = settings.tenants[tenant]
    functions = {
        "model": training.model,
        "loss": training.loss,
        "optimizer.name": training.optimizer.name,
        "optimizer.schedule": training.optimizer.schedule,
    }
    for field, name in functions.items():
        if isinstance(name, str) and ":" in name and name not in rights.code:
            raise ServicePermissionError(
                "code", f"{field}: this tenant may not run '{name}'.", "Ask the operator to list it in code."
            )
    raw["model"] = _model(settings, rights, training, raw)
    raw.pop("lora", None)
    if training.optimizer.averaged_weights:
        raise ServiceValidationError(
            "config",
            "optimizer.averaged_weights: a service samples the weights of a step, and no average of them.",
            "Leave it out, or train without a service.",
            field="optimizer.averaged_weights",
        )
    if raw.get("loss") is None:
        raw.pop("loss", None)
    account = rights.account or tenant
    if training.key_service is not None and training.key_service.address not in rights.key_services:
        message = f"key_service.address: runs of this tenant may not ask '{training.key_service.address}'."
        raise ServicePermissionError("key_service", message, "Ask the operator to list it in key_services.")
    if isinstance(training.dataset, str):
        if training.dataset not in rights.datasets:
            raise _not_found("dataset", training.dataset)
        registered = settings.datasets[training.dataset]
        raw["dataset"] = registered.dataset.model_dump(mode="json", exclude_unset=True)
        if registered.evaluation is not None:
            raw["evaluation"] = registered.evaluation.model_dump(mode="json", exclude_unset=True)
        account = registered.account or ""
    if account:
        raw["ledger"] = {**settings.run.get("ledger", {}), "account": account}
    try:
        return training, RunConfig.model_validate({**settings.run, **raw})
    except ValidationError as error:
        found = [
            (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in error.errors()
        ]
        said = "; ".join(f"{field}: {problem}" if field else problem for field, problem in found)
        # A refusal of the whole begins with its field.
        first = found[0][1].partition(":")[0].partition(" ")[0]
        named = first if first.partition(".")[0] in RunConfig.model_fields else ""
        field = found[0][0] or named
        raise ServiceValidationError("config", f"{said}.", "See docs/service.md.", field=field) from None


def withdrawn(settings: ServiceSettings, tenant: str, config_json: str) -> ServiceError | None:
    """Return why the settings, which may have changed, no longer let a tenant train a client that it has; else None."""
    try:
        completed(settings, tenant, config_json)
    except (ServicePermissionError, ServiceNotFoundError) as refusal:
        return refusal
    except ServiceValidationError:
        pass  # fields of the service have changed, and its run is as it was planned
    return None


def _model(settings: ServiceSettings, rights: TenantConfig, training: TrainingConfig, raw: dict[str, Any]) -> Any:
    """Return the model of a run: a registered one, with the client's adapter, or a function of the tenant's code."""
    given = training.model
    if isinstance(given, str) and ":" in given:
        return given
    if isinstance(given, str):
        if given not in rights.models:
            raise _not_found("model", given)
        found = settings.models[given]
        model = found if isinstance(found, str) else found.model_dump(mode="json", exclude_unset=True)
    else:
        assert given is not None, "a TrainingConfig has a model"
        # A folder of the service's machines, or code that comes with a model, is the operator's to name.
        source = attrgetter("hf", "revision", "allow_remote_code")
        permitted = [settings.models[name] for name in rights.models]
        if not any(isinstance(each, ModelConfig) and source(each) == source(given) for each in permitted):
            raise _not_found("model", given.hf)
        model = dict(raw["model"])
    if raw.get("lora") is not None:
        if isinstance(model, str):
            raise ServiceValidationError(
                "config", "lora: the registered model is a function, which adds its own adapter.", field="lora"
            )
        model["lora"] = raw["lora"]
    return model


def _not_found(resource: str, name: str) -> ServiceNotFoundError:
    message = f"this tenant has no {resource} '{name}'."
    remedy = f"ServiceClient.capabilities().{resource}s has their names."
    return ServiceNotFoundError("not_found", message, remedy, resource=resource)
