"""Descriptors of datasets: what travels instead of the examples; and the catalogue of the kinds of datasets.

A worker opens a descriptor itself, so the examples pass through no other process. The table `KINDS` says of each kind
what it is, which fields of a configuration it takes, and which function opens it. Configuration and reference read it
too: another kind is another row. Each reader states what the examples were read from, so no fingerprint is computed
from a path.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import AfterValidator, Field

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.sealed.sealed_data import HEADER_FILE
from raycloak.metrics.errors import ConfigError, DatasetError, ModelError, RaycloakError
from raycloak.metrics.file_errors import file_errors
from raycloak.metrics.listing import all_listed, listed
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.inputs.augmentation import Augmentation
from raycloak.workers.inputs.built_rows import PipelineIndex, built_files
from raycloak.workers.inputs.datasets import (
    ArrayDataset,
    Arrays,
    CanaryDataset,
    Dataset,
    DatasetForm,
    NamedDataset,
    SteadyDataset,
    Taken,
    dataset_form,
    named_inputs_of,
)
from raycloak.workers.inputs.file_sets import FileSet, left_out_text, written
from raycloak.workers.inputs.files import npz_rows, read_digits
from raycloak.workers.inputs.images import SUFFIXES, Channels, decoder_digest, image_classes, image_rows
from raycloak.workers.inputs.named_inputs import InputSource
from raycloak.workers.inputs.places import (
    NOWHERE,
    Places,
    file_places,
    named_function,
    part_place,
    path_place,
    written_function,
)
from raycloak.workers.inputs.rows import gathered
from raycloak.workers.inputs.sealed import SealedDataset, Slices
from raycloak.workers.inputs.sent_rows import SentSlots
from raycloak.workers.inputs.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, csv_rows, parquet_rows
from raycloak.workers.inputs.text_data import TEXT_SUFFIXES, Tokenizer, block_rows, text_rows
from raycloak.workers.inputs.token_rows import token_files, token_rows
from raycloak.workers.inputs.unit_names import units_told
from raycloak.workers.inputs.units import UnitNumbers, Units
from raycloak.workers.inputs.user_code import SEE_WHY, resolve, told
from raycloak.workers.inputs.void import void_check
from raycloak.workers.terms.mechanism import EXAMPLE, UnitTerms

# Four fifths of the 1,797 digits train; the rest is the public split.
DIGITS_TRAIN = 1437


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A dataset that this process may read.

    Attributes:
        examples: all of them; a sealed slice is refused until its key has come.
        slices: where the keys of slices go; all are open by default.
        vocabulary: public number of ids that integer features are; None if nobody says.
        tokenizer: digest of the tokenizer that made them of text, of the decoder of images and their classes, or of the
            pipeline that wrote them; empty for other data.
        file_digest: SHA-256 of the files whose bytes the examples were read from. Empty if there are none, or the
            descriptor names no ``fingerprint_key``.
        features: names of the columns or arrays that are features; empty where they have none.
        left_out: sentences about what lies beside the examples and is no part of them.
        places: of the files and functions that gave the examples.
        before_canaries: the examples that an audit added its own to; None if there was none.
        units: whose rows the examples are; None where each is a unit of its own.
    """

    examples: Dataset
    slices: Slices = field(default_factory=Slices)
    vocabulary: int | None = None
    tokenizer: bytes = b""
    file_digest: bytes = b""
    features: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    places: Places = NOWHERE
    before_canaries: Dataset | None = None
    units: Units | None = None

    @property
    def form(self) -> DatasetForm:
        """The public outline of the data; errors as `dataset_form`."""
        return dataset_form(self.examples).model_copy(update={"units": None if self.units is None else len(self.units)})

    @property
    def own_examples(self) -> Dataset:
        """The examples of the data itself, without any of an audit."""
        return self.before_canaries or self.examples

    def features_text(self, form: DatasetForm) -> str:
        """Return what the features of an example are, with the names of their columns."""
        if form.inputs:
            outline = "; ".join(f"{each.name} {list(each.shape)} {each.dtype}" for each in form.inputs)
        else:
            outline = f"{list(form.feature_shape)} {form.feature_dtype}"
        return f"{outline}: {listed(self.features)}" if self.features else outline

    @contextmanager
    def naming_features(self, form: DatasetForm) -> Iterator[None]:
        """Let the refusal of a model that does not take the features say which columns they are, and which are none."""
        try:
            yield
        except ModelError as error:
            if error.code != "model_input" or not self.features:
                raise
            named = "; ".join([f"The features are {self.features_text(form)}", *self.left_out])
            raise ModelError(error.code, f"{error.message} {named}.", error.remedy) from error


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"there is no kind of dataset '{kind}'")
    return kind


KindName = Annotated[str, AfterValidator(_known)]


class DatasetDescriptor(Message):
    """The place of a dataset, and how its examples are read.

    Attributes:
        kind: one that a configuration names, or one that none can name: an audit's ``canaries``, or ``memory``, an npz
            file that a driver wrote of examples that it was given.
        path: file, folder or pattern of examples, folder of a sealed dataset, or the file of :class:`AuditedExamples`,
            relative to the base folder or absolute.
        function: ``module:function`` without arguments that returns a :class:`Dataset`; of ``ray_data``, the pipeline
            that wrote the folder.
        split: ``train`` or ``public`` part of ``digits``.
        features: array name of npz; column names and ranges of a table, where none are all but the label. Several
            scalar columns make a vector. Column of text.
        labels: array or column name, or several of a table: a label [k].
        scale: public constant that every feature is divided by.
        vocabulary: public number N of the ids 0 .. N-1 that integer features are; None for other features and for
            text, whose tokenizer knows it.
        classes: public number of classes that labels are declared to be of.
        class_names: public list of the classes that labels name in text; empty for labels that are numbers.
        size: height and width of images.
        channels: of images, ``grey`` or ``rgb``.
        tokenizer: of text; a folder, or a name on the hub.
        max_length: T, tokens of an example of text.
        public: whether the data is declared to need no protection.
        fingerprint_key: file of the key of `raycloak.workers.inputs.fingerprint`, relative to the base folder or
        absolute.
        sent: of kind ``sent``: the form of the examples, and the most of them in one step.
        inputs: features of a model that takes several by name; ``features`` is empty then.
        allow_void: whether examples are accepted that get no gradient; see `raycloak.workers.inputs.void`.
        unit: public name of what epsilon protects as a whole, such as ``patient_id``: the column that says whose a row
            is, of kind npz the array; of images what their innermost folders are, of ``text_blocks`` a document, of a
            function's dataset what its ``unit(index)`` names. None where it is each example.
        rows_per_unit: the most rows of a unit that take part in one step.
        augment: the versions of each of them that a step computes; None where it computes the row itself.

    The last six are left out of the bytes where they say nothing.
    """

    DOMAIN: ClassVar[str] = "raycloak/dataset/v1"

    kind: KindName
    path: str | None = None
    function: str | None = None
    split: Literal["train", "public"] = "train"
    features: tuple[str, ...] = ("images",)
    labels: str | tuple[str, ...] = "labels"
    scale: float = 1.0
    vocabulary: int | None = None
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    channels: Channels = "rgb"
    tokenizer: str | None = None
    max_length: int | None = None
    public: bool = False
    fingerprint_key: str | None = None
    sent: DatasetForm | None = Field(default=None, exclude_if=lambda form: form is None)
    inputs: tuple[InputSource, ...] = Field(default=(), exclude_if=lambda inputs: not inputs)
    allow_void: bool = Field(default=False, exclude_if=lambda allowed: not allowed)
    unit: str | None = Field(default=None, exclude_if=lambda unit: unit is None)
    rows_per_unit: int = Field(default=1, ge=1, exclude_if=lambda rows: rows == 1)
    augment: Augmentation | None = Field(default=None, exclude_if=lambda versions: versions is None)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of ``labels``, one or several."""
        return (self.labels,) if isinstance(self.labels, str) else self.labels

    @property
    def unit_terms(self) -> UnitTerms:
        """The unit that epsilon protects, and how many rows of one a step computes."""
        copies = 1 if self.augment is None else self.augment.copies
        return UnitTerms(self.unit or EXAMPLE, self.rows_per_unit * copies, copies)

    def identity_digest(self) -> bytes:
        """Return a SHA-256 over all that says which data this is, but not where: a moved file is the same dataset.

        A tokenizer is known by its content, which the manifest has beside this.
        """
        return self.model_copy(update={"path": None, "fingerprint_key": None, "tokenizer": None}).digest()

    def open(self, base: Path | str) -> Dataset:
        """Open the dataset for a process that needs no keys of slices; see :meth:`open_slices`."""
        return self.open_slices(base).examples

    def open_slices(self, base: Path | str) -> OpenedDataset:
        """Open the dataset; relative paths and ``module:function`` are relative to the folder ``base``.

        Raises:
            DatasetError: ``dataset_unreadable``, ``dataset_empty``, ``dataset_lengths``, ``dataset_array``,
                ``dataset_dtype``, ``dataset_label``, ``dataset_void``, ``dataset_scratch``, ``dataset_function``,
                ``dataset_unit`` or ``data_changed``.
            ConfigError: ``module_function``, ``sealed_data``, ``images_missing``, or what
                `raycloak.workers.inputs.text_data.Tokenizer.load` raises.
            ProtocolError: ``malformed`` for the file of ``canaries``.
        """
        opened = KINDS[self.kind].reader(self, Path(base))
        places = opened.places | self.named_places(base)
        return replace(opened, places=places, vocabulary=opened.vocabulary or self.vocabulary)

    def named_places(self, base: Path | str) -> Places:
        """Return the places that the descriptor itself names; reads no file and runs no code.

        Examples that a client sends have none, nor have those of files that one run wrote for itself.
        """
        if self.kind in ("sent", "canaries", "memory"):
            return NOWHERE
        named = {part_place(self.kind, self.split)} if self.kind == "digits" else set()
        if self.path is not None:
            named.add(path_place(self.path, base))
        if self.function is not None:
            named.add(named_function(self.function, base))
        return frozenset(named)


def require_public_split(kind: str, public: bool) -> None:
    """Require that results on a split of this kind may be public; ConfigError ``evaluation_not_public``."""
    if not public:
        what = "results on it" if kind == "sealed" else "its examples"
        raise ConfigError(
            "evaluation_not_public",
            "the evaluation dataset is not declared public, so results on it would leak.",
            f"Set evaluation.dataset.public: true if {what} need no protection.",
        )


def split_is_private(why: str) -> ConfigError:
    """Return the refusal of a split whose exact results would be of private training data."""
    return ConfigError(
        "evaluation_private",
        f"evaluation.dataset is data that the run trains on with privacy: {why}.",
        "Evaluate on other data; measurements.evaluation measures the training examples with noise.",
    )


def require_nobody_in_both(trained: Units | None, measured: Units | None, unit: str | None) -> None:
    """Refuse a split with rows of a unit that is trained on; DatasetError ``unit_in_both``.

    Nothing is refused where either has no names of its units, as sealed data and data in memory have none.

    Args:
        unit: public name of what the units are.
    """
    if trained is not None and measured is not None and trained.shared_with(measured):
        raise DatasetError(
            "unit_in_both",
            f"some {unit} has rows in dataset and in evaluation.dataset, so results on the split are of trained rows.",
            f"Split the data by {unit}. 'raycloak data check' counts them, on the owner's machine.",
        )


class AuditedExamples(Message):
    """The examples that an audit adds canaries to.

    Attributes:
        base: absolute folder that ``dataset`` is opened from.
        dataset: the audited configuration's.
        included: one coin for each canary.
    """

    DOMAIN: ClassVar[str] = "raycloak/audited-examples/v1"

    base: str
    dataset: DatasetDescriptor
    included: tuple[bool, ...]


def _open_digits(descriptor: DatasetDescriptor, _: Path) -> OpenedDataset:
    features, labels = read_digits()
    # A permutation by hash is the same in every version of every library.
    order = sorted(range(len(labels)), key=lambda i: digest(length_prefixed("raycloak/digits/v1", i)))
    chosen = np.asarray(order[:DIGITS_TRAIN] if descriptor.split == "train" else order[DIGITS_TRAIN:])
    # A pixel counts up to 16, so the features are in [0, 1].
    return OpenedDataset(ArrayDataset(features[chosen].astype(np.uint8), labels[chosen], 16.0, "digits"))


def _open_module(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.function is not None, "kind module comes with a function"
    function = resolve(descriptor.function, base)
    with _function_errors(descriptor.function):
        dataset = function()
    if not isinstance(dataset, Dataset):
        raise DatasetError(
            "dataset_array",
            f"{descriptor.function} returned a {type(dataset).__name__}, not a Dataset.",
            "Return an object with __len__ and batch(ids).",
        )
    tell_unit: Any = getattr(dataset, "unit", None)
    with _function_errors(descriptor.function):
        features, _ = dataset.batch(np.empty(0, np.int64))
        if isinstance(features, Mapping):
            vocabularies = {each.name: each.vocabulary for each in descriptor.inputs}
            dataset = NamedDataset(dataset, vocabularies, descriptor.function)
        dataset_form(dataset)
        if descriptor.unit is not None and not callable(tell_unit):
            raise DatasetError(
                "dataset_unit",
                f"dataset.unit is set, and the dataset of {descriptor.function} has no unit(index).",
                "Let it return the name of the unit of the example with that id, a whole number or a text.",
            )
        units = None if descriptor.unit is None else units_told(tell_unit, len(dataset), descriptor.function).units()
    accept = void_check(descriptor, descriptor.function, Taken(inputs=named_inputs_of(dataset)))
    return OpenedDataset(SteadyDataset(dataset, accept), places=written_function(function), units=units)


@contextmanager
def _function_errors(function: str) -> Iterator[None]:
    """Turn all that a dataset of user code raises while it is opened into one DatasetError."""
    try:
        yield
    except RaycloakError:
        raise
    except Exception as error:  # noqa: BLE001 - only its type is told: its text may hold private data
        raise DatasetError(
            "dataset_function", f"the dataset of {function} fails with {type(error).__name__}.", SEE_WHY
        ) from told(error)


def _open_sealed(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    folder = _path(descriptor, base)
    dataset = SealedDataset(folder)
    sealed_by, asked = (each or EXAMPLE for each in (dataset.header.unit, descriptor.unit))
    if sealed_by != asked:
        raise ConfigError(
            "sealed_data",
            f"{folder} was sealed for runs that protect each {sealed_by} as a whole, and this one would each {asked}.",
            "Set dataset.unit to what the data was sealed for, or seal it again.",
        )
    return OpenedDataset(dataset, dataset, places=file_places([folder / HEADER_FILE]), units=dataset.units)


def _open_sent(descriptor: DatasetDescriptor, _: Path) -> OpenedDataset:
    assert descriptor.sent is not None, "examples to be sent come with a form"
    return OpenedDataset(SentSlots(descriptor.sent))


def _open_npz(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    files, taken = _files(descriptor, base, (".npz",)), _taken(descriptor)
    chunks, accept = npz_rows(files, descriptor, taken), void_check(descriptor, files.text, taken)
    examples = gathered(chunks, files.text, descriptor.scale, taken=taken, accept=accept, in_memory=True)
    return _of_files(files, examples, taken)


def _open_memory(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    opened = _open_npz(descriptor, base)
    # The file lies where a run put it, which says nothing of the data, and it numbers units without their names.
    units = None if opened.units is None else replace(opened.units, tags=None)
    return replace(opened, places=NOWHERE, units=units)


def _open_csv(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    return _table(descriptor, _files(descriptor, base, CSV_SUFFIXES), csv_rows)


def _open_parquet(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    return _table(descriptor, _files(descriptor, base, PARQUET_SUFFIXES), parquet_rows)


def _table(
    descriptor: DatasetDescriptor,
    files: FileSet,
    rows: Callable[[FileSet, DatasetDescriptor, Taken], Iterator[Arrays]],
    vocabulary: int | None = None,
) -> OpenedDataset:
    """Gather what ``rows`` reads of tables, and say which of their columns are no part of it."""
    taken = _taken(descriptor)
    accept = void_check(descriptor, files.text, taken, vocabulary)
    chunks = rows(files, descriptor, taken)
    examples = gathered(chunks, files.text, descriptor.scale, taken=taken, accept=accept)
    found = _of_files(files, examples, taken, vocabulary=vocabulary)
    return replace(found, left_out=(*taken.left_out, *found.left_out))


def _taken(descriptor: DatasetDescriptor) -> Taken:
    return Taken(units=None if descriptor.unit is None else UnitNumbers())


def _of_files(files: FileSet, examples: Dataset, taken: Taken, **known: Any) -> OpenedDataset:
    """Return examples that were read from files, with what is known of these."""
    left_out = (f"{files.text}: {left_out_text(files.left_out)}",) if files.left_out else ()
    units = None if taken.units is None else taken.units.units()
    require_bound(units is None or len(units.rows) == len(examples), "each row has a unit")
    return OpenedDataset(
        examples,
        file_digest=files.digest(),
        left_out=left_out,
        places=files.places(),
        features=taken.features,
        units=units,
        **known,
    )


def _open_built(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.function is not None, "a written folder comes with its pipeline"
    folder = _path(descriptor, base)
    index = PipelineIndex.load(folder)
    index.require_code(descriptor.function, base, folder)
    opened = _table(descriptor, built_files(folder, index), parquet_rows)
    index.require_content(opened.file_digest, folder)
    content = opened.file_digest if descriptor.fingerprint_key is not None else b""
    return replace(opened, tokenizer=index.made_by(), file_digest=content)


def _open_images(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.size is not None, "images come with a size"
    files = _files(descriptor, base, SUFFIXES)
    classes = image_classes(files, descriptor.class_names, descriptor.unit)
    decoder, taken = decoder_digest(classes), _taken(descriptor)
    rows = image_rows(files, classes, descriptor.size, descriptor.channels, taken)
    opened = _of_files(files, gathered(rows, files.text, descriptor.scale, numbers=True), taken, tokenizer=decoder)
    # A folder is its images' label, and so a part of the data.
    content, folders = opened.file_digest, (Path(name).parts[0] for name in files.names)
    bound = digest(length_prefixed("raycloak/image-folder/v1", content, *folders)) if content else b""
    return replace(opened, file_digest=bound)


def _open_tokens(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.path is not None, "tokenised text has a path"
    tokenizer = Tokenizer.load(descriptor.tokenizer, base) if descriptor.tokenizer is not None else None
    files = token_files(descriptor.path, base, descriptor.fingerprint_key is not None)
    opened = _table(descriptor, files, token_rows, tokenizer.vocabulary if tokenizer else None)
    return replace(opened, tokenizer=tokenizer.content if tokenizer else b"")


def _open_text(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.tokenizer is not None, "text comes with a tokenizer"
    tokenizer = Tokenizer.load(descriptor.tokenizer, base)
    blocks = descriptor.kind == "text_blocks"
    files = _files(descriptor, base, (".txt", ".txt.gz") if blocks else TEXT_SUFFIXES)
    rows = partial(block_rows if blocks else text_rows, tokenizer=tokenizer)
    return replace(_table(descriptor, files, rows, tokenizer.vocabulary), tokenizer=tokenizer.content)


def _files(descriptor: DatasetDescriptor, base: Path, suffixes: tuple[str, ...]) -> FileSet:
    assert descriptor.path is not None, "kinds of files and folders come with a path"
    return FileSet(descriptor.path, base, suffixes, descriptor.fingerprint_key is not None)


def _open_canaries(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    path = _path(descriptor, base)
    with file_errors("dataset_unreadable", "read", path, DatasetError):
        audited = parse(AuditedExamples, path.read_bytes())
    opened = audited.dataset.open_slices(audited.base)
    # What the data is known by stays. This process itself adds the canaries, which differ from audit to audit.
    rows_each = audited.dataset.rows_per_unit
    with_canaries = CanaryDataset(opened.examples, np.array(audited.included), rows_each)
    units = None if opened.units is None else opened.units.with_more(len(audited.included), rows_each)
    return replace(opened, examples=with_canaries, before_canaries=opened.examples, units=units)


def _path(descriptor: DatasetDescriptor, base: Path) -> Path:
    assert descriptor.path is not None, "kinds of files and folders come with a path"
    # Below the base folder a URL would be the name of another file.
    if "://" in descriptor.path:
        raise DatasetError(
            "dataset_unreadable",
            f"a dataset of kind {descriptor.kind} is read from a disk, and its path is a URL.",
            "Copy it to a disk, and name that place.",
        )
    return written(base / descriptor.path)


@dataclass(frozen=True, slots=True)
class DatasetKind:
    """A kind of dataset: a row of the catalogue.

    Attributes:
        about: what it is, in a phrase for the reference; empty for one that no configuration can name.
        reader: opens a descriptor of it; relative paths start from the folder.
        needs: fields of a configuration that it cannot do without.
        takes: fields that it may have beside them, of those that other kinds have no use for.
        refuses: fields that it may not have, of those that other kinds take; and why.
        features: names of features where a configuration has none.
        scale: what features are divided by where a configuration says nothing.
    """

    about: str
    reader: Callable[[DatasetDescriptor, Path], OpenedDataset]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ("images",)
    scale: float = 1.0


LABELS: Final = "a list of labels"
CLASSES: Final = "a list of classes"
"""Beside the names of fields: forms of ``labels`` and ``classes`` that not every kind takes."""

_UNIT: Final = ("unit", "rows_per_unit")
_TABLE: Final = ("inputs", LABELS, CLASSES, *_UNIT)
_NO_SCALE: Final = {"scale": "text has no scale"}
_TEXT: Final = {"vocabulary": "the vocabulary of text is the tokenizer's", **_NO_SCALE}
_IMAGES: Final = "images have no features or vocabulary to name"
_SEALED: Final = "a sealed dataset has no fingerprint_key or scale; apply them before sealing"
_NOT_SENT: Final = ("split", "features", "labels", "scale", "channels", "allow_void", "fingerprint_key", "augment")

KINDS: Final[Mapping[str, DatasetKind]] = {
    "digits": DatasetKind("scikit-learn's 1,797 images", _open_digits),
    "npz": DatasetKind("an archive of arrays that numpy wrote", _open_npz, ("path",), ("inputs", LABELS, *_UNIT)),
    "csv": DatasetKind("files of lines, whose first line names the columns", _open_csv, ("path",), _TABLE, features=()),
    "parquet": DatasetKind("files of columns with types", _open_parquet, ("path",), _TABLE, features=()),
    "imagefolder": DatasetKind(
        "a folder for each class",
        _open_images,
        needs=("path", "size"),
        takes=(CLASSES, *_UNIT),
        refuses={"features": _IMAGES, "vocabulary": _IMAGES},
        scale=255.0,
    ),
    "hf": DatasetKind(
        "tokenised text: a folder that ``datasets`` wrote, or parquet",
        _open_tokens,
        needs=("path", "max_length"),
        takes=("tokenizer", *_TABLE),
        refuses=_NO_SCALE,
        features=(),
    ),
    "text": DatasetKind(
        "a ``.tsv`` file of text and class number, or a parquet table",
        _open_text,
        needs=("path", "tokenizer", "max_length"),
        takes=(LABELS, CLASSES, *_UNIT),
        refuses=_TEXT,
        features=("text",),
    ),
    "text_blocks": DatasetKind(
        "files of text, each cut to blocks",
        _open_text,
        needs=("path", "tokenizer", "max_length"),
        takes=("blocks_per_unit",),
        refuses=_TEXT,
    ),
    "module": DatasetKind("what ``module:function`` returns", _open_module, ("function",), ("inputs", *_UNIT)),
    "ray_data": DatasetKind(
        "what ``raycloak data build`` wrote", _open_built, ("path", "function"), _TABLE, features=()
    ),
    "sealed": DatasetKind(
        "what ``raycloak data seal`` wrote",
        _open_sealed,
        needs=("path", "key_file"),
        takes=_UNIT,
        refuses={
            "fingerprint_key": _SEALED,
            "scale": _SEALED,
            "allow_void": "allow_void belongs to the data that is sealed: the seal has kept what it allows",
        },
    ),
    "sent": DatasetKind(
        "what a client of the training service sends, step by step",
        _open_sent,
        needs=("shape", "max_participations", "max_examples_per_step"),
        takes=("label_kind",),
        refuses={
            "public": "data that a client sends is private: send public data as a file, and register that",
            **{name: f"{name} does not belong to kind sent" for name in _NOT_SENT},
        },
    ),
    "canaries": DatasetKind("", _open_canaries),
    "memory": DatasetKind("", _open_memory),
}
"""By the name that a configuration gives."""

CONFIGURED: Final = {name: kind for name, kind in KINDS.items() if kind.about}
"""The kinds that a configuration can name."""

OF_SOME_KINDS: Final = tuple(dict.fromkeys(name for kind in KINDS.values() for name in (*kind.needs, *kind.takes)))
"""The fields that belong to the kinds which need or take them, and to no other."""

TABLES: Final = tuple(name for name, kind in KINDS.items() if kind.reader in (_open_csv, _open_parquet, _open_built))
"""The kinds with named columns of numbers."""


def kinds_with(field: str) -> str:
    """Return in words which kinds take a field that others do not, and whether they cannot do without it."""
    takers = [name for name, kind in CONFIGURED.items() if field in (*kind.needs, *kind.takes)]
    needed = [name for name in takers if field in KINDS[name].needs]
    others = [name for name in CONFIGURED if name not in takers]
    whom = f"all kinds but {all_listed(others)}" if len(others) < len(takers) else f"kind {all_listed(takers)}"
    if needed == takers:
        return f"{whom}, and is needed there"
    return f"{whom}, and is needed by kind {all_listed(needed)}" if needed else whom
