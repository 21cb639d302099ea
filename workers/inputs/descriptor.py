"""Descriptors of datasets: what travels instead of the examples, and how each kind is opened.

A worker opens a descriptor itself, so the examples pass through no other process. One table, ``_OPENERS``, says which
function opens which kind. Each states what the examples were read from, so no fingerprint is computed from a path.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.sealed.sealed_data import HEADER_FILE
from raycloak.metrics.errors import DatasetError, ModelError, RaycloakError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.built_rows import PipelineIndex, built_files
from raycloak.workers.inputs.canaries import CanaryDataset
from raycloak.workers.inputs.columns import Columns
from raycloak.workers.inputs.datasets import (
    ArrayDataset,
    Arrays,
    Dataset,
    DatasetForm,
    NamedDataset,
    SteadyDataset,
    Taken,
    dataset_form,
    named_inputs_of,
)
from raycloak.workers.inputs.file_sets import FileSet, left_out_text, require_unpacked, written
from raycloak.workers.inputs.files import open_examples, read_digits, read_npz
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
from raycloak.workers.inputs.rows import Accept, checked, gathered
from raycloak.workers.inputs.sealed import ClearSlices, SealedDataset, SliceLocks
from raycloak.workers.inputs.sent_slots import SentSlots
from raycloak.workers.inputs.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, csv_rows, parquet_rows
from raycloak.workers.inputs.text_data import Tokenizer, read_blocks, read_texts
from raycloak.workers.inputs.token_rows import TokenColumns, token_files, token_rows
from raycloak.workers.inputs.user_code import SEE_WHY, resolve, told
from raycloak.workers.inputs.void import Limits, refuse_void

DatasetKind = Literal[
    "digits",
    "npz",
    "csv",
    "parquet",
    "imagefolder",
    "hf",
    "text",
    "text_blocks",
    "module",
    "ray_data",
    "sealed",
    "sent",
    "canaries",
    "memory",
]

# Four fifths of the 1,797 digits train; the rest is the public split.
DIGITS_TRAIN = 1437


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A dataset that this process may read.

    Attributes:
        examples: all of them; a sealed slice is refused until its key has come.
        slices: where the keys of slices go.
        vocabulary: public number of ids that integer features are; None if nobody says.
        tokenizer: digest of the tokenizer that made them of text, of the decoder of images and their classes, or of the
            pipeline that wrote them; empty for other data.
        file_digest: SHA-256 of the files whose bytes the examples were read from. Empty if there are none, or the
            descriptor names no ``fingerprint_key``.
        features: names of the columns or arrays that are features; empty where they have none.
        left_out: sentences about what lies beside the examples and is no part of them.
        places: of the files and functions that gave the examples.
        before_canaries: the examples that an audit added its own to; None if there was none.
    """

    examples: Dataset
    slices: SliceLocks
    vocabulary: int | None = None
    tokenizer: bytes = b""
    file_digest: bytes = b""
    features: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    places: Places = NOWHERE
    before_canaries: Dataset | None = None

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

    The last three are left out of the bytes where they say nothing.
    """

    DOMAIN: ClassVar[str] = "raycloak/dataset/v1"

    kind: DatasetKind
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

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of ``labels``, one or several."""
        return (self.labels,) if isinstance(self.labels, str) else self.labels

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
                ``dataset_dtype``, ``dataset_label``, ``dataset_void``, ``dataset_scratch``, ``dataset_function`` or
                ``data_changed``.
            ConfigError: ``module_function``, ``sealed_data``, ``images_missing``, or what
                `raycloak.workers.inputs.text_data.Tokenizer.load` raises.
            ProtocolError: ``malformed`` for the file of ``canaries``.
        """
        opened = _OPENERS[self.kind](self, Path(base))
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
    return _clear(ArrayDataset(features[chosen].astype(np.uint8), labels[chosen], 16.0, "digits"))


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
    with _function_errors(descriptor.function):
        features, _ = dataset.batch(np.empty(0, np.int64))
        if isinstance(features, Mapping):
            vocabularies = {each.name: each.vocabulary for each in descriptor.inputs}
            dataset = NamedDataset(dataset, vocabularies, descriptor.function)
        dataset_form(dataset)
    accept = void_check(descriptor, descriptor.function, Taken(inputs=named_inputs_of(dataset)))
    return replace(_clear(SteadyDataset(dataset, accept)), places=written_function(function))


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
    dataset = SealedDataset(_path(descriptor, base))
    return OpenedDataset(dataset, dataset, places=file_places([_path(descriptor, base) / HEADER_FILE]))


def _open_sent(descriptor: DatasetDescriptor, _: Path) -> OpenedDataset:
    assert descriptor.sent is not None, "examples to be sent come with a form"
    return _clear(SentSlots(descriptor.sent))


def _open_npz(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    path, taken = _path(descriptor, base), Taken()
    file, file_digest = open_examples(path, hashed=descriptor.fingerprint_key is not None)
    with file:
        require_unpacked(file, str(path), may_be_zip=True)
        features, labels = read_npz(file, path, descriptor.features, descriptor.label_names, descriptor.inputs, taken)
    examples = ArrayDataset(features, labels, descriptor.scale, str(path), named_inputs=taken.inputs)
    checked(examples, void_check(descriptor, str(path), taken))
    places = NOWHERE if descriptor.kind == "memory" else file_places([path])
    return OpenedDataset(examples, ClearSlices(), file_digest=file_digest, features=taken.features, places=places)


def _open_table(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    suffixes, rows = (CSV_SUFFIXES, csv_rows) if descriptor.kind == "csv" else (PARQUET_SUFFIXES, parquet_rows)
    files = _files(descriptor, base, suffixes)
    return replace(_table(descriptor, files, rows), file_digest=files.digest(), places=files.places())


def _table(
    descriptor: DatasetDescriptor, files: FileSet, rows: Callable[[FileSet, Columns, Taken], Iterator[Arrays]]
) -> OpenedDataset:
    """Read a table by ``rows``, and say which of its columns and files are no part of it."""
    taken = Taken()
    columns = Columns(
        descriptor.features,
        descriptor.label_names,
        descriptor.class_names,
        descriptor.vocabulary,
        descriptor.inputs,
        descriptor.allow_void,
    )
    accept = void_check(descriptor, files.text, taken)
    examples = gathered(rows(files, columns, taken), files.text, descriptor.scale, taken=taken, accept=accept)
    left_out = (*taken.left_out, *_files_left_out(files))
    return OpenedDataset(examples, ClearSlices(), features=taken.features, left_out=left_out)


def _files_left_out(files: FileSet) -> tuple[str, ...]:
    return (f"{files.text}: {left_out_text(files.left_out)}",) if files.left_out else ()


def void_check(descriptor: DatasetDescriptor, name: str, taken: Taken, vocabulary: int | None = None) -> Accept | None:
    """Return the check of what a reader gives; None where the owner of the data allows void examples."""
    if descriptor.allow_void:
        return None

    def accept(features: NDArray[Any], labels: NDArray[Any]) -> None:
        limits = Limits(descriptor.classes, vocabulary or descriptor.vocabulary, taken.inputs)
        refuse_void(features, labels, limits, name, taken.features)

    return accept


def _open_built(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.function is not None, "a written folder comes with its pipeline"
    folder = _path(descriptor, base)
    index = PipelineIndex.load(folder)
    index.require_code(descriptor.function, base, folder)
    files = built_files(folder, index)
    opened = _table(descriptor, files, parquet_rows)
    index.require_content(files.digest(), folder)
    content = files.digest() if descriptor.fingerprint_key is not None else b""
    return replace(opened, tokenizer=index.made_by(), file_digest=content, places=files.places())


def _open_images(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.size is not None, "images come with a size"
    files = _files(descriptor, base, SUFFIXES)
    classes = image_classes(files, descriptor.class_names)
    decoder = decoder_digest(classes)
    rows = image_rows(files, classes, descriptor.size, descriptor.channels)
    examples = gathered(rows, files.text, descriptor.scale, numbers=True)
    # A folder is its images' label, and so a part of the data.
    content, folders = files.digest(), (Path(name).parts[0] for name in files.names)
    bound = digest(length_prefixed("raycloak/image-folder/v1", content, *folders)) if content else b""
    left_out, places = _files_left_out(files), files.places()
    return OpenedDataset(
        examples, ClearSlices(), tokenizer=decoder, file_digest=bound, left_out=left_out, places=places
    )


def _open_tokens(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.path is not None, "tokenised text has a path"
    assert descriptor.max_length is not None, "tokenised text comes with a length"
    tokenizer = Tokenizer.load(descriptor.tokenizer, base) if descriptor.tokenizer is not None else None
    files = token_files(descriptor.path, base, descriptor.fingerprint_key is not None)
    vocabulary, content = (tokenizer.vocabulary, tokenizer.content) if tokenizer else (None, b"")
    taken = Taken()
    columns = TokenColumns(descriptor.label_names, descriptor.max_length, descriptor.inputs, descriptor.class_names)
    accept = void_check(descriptor, files.text, taken, vocabulary)
    examples = gathered(token_rows(files, columns, taken), files.text, taken=taken, accept=accept)
    return OpenedDataset(
        examples,
        ClearSlices(),
        vocabulary,
        content,
        files.digest(),
        taken.features,
        _files_left_out(files),
        files.places(),
    )


def _files(descriptor: DatasetDescriptor, base: Path, suffixes: tuple[str, ...]) -> FileSet:
    assert descriptor.path is not None, "kinds of files and folders come with a path"
    return FileSet(descriptor.path, base, suffixes, descriptor.fingerprint_key is not None)


def _open_text(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    assert descriptor.tokenizer is not None, "text comes with a tokenizer"
    assert descriptor.max_length is not None, "text comes with a length"
    path, length = _path(descriptor, base), descriptor.max_length
    tokenizer = Tokenizer.load(descriptor.tokenizer, base)
    file, file_digest = open_examples(path, hashed=descriptor.fingerprint_key is not None)
    with file:
        if descriptor.kind == "text_blocks":
            ids, labels = read_blocks(file, path, tokenizer, length)
        else:
            names, classes = descriptor.label_names, descriptor.class_names
            ids, labels = read_texts(file, path, descriptor.features[0], names, classes, tokenizer, length)
    examples = checked(ArrayDataset(ids, labels, name=str(path)), void_check(descriptor, str(path), Taken()))
    content, places = tokenizer.content, file_places([path])
    return OpenedDataset(examples, ClearSlices(), tokenizer.vocabulary, content, file_digest, places=places)


def _open_canaries(descriptor: DatasetDescriptor, base: Path) -> OpenedDataset:
    path = _path(descriptor, base)
    try:
        audited = parse(AuditedExamples, path.read_bytes())
    except OSError as error:
        raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
    opened = audited.dataset.open_slices(audited.base)
    # What the data is known by stays. This process itself adds the canaries, which differ from audit to audit.
    with_canaries = CanaryDataset(opened.examples, np.array(audited.included))
    return replace(opened, examples=with_canaries, before_canaries=opened.examples)


def _path(descriptor: DatasetDescriptor, base: Path) -> Path:
    assert descriptor.path is not None, "kinds of files and folders come with a path"
    return written(base / descriptor.path)


def _clear(examples: Dataset) -> OpenedDataset:
    return OpenedDataset(examples, ClearSlices())


_OPENERS: Mapping[DatasetKind, Callable[[DatasetDescriptor, Path], OpenedDataset]] = {
    "digits": _open_digits,
    "npz": _open_npz,
    "memory": _open_npz,
    "csv": _open_table,
    "parquet": _open_table,
    "imagefolder": _open_images,
    "hf": _open_tokens,
    "text": _open_text,
    "text_blocks": _open_text,
    "module": _open_module,
    "ray_data": _open_built,
    "sealed": _open_sealed,
    "sent": _open_sent,
    "canaries": _open_canaries,
}
