"""References of a configuration, checked before anything starts or is charged.

A configuration refers to more than data and model: sealed examples, a key service's contract, accounts, files.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.sealed.package_keys import load_recipients
from raycloak.attestation.sealed.sealed_data import SealedHeader, SealedSource, Use
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DatasetConfig, EvaluationConfig, KeyServiceConfig, ModelConfig
from raycloak.coordinator.ledger.entries import LedgerKeys
from raycloak.coordinator.ledger.location import usable_url
from raycloak.coordinator.ledger.witness import open_witness
from raycloak.metrics.errors import ConfigError, DatasetError, ProtocolError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.augmentation import Augmentation
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.descriptor import DatasetDescriptor, require_public_split, split_is_private
from raycloak.workers.inputs.file_sets import FileSet, named_places
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.hub_files import require_folder
from raycloak.workers.inputs.images import SUFFIXES as IMAGE_SUFFIXES
from raycloak.workers.inputs.images import image_classes
from raycloak.workers.inputs.named_inputs import InputSource
from raycloak.workers.inputs.user_code import require_module

_SENT_FORM = frozenset({"shape", "label_kind", "max_participations", "max_examples_per_step"})
# What a descriptor has in another form, or not at all.
_OF_CONFIG = frozenset(
    {"key_file", "features", "inputs", "labels", "classes", "size", "blocks_per_unit", "augment", *_SENT_FORM}
)
"""Fields of a section that a descriptor has as a form, or that the mechanism has."""


def preflight(config: RunConfig, base: Path) -> None:
    """Refuse a configuration that names something unusable, before anything starts or is charged.

    Guarantee: connects to nothing and writes nothing.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError: ``metric_private``, ``evaluation_not_public``, ``evaluation_private``, ``evaluation_classes``,
            ``ledger_url``, ``witness``, ``recipient`` or ``key_service``.
    """
    if config.evaluation is not None:
        require_measurable(config.evaluation)
        require_public_split(config.evaluation.dataset.kind, config.evaluation.dataset.public)
        require_apart(config, base)
        require_same_classes(config, base)
    if config.ledger.url is not None:
        usable_url(config.ledger.url)
    if config.ledger.witness is not None:
        open_witness(config.ledger.witness, LedgerKeys.of((), bytes(32))).close()
    load_recipients([base / path for path in config.checkpoint.recipients])
    given_contract(config.key_service, base)


def require_in_place(config: RunConfig, base: Path) -> None:
    """Refuse a path or a module that is not there, for a run whose workers are on this machine.

    Guarantee: opens no data, runs no code and connects to nothing.

    Raises:
        DatasetError: ``dataset_unreadable`` for the path of a dataset.
        ConfigError: ``module_function``; ``not_cached`` for the folder of a model or a tokenizer.
    """
    training, evaluation = part_of(config, "training"), part_of(config, "evaluation")
    parts = [part for part in (training, evaluation) if part is not None]
    for part in parts:
        # A built folder has a refusal of its own.
        if part.path is not None and "://" not in part.path and part.kind != "ray_data":
            places = named_places(part.path, base)
            if not places or not places[0].exists():
                missing = FileNotFoundError(2, "No such file or directory")
                error = file_error("dataset_unreadable", "read", base / part.path, missing, DatasetError)
                field = "evaluation.dataset: " if part is evaluation else ""
                raise DatasetError(error.code, f"{field}{error.message}", error.remedy)
        if part.tokenizer is not None:
            require_folder(part.tokenizer, base)
    if isinstance(config.model, ModelConfig):
        require_folder(config.model.hf, base)
    for target in named_code(config):
        require_module(target, base)


def named_code(config: RunConfig) -> list[str]:
    """Return each ``module:function`` of the configuration: model, loss, update rule, schedule, metrics and data."""
    measured = config.evaluation.metrics if config.evaluation else []
    augment = config.dataset.augment if config.dataset is not None else None
    functions = [augment.kind if augment is not None else None]
    functions += [part.function for part in (part_of(config, "training"), part_of(config, "evaluation")) if part]
    named = [config.model, config.loss, config.optimizer.name, config.optimizer.schedule, *measured, *functions]
    return [target for target in named if isinstance(target, str) and ":" in target]


def descriptor(dataset: DatasetConfig) -> DatasetDescriptor:
    """Return the descriptor that workers open, from the configuration's section."""
    given = dataset.model_dump(exclude=set(_OF_CONFIG))
    names = dataset.classes if isinstance(dataset.classes, list) else []
    return DatasetDescriptor(
        **given | {"unit": dataset.unit_name, "rows_per_unit": dataset.most_rows or 1},
        augment=None if dataset.augment is None else Augmentation(**dataset.augment.model_dump(exclude_none=True)),
        features=dataset.columns,
        labels=tuple(dataset.labels) if isinstance(dataset.labels, list) else dataset.labels,
        inputs=tuple(
            InputSource(name=name, features=each.columns(name), vocabulary=each.vocabulary, padding=each.padding)
            for name, each in sorted((dataset.inputs or {}).items())
        ),
        classes=len(names) if isinstance(dataset.classes, list) else dataset.classes,
        class_names=tuple(names),
        size=(dataset.size, dataset.size) if isinstance(dataset.size, int) else dataset.size,
        sent=sent_form(dataset),
    )


def sent_form(dataset: DatasetConfig) -> DatasetForm | None:
    """Return the form of the examples that a client sends, with the most of one step; None of other data."""
    if dataset.kind != "sent":
        return None
    assert dataset.shape is not None, "examples to be sent have a shape"
    assert dataset.max_examples_per_step is not None, "a step of sent examples has a bound"
    return DatasetForm(
        num_examples=dataset.max_examples_per_step,
        feature_shape=tuple(dataset.shape),
        feature_dtype="float32" if dataset.vocabulary is None else "int64",
        label_shape=tuple(dataset.shape) if dataset.label_kind == "token" else (),
        label_dtype="float32" if dataset.label_kind == "number" else "int64",
    )


def require_at_hand(dataset: DatasetConfig | None, what: str) -> None:
    """Require that the examples are here to be read; ConfigError ``sent_data``, if a client sends them step by step.

    Args:
        what: cannot do without them, for the refusal.
    """
    if dataset is not None and dataset.kind == "sent":
        raise ConfigError(
            "sent_data",
            f"{what} reads examples, and examples of kind sent come from a client, one step after the other.",
            "Name a dataset of another kind, or be the client of a training service that sends them.",
        )


def given_contract(config: KeyServiceConfig | None, base: Path) -> ServiceContract | None:
    """Return the contract of the data owner's key service; None if the configuration names none.

    Args:
        base: folder that a relative path starts from.

    Raises:
        ConfigError: ``key_service`` if the file is not the contract of an evidence service.
    """
    if config is None:
        return None
    path = base / config.contract if config.text is None else None
    try:
        content = path.read_bytes() if path is not None else config.contract.encode()
        contract = parse(ServiceContract, content.strip())
        _ = contract.orchestrator
    except OSError as error:
        raise file_error("key_service", "read", path or "contract", error) from None
    except (ProtocolError, ValidationError):
        raise ConfigError(
            "key_service",
            f"{path or 'the text in key_service.contract'} is not the contract of an evidence service.",
            "The owner of the data gets it from 'raycloak attest serve' and hands it over.",
        ) from None
    return contract


def sealed_terms(config: RunConfig, base: Path, use: Use = "training") -> SealedSource | None:
    """Return the terms of a run's sealed examples for ``use``; None if there are none, or they are not sealed.

    Raises:
        ConfigError: ``sealed_data`` if there are none at their path, or they are for another use or in another number
            of slices than the run's; ``evaluation_not_public``.
    """
    dataset = part_of(config, use)
    if dataset is None or dataset.kind != "sealed":
        return None
    if use == "evaluation":
        require_public_split(dataset.kind, dataset.public)
    assert dataset.path is not None, "a sealed dataset has a path"
    assert dataset.key_file is not None, "a sealed dataset has a key"
    return load_terms(base / dataset.path, base / dataset.key_file, config.slices, use)


def split_of_workers(config: RunConfig, own_metrics: Sequence[object]) -> DatasetDescriptor | None:
    """Return the split that workers may have to measure on; None where the driver does, or nobody.

    Args:
        own_metrics: given beside those that ``config`` names. All need outputs, which only the driver has, whatever the
            size of the model.
    """
    evaluation = config.evaluation
    if evaluation is None or evaluation.metrics or own_metrics:
        return None
    return descriptor(evaluation.dataset)


def evaluation_form(terms: SealedSource) -> DatasetForm:
    """Return the outline of a sealed split, from its header."""
    return DatasetForm.model_validate_json(canonical_json(terms.header.form))


def load_terms(folder: Path, key_file: Path, virtual_workers: int, use: Use) -> SealedSource:
    """Return the terms of the sealed dataset in ``folder``; ConfigError ``sealed_data`` as :func:`sealed_terms`."""
    header = SealedHeader.load(folder)
    header.require_use(use)
    if header.virtual_workers != virtual_workers:
        raise ConfigError(
            "sealed_data",
            f"{folder} is sealed in {header.virtual_workers} slices, and there are {virtual_workers} virtual workers.",
            "Seal it with the virtual_workers of the run.",
        )
    return SealedSource(header, str(key_file.resolve()))


def require_measurable(evaluation: EvaluationConfig) -> None:
    """Refuse metrics of the user's own on a split whose examples are not public.

    Guarantee: a metric of the user's own never sees a private example, nor what a model says of one.

    Raises:
        ConfigError: ``metric_private``, with the first metric named.
    """
    kept_apart = evaluation.kept == "sealed" or not evaluation.dataset.public
    if evaluation.metrics and kept_apart:
        what = "sealed" if evaluation.kept == "sealed" else "not declared public"
        raise ConfigError(
            "metric_private",
            f"the metric {evaluation.metrics[0]} has no known sensitivity, and the examples of evaluation.dataset are "
            f"{what}: no noise could protect them from it.",
            "Measure it on a public split; measurements.evaluation has F1 and accuracy of private examples.",
        )


def require_apart(config: RunConfig, base: Path) -> None:
    """Refuse a split to evaluate on that names what the run trains on with privacy.

    Guarantee: passes only if the two are not one path, also through links or from another folder, neither path is
    inside the other, and they are not one function or one part of the digits. A copy, or one more function that
    returns the same, is another name: see :func:`require_other_content`.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError: ``evaluation_private``.
    """
    trained, measured = config.dataset, part_of(config, "evaluation")
    if trained is None or measured is None or not config.dp_config.enabled:
        return
    if trained.path is not None and measured.path is not None:
        pairs = product(named_places(trained.path, base), named_places(measured.path, base))
        if any(_overlap(one, other) for one, other in pairs):
            raise split_is_private(f"{measured.path} is, or shares files with, {trained.path}")
    if trained.function is not None and trained.function == measured.function:
        raise split_is_private(f"both are {measured.function}")
    if trained.kind == measured.kind == "digits" and trained.split == measured.split:
        raise split_is_private(f"both are the {measured.split} part of the digits")


def require_same_classes(config: RunConfig, base: Path) -> None:
    """Refuse two folders of images whose classes differ: a label would have two numbers.

    Raises:
        ConfigError: ``evaluation_classes``.
        DatasetError: as `raycloak.workers.inputs.images.image_classes`.
    """
    trained, measured = config.dataset, part_of(config, "evaluation")
    if trained is None or measured is None or not trained.kind == measured.kind == "imagefolder":
        return
    if _classes(trained, base) != _classes(measured, base):
        raise ConfigError(
            "evaluation_classes",
            f"the folders of {trained.path} and {measured.path} are other classes.",
            "List all classes in both: dataset.classes and evaluation.dataset.classes.",
        )


def _classes(dataset: DatasetConfig, base: Path) -> tuple[str, ...]:
    described = descriptor(dataset)
    assert described.path is not None, "images have a path"
    return image_classes(
        FileSet(described.path, base, IMAGE_SUFFIXES, hashed=False), described.class_names, described.unit
    )


def require_other_content(config: RunConfig, base: Path, fingerprint: bytes) -> None:
    """Refuse a split to evaluate on that has the fingerprint of the data that the run trains on with privacy.

    It can be told only where both name a ``fingerprint_key``; under one key, the same examples have one fingerprint,
    in whatever order.

    Args:
        fingerprint: of the data that workers opened, as they state it; empty without a key.

    Raises:
        ConfigError: ``evaluation_private``, or as `raycloak.workers.inputs.fingerprint.data_marks`.
        DatasetError: the split cannot be read.
    """
    measured = part_of(config, "evaluation")
    if measured is None or measured.fingerprint_key is None or not config.dp_config.enabled or not fingerprint:
        return
    described = descriptor(measured)
    if data_marks(described, described.open_slices(base), base).fingerprint == fingerprint:
        raise split_is_private(f"both have the fingerprint {fingerprint.hex()}")


def _overlap(one: Path, other: Path) -> bool:
    """Return whether two paths are one file or folder, or one of them is inside the other."""
    resolved, against = one.resolve(), other.resolve()
    if resolved.is_relative_to(against) or against.is_relative_to(resolved):
        return True
    # A hard link has no path to resolve, and a file system may not tell upper from lower case.
    return resolved.exists() and against.exists() and resolved.samefile(against)


def part_of(config: RunConfig, use: Use) -> DatasetConfig | None:
    """Return the dataset that ``config`` names for ``use``."""
    if use == "training":
        return config.dataset
    return config.evaluation.dataset if config.evaluation else None
