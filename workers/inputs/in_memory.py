"""A dataset in memory, as a Trainer is given it: written for local workers, so that no object store has an example.

Hides which forms an example may have: a pair, features by name, tensors of any float, or what tokenizers give.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import Taken, check_arrays
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.named_inputs import InputSource, outlined, packed
from raycloak.workers.inputs.rows import gathered
from raycloak.workers.inputs.text_data import text_example
from raycloak.workers.inputs.unit_names import units_told
from raycloak.workers.inputs.units import MOST_CHOSEN
from raycloak.workers.inputs.user_code import own_words
from raycloak.workers.inputs.void import void_check

# Of an example as Hugging Face writes it: its label, and all that makes features of ids.
_LABEL_KEYS = {"labels", "label"}
_TEXT_KEYS = _LABEL_KEYS | {"input_ids", "attention_mask", "token_type_ids"}
# Of the array of an input in the file, where labels have a name too.
_PREFIX = "input."
# Of the array that says whose an example is, and so the public name of that.
_UNIT = "unit"


_Example = tuple[dict[str, NDArray[Any]], NDArray[Any]]
"""The features of an example by the name of the input, which is empty for features without one; and its label."""


def export_in_memory(dataset: Any, path: Path) -> DatasetDescriptor:
    """Write a map-style PyTorch dataset to an npz file of mode 0600 that local workers open.

    The examples pass through this process, so it must be trusted with them; they never enter an object store. An
    existing file is replaced as a whole.

    Args:
        dataset: has ``__len__`` and ``__getitem__``. An example is a pair (x, y), tensors, arrays or numbers of one
            shape each; or a mapping with ``input_ids``, ``attention_mask`` and ``labels``. For a model that takes
            several inputs by name, x is a mapping of names to them, or the example is one that has ``labels`` as well
            and no ``input_ids``.
            Where an input is integer, an attribute ``vocabulary`` says how many ids there are, a number or one by name;
            a text model says it too. An attribute ``allow_void`` is `DatasetDescriptor.allow_void`. A method
            ``unit(index)`` returns the name of what the example is of, such as a patient's number, and protects all
            that it is the name of as a whole; ``rows_per_unit`` is then the most examples of one in a step.
        path: absolute path of the file to write.

    Raises:
        DatasetError: ``dataset_array`` if it is not map-style or shapes differ between examples, ``dataset_empty``,
            ``dataset_dtype``, ``dataset_function`` if an example cannot be had, ``dataset_void``, ``dataset_unit``.
        ConfigError: ``vocabulary``, as `raycloak.workers.inputs.named_inputs.outlined`.
    """
    _require_map_style(dataset)
    parts, labels = _stacked(_examples(dataset))
    vocabulary, allow_void = getattr(dataset, "vocabulary", None), bool(getattr(dataset, "allow_void", False))
    described = DatasetDescriptor(kind="memory", path=str(path), features=("features",), allow_void=allow_void)
    taken, features = Taken(), parts.get("")
    if features is not None:
        described, arrays = described.model_copy(update={"vocabulary": vocabulary}), {"features": features}
    else:
        known, typed = vocabulary if isinstance(vocabulary, Mapping) else {}, {}
        for name, part in parts.items():
            check_arrays(part, labels, f"the dataset, input '{name}'")
            with np.errstate(all="ignore"):
                typed[name] = part.astype(np.float32 if part.dtype.kind == "f" else np.int64)
        taken.inputs = outlined(typed, known, "the dataset")
        features, arrays = packed(typed, taken.inputs), {_PREFIX + name: part for name, part in typed.items()}
        sources = tuple(
            InputSource(name=each.name, features=(_PREFIX + each.name,), vocabulary=each.vocabulary)
            for each in taken.inputs
        )
        described = described.model_copy(update={"features": (), "inputs": sources})
    if (of_rows := _units_told(dataset)) is not None:
        # Numbers, not names: a file that a run leaves behind tells no more than it must.
        described = described.model_copy(update={"unit": _UNIT, "rows_per_unit": dataset.rows_per_unit})
        arrays[_UNIT] = of_rows
    # Here, where the caller sees it, and not in each worker.
    gathered([(features, labels)], "the dataset", accept=void_check(described, "the dataset", taken), in_memory=True)
    # The mode is given when the file is created: at no moment can others open it.
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        np.savez(file, allow_pickle=False, labels=labels, **arrays)
    partial.replace(path)
    return described


def _units_told(dataset: Any) -> NDArray[np.int64] | None:
    """Return the number of the unit of each example, int64 [n]; None where each is a unit of its own."""
    told, rows = getattr(dataset, "unit", None), getattr(dataset, "rows_per_unit", None)
    if told is None and rows is None:
        return None
    if not callable(told) or not isinstance(rows, int) or not 1 <= rows <= MOST_CHOSEN:
        raise DatasetError(
            "dataset_unit",
            f"a dataset of units has a method unit(index), and rows_per_unit, a number from 1 to {MOST_CHOSEN}.",
            "Give it both, or neither.",
        )
    try:
        return units_told(told, len(dataset), "the dataset").of_rows()
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError("dataset_function", f"unit(index) fails with {own_words(error)}", "Mend it.") from error


def require_first(dataset: Any) -> None:
    """Refuse a dataset whose first example is none, before a cluster starts for it; as :func:`export_in_memory`."""
    _require_map_style(dataset)
    next(_examples(dataset))


def _require_map_style(dataset: Any) -> None:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if len(dataset) == 0:
            raise DatasetError("dataset_empty", "the dataset has no examples.", "Name a dataset with examples.")
        return
    remedy = "Give it __len__ and __getitem__."
    if hasattr(dataset, "dataset") and hasattr(dataset, "batch_size"):
        remedy = "Give the dataset itself, loader.dataset: a run draws its own batches, at random."
    raise DatasetError("dataset_array", f"a {type(dataset).__name__} is not a map-style dataset.", remedy)


def _stacked(given: Iterable[_Example]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Return the features of examples by the name of the input, which is empty for features without, and labels."""
    examples = list(given)
    names = examples[0][0].keys()
    if any(parts.keys() != names for parts, _ in examples):
        raise DatasetError(
            "dataset_array", "the dataset's examples do not all have the same inputs.", "Give each of them all inputs."
        )
    try:
        found = {name: np.stack([parts[name] for parts, _ in examples]) for name in names}
        return found, np.stack([label for _, label in examples])
    except ValueError:
        raise DatasetError(
            "dataset_array",
            "the dataset's examples do not all have one shape.",
            "Pad or crop them to one public shape.",
        ) from None


def _examples(dataset: Any) -> Iterator[_Example]:
    """Yield the features of each example by the name of the input, and its label."""
    # By index: a map-style dataset need not raise the IndexError that ends a plain iteration.
    for index in range(len(dataset)):
        name = f"example {index} of the dataset"
        try:
            item = dataset[index]
        except Exception as error:
            # The caller holds the examples, so it may see what its own code says of one.
            raise DatasetError("dataset_function", f"{name} fails with {own_words(error)}", "Mend it.") from error
        yield _example(item, name)


def _example(item: Any, name: str) -> _Example:
    features: Any
    if _is_text(item):
        given = {key: item[key] for key in item.keys() & _TEXT_KEYS if item[key] is not None}
        ids, labels = text_example({key: _plain(each, name) for key, each in given.items()}, name)
        return {"": ids}, labels
    if isinstance(item, Mapping):
        features = {key: each for key, each in item.items() if key not in _LABEL_KEYS}
        label = item.get("labels", item.get("label"))
        if label is None or len(item) < 2:
            raise DatasetError(
                "dataset_array",
                f"{name} has no labels, or nothing beside them.",
                "Let each be a pair (features, label), or a mapping with labels and what the model takes by name.",
            )
    elif isinstance(item, tuple | list) and len(item) == 2:
        features, label = item
    else:
        raise DatasetError(
            "dataset_array",
            f"{name} is not a pair.",
            "Let each be (features, label), with features by name if the model takes several, or a mapping as "
            "tokenizers of Hugging Face give it.",
        )
    if not isinstance(features, Mapping):
        return {"": _plain(features, name)}, _plain(label, name)
    return {str(key): _plain(each, name) for key, each in features.items()}, _plain(label, name)


def _is_text(item: Any) -> bool:
    return isinstance(item, Mapping) and "input_ids" in item


def unused_keys(dataset: Any) -> tuple[str, ...]:
    """Return the keys of a tokenised example that are no part of it, such as its text; of the first example."""
    item = dataset[0]
    return tuple(sorted(map(str, item.keys() - _TEXT_KEYS))) if _is_text(item) else ()


def _plain(value: Any, name: str) -> NDArray[Any]:
    """Return a tensor, an array or a number as an array; a float of a type that NumPy does not have as float32.

    Raises:
        DatasetError: ``dataset_array`` for lists that are no array; ``dataset_dtype`` for what is no number, or a
            tensor without plain elements, such as a sparse one.
    """
    if hasattr(value, "detach"):
        return _plain_tensor(value.detach().cpu(), name)
    try:
        array = np.asarray(value)
    except ValueError:
        raise DatasetError(
            "dataset_array", f"{name} has lists of different lengths.", "Pad or crop them to one public length."
        ) from None
    if array.dtype.kind not in "fiub":
        kind = f"value of type {type(value).__name__}" if array.ndim == 0 else f"list of {array.dtype.type.__name__}"
        raise DatasetError(
            "dataset_dtype",
            f"{name} has a {kind} where numbers belong.",
            "Give numbers; as label, that of the class.",
        )
    return array


def _plain_tensor(tensor: Any, name: str) -> NDArray[Any]:
    try:
        try:
            array = np.asarray(tensor.numpy())
        except TypeError:
            array = np.asarray(tensor.float().numpy())
        if array.dtype.kind in "fiub":
            return array
    except (TypeError, RuntimeError):
        pass
    raise DatasetError(
        "dataset_dtype",
        f"{name} is a tensor of {tensor.dtype}, {tensor.layout}, which has no plain numbers.",
        "Give a dense tensor of numbers: to_dense() or float().",
    )
