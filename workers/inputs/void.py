"""Void examples: those that would get no gradient, in silence, while each step is charged all the same.

An example is void if one of its numbers is NaN or infinite, or if a label or an id is outside the public range that was
declared for it. No run trains on one unless the owner of the data says so. Which example it is stays here: an error
leaves the worker. The owner's own check counts and names them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.named_inputs import Inputs, unpacked

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


def is_for_owner() -> bool:
    """Return whether errors may say which row is meant."""
    return _FOR_OWNER.get()


def which(numbers: Iterable[int], what: str = "row") -> str:
    """Return `` (rows 3, 17)`` for the owner, to follow what is wrong there, and nothing in a run.

    Args:
        numbers: from 1; no more are asked for than are shown.
    """
    if not is_for_owner():
        return ""
    found = list(islice(numbers, SHOWN + 1))
    more = " and more" if len(found) > SHOWN else ""
    return f" ({what}{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:SHOWN]))}{more})"


def named_by_check() -> str:
    """Return what shows the owner where the fault lies; nothing for the owner, who is shown it."""
    return "" if is_for_owner() else " 'raycloak data check' names them, on the owner's machine."


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
        not_finite = _any(~np.isfinite(labels))
        for part in parts.values():
            not_finite |= _any(~np.isfinite(part))
        return cls(not_finite, _outside_classes(labels, limits.classes), _outside(parts, ranges, len(labels)))


def _outside(parts: Mapping[str, NDArray[Any]], ranges: Mapping[str, int | None], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    for name, part in parts.items():
        most = ranges[name]
        if most is not None and np.issubdtype(part.dtype, np.integer):
            found |= _any((part < PADDING) | (part >= most))
    return found


def _outside_classes(labels: NDArray[Any], classes: int | None) -> NDArray[np.bool_]:
    if classes is None or not np.issubdtype(labels.dtype, np.integer):
        return np.zeros(len(labels), np.bool_)
    # A label for each token or pixel may leave some of them out; a class of an example may not be left out.
    outside = np.logical_or(labels < 0, labels >= classes)
    return _any(np.logical_and(outside, labels != IGNORED) if labels.ndim > 1 else outside)


def _any(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.any(values.reshape(len(values), -1), axis=1)
    return found


def refuse_void(
    features: NDArray[Any], labels: NDArray[Any], limits: Limits, name: str, columns: Sequence[str] = ()
) -> None:
    """Refuse a batch with a void example; features and labels as :meth:`Voids.of`.

    Args:
        columns: names of the features [n, k], for the error.

    Raises:
        DatasetError: ``dataset_void``.
    """
    voids = Voids.of(features, labels, limits)
    infinite = "a value that is NaN or infinite as float32" + _columns_text(void_columns(features, limits, columns))
    found = (
        (voids.not_finite, infinite, "Fill it with a public constant"),
        (voids.labels, f"a label outside 0 .. {(limits.classes or 0) - 1}", "Correct dataset.classes or the label"),
        (voids.ids, "an id outside its vocabulary", "Correct the vocabulary or the id"),
    )
    for rows, what, mend in found:
        if rows.any():
            raise DatasetError(
                "dataset_void",
                f"{name}: an example has {what}, so it would get no gradient.",
                f"{mend}, {ALLOW}.{named_by_check()}",
            )


def void_columns(features: NDArray[Any], limits: Limits, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns or inputs in which a number of these features is not finite."""
    if limits.inputs:
        return tuple(name for name, part in unpacked(features, limits.inputs).items() if not np.isfinite(part).all())
    if features.ndim != 2 or features.shape[1] != len(columns):
        return ()
    return tuple(columns[place] for place in np.flatnonzero(~np.isfinite(features).all(0)).tolist())


def _columns_text(columns: Sequence[str]) -> str:
    if not columns:
        return ""
    return f" in {listed(columns, SHOWN)}"
