"""The sealed examples that a run's configuration names: what the orchestrator and the workers are told of them."""

from pathlib import Path

from attestation.canonical import canonical_json
from attestation.sealed_data import SealedHeader, SealedTerms, Use
from coordinator.config import RunConfig
from coordinator.config_sections import DatasetConfig
from metrics.errors import ConfigError
from workers.datasets import DatasetForm


def sealed_terms(config: RunConfig, base: Path, use: Use = "training") -> SealedTerms | None:
    """What the orchestrator needs of a run's sealed examples for ``use``; None if those are not sealed, or not there.

    Raises:
        ConfigError: ``sealed_data`` if there are none at their path, or they are for another use or in another number
            of slices than the run's; ``evaluation_not_public``.
    """
    dataset = part_of(config, use)
    if dataset is None or dataset.kind != "sealed":
        return None
    if use == "evaluation":
        require_public(dataset.kind, dataset.public)
    assert dataset.path is not None, "a sealed dataset has a path"
    assert dataset.key_file is not None, "a sealed dataset has a key"
    return load_terms(base / dataset.path, base / dataset.key_file, config.virtual_workers, use)


def evaluation_folder(config: RunConfig) -> str | None:
    """Where the workers find the sealed evaluation split; None if the run has none."""
    dataset = part_of(config, "evaluation")
    return dataset.path if dataset is not None and dataset.kind == "sealed" else None


def evaluation_form(terms: SealedTerms) -> DatasetForm:
    """The outline of a sealed split, from its header."""
    return DatasetForm.model_validate_json(canonical_json(terms.header.form))


def load_terms(folder: Path, key_file: Path, virtual_workers: int, use: Use) -> SealedTerms:
    """The terms of the sealed dataset in ``folder``; ConfigError ``sealed_data`` as :func:`sealed_terms`."""
    header = SealedHeader.load(folder)
    header.require_use(use)
    if header.virtual_workers != virtual_workers:
        raise ConfigError(
            "sealed_data",
            f"{folder} is sealed in {header.virtual_workers} slices, and there are {virtual_workers} virtual workers.",
            "Seal it with the virtual_workers of the run.",
        )
    return SealedTerms(header, str(key_file.resolve()))


def require_public(kind: str, public: bool) -> None:
    """ConfigError ``evaluation_not_public`` unless results on a dataset of this kind may be shown to everybody."""
    if not public:
        what = "results on it" if kind == "sealed" else "its examples"
        raise ConfigError(
            "evaluation_not_public",
            "the evaluation dataset is not declared public, so results on it would leak.",
            f"Set evaluation.dataset.public: true if {what} need no protection.",
        )


def part_of(config: RunConfig, use: Use) -> DatasetConfig | None:
    """The dataset that ``config`` names for ``use``."""
    if use == "training":
        return config.dataset
    return config.evaluation.dataset if config.evaluation else None
