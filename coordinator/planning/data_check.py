"""The check of a dataset for its owner: what would spoil a run or its promise, found before anything is charged.

`raycloak data check` is for the owner of the data, on the owner's machine. It reads every example without noise, so its
report is as private as the data. Nothing of it leaves: a run learns only that this very data passed a check.

Guarantee: a recorded check is of the data that it is found by. The record is named after the dataset's fingerprint,
which every worker computes of the bytes that it trains on, and is written only if nothing wrong was found.

Not guaranteed: that nobody wrote the record by hand. It is the owner's word to the owner's own driver.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.sealed.sealed_data import SealedSource, SliceKeys, Use, load_dataset_key
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.planning.model_source import loss_spec, model_source
from raycloak.coordinator.planning.references import descriptor, part_of, require_at_hand
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.listing import listed
from raycloak.workers.gradients.model_checks import input_errors
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.inputs.datasets import Dataset, named_inputs_of
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset
from raycloak.workers.inputs.fingerprint import check_digest, data_marks, load_key
from raycloak.workers.inputs.images import DEPTH_REMEDY, TOO_DEEP, ImageFacts
from raycloak.workers.inputs.inspection import cut_examples, images_by_name
from raycloak.workers.inputs.sealed import SealedDataset
from raycloak.workers.inputs.units import Units
from raycloak.workers.inputs.void import IGNORED, SHOWN, Limits, Voids, for_owner, void_columns
from raycloak.workers.known_answer import check_classes, found_classes
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.models import build_model, loss_function
from raycloak.workers.models.text_model import check_text

# Rows read at once: bounds the memory, and changes no finding.
_CHUNK = 1024
_HASH_BYTES = 16
# Of the rows of a unit.
_QUANTILES = (0, 0.5, 0.9, 0.99, 1)


@dataclass(frozen=True, slots=True)
class UnitReport:
    """The findings about the units whose rows the examples are, private to the data's owner.

    Attributes:
        unit: public name of what they are.
        count: N, how many there are.
        rows_per_unit: k, the most rows of one in a step.
        rows: rows of a unit: the least, the median, 90 % and 99 % of units have so many at most, the most.
        beyond: rows beyond the k of their unit, summed: those that a step leaves out, others in each.
        evaluated: units that also have rows in the evaluation split; None where its names are not known.
    """

    unit: str
    count: int
    rows_per_unit: int
    rows: tuple[int, int, int, int, int]
    beyond: int
    evaluated: int | None

    @classmethod
    def of(cls, described: DatasetDescriptor, units: Units | None, evaluated: Units | None) -> "UnitReport | None":
        """Count the rows of each unit; None where each example is a unit of its own."""
        if units is None or described.unit is None:
            return None
        sizes = units.sizes(np.arange(len(units)))
        least, median, most_have, nearly_all, most = np.quantile(sizes, _QUANTILES, method="inverted_cdf").tolist()
        return cls(
            unit=described.unit,
            count=len(units),
            rows_per_unit=described.rows_per_unit,
            rows=(least, median, most_have, nearly_all, most),
            beyond=int(np.maximum(sizes - described.rows_per_unit, 0).sum()),
            evaluated=None if evaluated is None else units.shared_with(evaluated),
        )

    def cautions(self, examples: int) -> Iterator[str]:
        """Yield what the owner should know of ``examples`` rows, in sentences."""
        if self.rows[-1] == 1:
            yield f"Every {self.unit} has one row: it protects what an example does."
        if 2 * self.rows[-1] > examples and self.count > 1:
            yield f"One {self.unit} has {self.rows[-1]:,} of {examples:,} rows, and {self.rows_per_unit} in a step."


@dataclass(frozen=True, slots=True)
class DataReport:
    """The findings of one dataset, private to its owner.

    Attributes:
        examples, feature_shape, feature_dtype, label_shape, label_dtype: its outline.
        features: names of the columns that are features; empty where they have none.
        left_out: sentences about what lies beside the examples and is no part of them.
        not_finite: examples with a NaN or infinite value among features or labels; ``not_finite_shown`` are the first
            of them, counted from 1, and ``not_finite_columns`` the columns of such features.
        label_range: least and largest label; None if none is finite.
        classes: K, labels that the model or the configuration has a place for; None if nobody says.
        labels_outside: examples with a label that is none of 0 .. K-1; ``labels_outside_shown`` are the first.
        vocabulary: N, ids that features may be; None for features that are no ids.
        ids_outside: examples with an id that is none of 0 .. N-1; ``ids_outside_shown`` are the first.
        duplicates: examples that are equal to an earlier one, label included.
        evaluation_overlap: examples whose features are also in the evaluation split; None if it has none to read.
        constant_features: positions that have one value in all examples; ``constant_shown`` are the first.
        cut: examples of text that are longer than ``max_length``; None for other data.
        turned: images with a camera's note that they are shown turned, which is ignored; None for other data.
        several_frames: images with frames or pages beyond the first, which are left out; None for other data.
        allow_void: whether the owner lets a run train on the void ones.
        units: of data that names them; None where each example is a unit of its own.
    """

    examples: int
    feature_shape: tuple[int, ...]
    feature_dtype: str
    label_shape: tuple[int, ...]
    label_dtype: str
    features: tuple[str, ...]
    left_out: tuple[str, ...]
    not_finite: int
    not_finite_shown: tuple[int, ...]
    not_finite_columns: tuple[str, ...]
    label_range: tuple[float, float] | None
    classes: int | None
    labels_outside: int
    labels_outside_shown: tuple[int, ...]
    vocabulary: int | None
    ids_outside: int
    ids_outside_shown: tuple[int, ...]
    duplicates: int
    evaluation_overlap: int | None
    constant_features: int
    constant_shown: tuple[int, ...]
    cut: int | None
    turned: int | None
    several_frames: int | None
    allow_void: bool
    units: UnitReport | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what a run must not train on, in sentences."""
        units = self.units
        in_both: tuple[str, ...] = ()
        if units is not None and units.evaluated:
            in_both = (f"Of {units.unit} with rows in both splits: {units.evaluated:,}. Split the data by it.",)
        return in_both if self.allow_void else (*self._voids, *in_both)

    @property
    def _voids(self) -> tuple[str, ...]:
        columns = f" in {listed(self.not_finite_columns)}" if self.not_finite_columns else ""
        ids = "its vocabulary" if self.vocabulary is None else f"0 .. {self.vocabulary - 1}"
        found = (
            (self.not_finite, f"with a value that is NaN or infinite{columns}"),
            (self.labels_outside, f"with a label outside 0 .. {(self.classes or 0) - 1}"),
            (self.ids_outside, f"with an id outside {ids}"),
        )
        return tuple(f"Examples {what}: {count:,}. They would get no gradient." for count, what in found if count)

    @property
    def cautions(self) -> tuple[str, ...]:
        """Return what the owner should know, in sentences."""
        allowed = tuple(f"{each} dataset.allow_void accepts them." for each in self._voids) if self.allow_void else ()
        found = (
            (self.duplicates, "Examples that equal an earlier one", "A person behind several is protected less."),
            (self.evaluation_overlap, "Examples that are evaluated on too", "Results on them are exact and public."),
            (self.constant_features, "Features with one value in all examples", "Nothing is learned from them."),
            (self.cut, "Texts beyond max_length", "They are cut."),
            (self.turned, "Images with an EXIF tag that turns them", "The tag is ignored: they are read as they lie."),
            (self.several_frames, "Images of several frames or pages", "The first is read, the others are left out."),
        )
        said = tuple(f"{what}: {count:,}. {so}" for count, what, so in found if count)
        of_units = () if self.units is None else self.units.cautions(self.examples)
        return (*allowed, *said, *of_units, *(f"The data: {each}." for each in self.left_out))


@dataclass(frozen=True, slots=True)
class Checked:
    """A report, and what it was recorded under.

    Attributes:
        features: what an example's features are.
        fingerprint: of the data; empty without a key.
        digest: of the report, keyed as the fingerprint is; empty unless the check was recorded.
    """

    report: DataReport
    features: str
    fingerprint: bytes
    digest: bytes


@for_owner()
def check_data(config: RunConfig, base: Path) -> Checked:
    """Read every example that ``config`` trains on; record the check if nothing wrong was found.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError, DatasetError, ModelError: data, model or evaluation split cannot be opened.
    """
    dataset = config.dataset
    if dataset is None:
        raise ConfigError("config", "a check needs a dataset.", "Name it in the configuration.")
    require_at_hand(dataset, "a check")
    described = descriptor(dataset)
    images = images_by_name(described, base)
    _require_read(images)
    opened = _open_for_owner(config, base, "training")
    assert opened is not None, "the configuration names a dataset"
    classes, vocabulary = _limits(config, base, opened)
    limits = Limits(classes, vocabulary, named_inputs_of(opened.examples))
    findings = _scanned(opened.examples, limits, opened.features)
    split = _open_for_owner(config, base, "evaluation")
    overlap = None
    if split is not None:
        evaluated = [_hashes(features.reshape(len(features), -1)) for features, _ in _chunks(split.examples)]
        overlap = int(np.isin(findings.features, np.concatenate(evaluated)).sum())
    form = opened.form
    report = DataReport(
        examples=form.num_examples,
        feature_shape=form.feature_shape,
        feature_dtype=form.feature_dtype,
        label_shape=form.label_shape,
        label_dtype=form.label_dtype,
        features=opened.features,
        left_out=opened.left_out,
        not_finite=len(findings.not_finite),
        not_finite_shown=tuple(findings.not_finite[:SHOWN].tolist()),
        not_finite_columns=findings.columns,
        label_range=findings.label_range,
        classes=classes,
        labels_outside=len(findings.labels),
        labels_outside_shown=tuple(findings.labels[:SHOWN].tolist()),
        vocabulary=vocabulary,
        ids_outside=len(findings.ids),
        ids_outside_shown=tuple(findings.ids[:SHOWN].tolist()),
        duplicates=form.num_examples - len(np.unique(findings.rows)),
        evaluation_overlap=overlap,
        constant_features=len(findings.constant),
        constant_shown=tuple(findings.constant[:SHOWN].tolist()),
        cut=cut_examples(described, base),
        turned=sum(each.turned for each in images.values()) if images else None,
        several_frames=sum(each.several for each in images.values()) if images else None,
        allow_void=dataset.allow_void,
        units=UnitReport.of(described, opened.units, None if split is None else split.units),
    )
    fingerprint = data_marks(described, opened, base).fingerprint
    recorded = _recorded(dataset, base, report, fingerprint)
    return Checked(report, opened.features_text(form), fingerprint, recorded)


def recorded_check(fingerprint: bytes) -> str | None:
    """Return the digest of the check that the data of ``fingerprint`` passed; None if none is recorded here."""
    if not fingerprint:
        return None
    path = home.check_file(fingerprint)
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error("data_check", "read", path, error) from None


def _recorded(part: DatasetConfig, base: Path, report: DataReport, fingerprint: bytes) -> bytes:
    """Record the check, and return its digest; empty where there is a problem, or no fingerprint to find it by."""
    if report.problems or not fingerprint:
        return b""
    if part.key_file is not None:
        key = load_dataset_key(base / part.key_file)
    else:
        assert part.fingerprint_key is not None, "a fingerprint has a key"
        key = load_key(base / part.fingerprint_key)
    content = asdict(report)
    if report.units is None:
        # Of data without units the digest is what it was before there were any.
        del content["units"]
    found = check_digest(key, hashlib.sha256(canonical_json(content)).digest())
    path = home.check_file(fingerprint)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(found.hex() + "\n", encoding="utf-8")
    except OSError as error:
        raise file_error("data_check", "write", path, error) from None
    return found


def _require_read(images: Mapping[str, ImageFacts]) -> None:
    """Name the images that are not read, by what is wrong with them: on the owner's machine, and only here."""
    faulty = {name: each.fault for name, each in images.items() if each.fault}
    if not faulty:
        return
    said = []
    for why in dict.fromkeys(faulty.values()):
        names = [name for name, each in faulty.items() if each == why]
        said.append(f"each of these {why}: {listed(names, SHOWN)}")
    remedy = f" {DEPTH_REMEDY}" if TOO_DEEP in faulty.values() else ""
    raise DatasetError("dataset_unreadable", f"{'; '.join(said)}.", f"Remove or replace them.{remedy}")


def _open_for_owner(config: RunConfig, base: Path, use: Use) -> OpenedDataset | None:
    """Open the examples for a use, sealed ones with the owner's key; None if there are none."""
    part = part_of(config, use)
    if part is None:
        return None
    if part.kind != "sealed":
        # Void examples are counted, and not refused at the first.
        return descriptor(part).model_copy(update={"allow_void": True}).open_slices(base)
    assert part.path is not None, "a sealed dataset has a path"
    assert part.key_file is not None, "a sealed dataset has a key"
    examples = SealedDataset(base / part.path, use)
    keys = SliceKeys.open(SealedSource(examples.header, str(base / part.key_file)), use)
    examples.unlock({v: keys.of(v) for v in range(examples.header.virtual_workers)})
    return OpenedDataset(examples, examples, vocabulary=part.vocabulary, units=examples.units)


def _limits(config: RunConfig, base: Path, opened: OpenedDataset) -> tuple[int | None, int | None]:
    """Return the numbers of classes and of ids that the run has a place for."""
    assert config.dataset is not None, "it was opened"
    declared = descriptor(config.dataset).classes
    form, vocabulary = opened.form, opened.vocabulary
    if config.model is None or form.label_dtype != "int64":
        return (declared if form.label_dtype == "int64" else None), vocabulary
    module = fed_by_name(build_model(model_source(config.model), base, config.seed), form.inputs)
    vocabulary = check_text(module, form, config.loss_name, vocabulary, declared)
    loss = RowLoss(loss_function(loss_spec(config.loss), base)[0])
    with opened.naming_features(form), input_errors(form):
        check_classes(module, config.loss_name, opened.examples, declared, vocabulary, deterministic=False)
        shown = found_classes(module, loss, opened.examples, vocabulary, deterministic=False)
    return declared or shown, vocabulary


@dataclass(frozen=True, slots=True)
class _Findings:
    """The findings of one pass over the examples.

    Attributes:
        rows, features: hashes of examples and of their features alone, [n, 16] bytes as one item each.
        not_finite, labels, ids: numbers of the examples with such a fault, from 1.
        constant: positions of features that have one value.
    """

    rows: NDArray[np.void]
    features: NDArray[np.void]
    not_finite: NDArray[np.int64]
    labels: NDArray[np.int64]
    ids: NDArray[np.int64]
    columns: tuple[str, ...]
    label_range: tuple[float, float] | None
    constant: NDArray[np.int64]


def _scanned(dataset: Dataset, limits: Limits, names: Sequence[str]) -> _Findings:
    rows, hashes = [], []
    voids: list[Voids] = []
    least, largest = np.inf, -np.inf
    first = varied = None
    columns: dict[str, None] = {}
    for features, labels in _chunks(dataset):
        flat, targets = features.reshape(len(features), -1), labels.reshape(len(labels), -1)
        hashes.append(_hashes(flat))
        rows.append(_hashes(flat, targets))
        voids.append(Voids.of(features, labels, limits))
        if voids[-1].not_finite.any():
            columns |= dict.fromkeys(void_columns(features, limits, names))
        first = flat[0] if first is None else first
        # Compared by bits: NaN in all examples is constant too.
        changed = (flat.view(f"u{flat.itemsize}") != first.view(f"u{flat.itemsize}")).any(0)
        varied = changed if varied is None else varied | changed
        counted = targets[np.isfinite(targets) & ((targets != IGNORED) | (labels.ndim == 1))]
        if counted.size:
            least, largest = min(least, float(counted.min())), max(largest, float(counted.max()))
    assert varied is not None, "a dataset has examples"
    return _Findings(
        rows=np.concatenate(rows),
        features=np.concatenate(hashes),
        not_finite=_numbers(each.not_finite for each in voids),
        labels=_numbers(each.labels for each in voids),
        ids=_numbers(each.ids for each in voids),
        columns=tuple(columns),
        label_range=(least, largest) if least <= largest else None,
        constant=np.flatnonzero(~varied) if len(dataset) > 1 else np.empty(0, np.int64),
    )


def _numbers(marks: Iterable[NDArray[np.bool_]]) -> NDArray[np.int64]:
    return np.flatnonzero(np.concatenate(list(marks))) + 1


def _chunks(dataset: Dataset) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    for start in range(0, len(dataset), _CHUNK):
        yield dataset.batch(np.arange(start, min(start + _CHUNK, len(dataset)), dtype=np.int64))


def _hashes(*parts: NDArray[np.float32]) -> NDArray[np.void]:
    """Return a hash for each row of the parts together, 16 bytes: a billion rows collide at odds of 1 in 10^20."""
    found = bytearray()
    for row in zip(*(np.ascontiguousarray(part) for part in parts), strict=True):
        hashed = hashlib.blake2b(digest_size=_HASH_BYTES)
        for piece in row:
            hashed.update(piece)
        found += hashed.digest()
    return np.frombuffer(bytes(found), np.dtype((np.void, _HASH_BYTES)))
