"""The public split to evaluate on, opened and checked before anything is charged.

Its examples are public, so they themselves are compared with the model, and not only their declared numbers.
"""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from torch import nn

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import Dataset, DatasetForm, dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor, require_public_split
from raycloak.workers.inputs.units import Units
from raycloak.workers.models.text_model import check_public_text


@dataclass(frozen=True, slots=True)
class PublicSplit:
    """A split whose examples, and results on it, are public.

    Attributes:
        examples: all of them.
        vocabulary: number of ids that they are declared to have, or their tokenizer has.
        classes: number of classes that they are declared to have.
        features: names of the columns that are features; empty where they have none.
        left_out: sentences about what lies beside the examples and is no part of them.
        units: whose rows they are; None where nobody says.
    """

    examples: Dataset
    vocabulary: int | None = None
    classes: int | None = None
    features: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    units: Units | None = None

    @property
    def form(self) -> DatasetForm:
        """The outline of the examples."""
        return dataset_form(self.examples)

    def require_features(self, trained: tuple[str, ...]) -> None:
        """Require the columns of the training data, in their order; DatasetError ``evaluation_form``."""
        if self.features and trained and self.features != trained:
            own, other = next((a, b) for a, b in zip_longest(self.features, trained, fillvalue="none") if a != b)
            raise DatasetError(
                "evaluation_form",
                f"evaluation.dataset has the feature '{own}' where the training data has '{other}'.",
                "Name the same columns in both: dataset.features and evaluation.dataset.features.",
            )

    def check(self, module: nn.Module, loss: str) -> None:
        """Refuse a split that a text model cannot be measured on under the run's ``loss``; as `check_public_text`."""
        check_public_text(module, self.examples, loss, self.vocabulary, self.classes)


def open_public(described: DatasetDescriptor, base: Path | str) -> PublicSplit:
    """Open a dataset that is public, as are results on it.

    Raises:
        ConfigError: ``evaluation_not_public``; or as `DatasetDescriptor.open_slices`.
        DatasetError: as `DatasetDescriptor.open_slices`.
    """
    require_public_split(described.kind, described.public)
    try:
        opened = described.open_slices(base)
    except DatasetError as error:
        # Training data is refused in the same words, for the same fields of another section.
        raise DatasetError(error.code, f"evaluation.dataset: {error.message}", error.remedy) from None
    known = opened.features, opened.left_out, opened.units
    return PublicSplit(opened.examples, opened.vocabulary, described.classes, *known)


def public_split(config: RunConfig, base: Path | str) -> PublicSplit | None:
    """Open the split that ``config`` evaluates on; None without one, or if it is sealed; errors as `open_public`."""
    if config.evaluation is None or config.evaluation.kept == "sealed":
        return None
    return open_public(descriptor(config.evaluation.dataset), base)
