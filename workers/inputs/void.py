"""Void examples: those that would get no gradient, in silence, while each step is charged all the same.

An example is void if one of its numbers is NaN or infinite, or if a label or an id is outside the public range that was
declared for it. No run trains on one unless the owner of the data says so. Which example it is stays here: an error
leaves the worker. The owner's own check counts and names them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.datasets import Accept, Taken
from raycloak.workers.inputs.named_inputs import Inputs, unpacked

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

PADDING = -1
"""The id of no token."""
IGNORED = -100
"""The label of a token or a pixel that no loss counts, as in torch."""
SHOWN = 10
"""The examples, lines or names of one sentence."""

ALLOW = "or set dataset.allow_void: true, for examples that get no gradient and are charged all the same"

_FOR_OWNER = ContextVar("for_owner", default=False)


@contextmanager
def for_owner() -> Iterator[None]:
    """Let errors say which row or line is meant, for a command that the data's owner runs.

    Never in a process of a run: where an example lies may tell of a person.
    """
    token = _FOR_OWNER.set(True)
    try:
        yield
    finally:
        _FOR_OWNER.reset(token)


def which(numbers: Iterable[int], what: str = "row") -> str:
    """Return `` (rows 3, 17)`` for the owner, to follow what is wrong there, and nothing in a run.

    Args:
        numbers: from 1; no more are asked for than are shown.
    """
    if not _FOR_OWNER.get():
        return ""
    found = list(islice(numbers, SHOWN + 1))
    more = " and more" if len(found) > SHOWN else ""
    return f" ({what}{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:SHOWN]))}{more})"


def named_by_check() -> str:
    """Return what shows the owner where the fault lies; nothing for the owner, who is shown it."""
    return "" if _FOR_OWNER.get() else " 'raycloak data check' names them, on the owner's machine."


@dataclass(frozen=True, slots=True)
class Limits:
    """The public ranges of labels and ids.

    Attributes:
        classes: K, where labels are classes 0 .. K-1; None where nobody says.
        vocabulary: N, where features are ids 0 .. N-1; None for other features.
        inputs: of features that are packed, with a range each.
    """

    classes: int | None = None
    vocabulary: int | None = None
    inputs: Inputs = ()


@dataclass(frozen=True, slots=True)
class Voids:
    """Which rows of a batch are void, bool [n] each: by a number that is not finite, a label, or an id."""

    not_finite: NDArray[np.bool_]
    labels: NDArray[np.bool_]
    ids: NDArray[np.bool_]

    @classmethod
    def of(cls, features: NDArray[Any], labels: NDArray[Any], limits: Limits) -> "Voids":
        """Look at features [n, ...] and labels [n, ...] as a model gets them."""
        parts = unpacked(features, limits.inputs) if limits.inputs else {"": features}
        ranges = {each.name: each.vocabulary for each in limits.inputs} or {"": limits.vocabulary}
        not_finite, ids = _any(~np.isfinite(labels)), np.zeros(len(labels), np.bool_)
        for name, part in parts.items():
            not_finite |= _any(~np.isfinite(part))
            most = ranges[name]
            if most is not None and np.issubdtype(part.dtype, np.integer):
                ids |= _any((part < PADDING) | (part >= most))
        outside = np.zeros(labels.shape, np.bool_)
        if limits.classes is not None and np.issubdtype(labels.dtype, np.integer):
            # A label for each token or pixel may leave some of them out; a class of an example may not be left out.
            counted = (labels != IGNORED) | (labels.ndim == 1)
            outside = ((labels < 0) | (labels >= limits.classes)) & counted
        return cls(not_finite, _any(outside), ids)


def _any(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.any(values.reshape(len(values), -1), axis=1)
    return found


def void_check(asked: "DatasetDescriptor", name: str, taken: Taken, vocabulary: int | None = None) -> Accept | None:
    """Return the check of what a reader gives, features and labels as of :meth:`Voids.of`; None where the owner of the
    data allows void examples.

    The check raises DatasetError ``dataset_void``.

    Args:
        name: of the dataset, for the error.
        taken: says which columns the features are.
        vocabulary: the number of ids, where a tokenizer says it.
    """
    if asked.allow_void:
        return None

    def accept(features: NDArray[Any], labels: NDArray[Any]) -> None:
        limits = Limits(asked.classes, vocabulary or asked.vocabulary, taken.inputs)
        voids = Voids.of(features, labels, limits)
        columns = void_columns(features, limits, taken.features)
        within = f" in {listed(columns, SHOWN)}" if columns else ""
        found = (
            (voids.not_finite, f"a value that is NaN or infinite as float32{within}", "Fill it with a public constant"),
            (voids.labels, f"a label outside 0 .. {(asked.classes or 0) - 1}", "Correct dataset.classes or the label"),
            (voids.ids, "an id outside its vocabulary", "Correct the vocabulary or the id"),
        )
        for rows, what, mend in found:
            if rows.any():
                raise DatasetError(
                    "dataset_void",
                    f"{name}: an example has {what}, so it would get no gradient.",
                    f"{mend}, {ALLOW}.{named_by_check()}",
                )

    return accept


def void_columns(features: NDArray[Any], limits: Limits, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns or inputs in which a number of these features is not finite."""
    if limits.inputs:
        return tuple(name for name, part in unpacked(features, limits.inputs).items() if not np.isfinite(part).all())
    if features.ndim != 2 or features.shape[1] != len(columns):
        return ()
    return tuple(columns[place] for place in np.flatnonzero(~np.isfinite(features).all(0)).tolist())
