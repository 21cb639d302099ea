"""Random versions of a row, such as an image moved by a pixel: how uniform words of a keyed stream become one.

Hides the kinds of versions. Each version of a row is one more row of its unit: what epsilon protects is the same, and
so is its price (docs/proofs/012-units.md, section 5). Data is committed to, marked, measured and evaluated as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.units import below
from raycloak.workers.inputs.user_code import resolve, source_digest, told

SHIFT: Final = "shift"
WORDS: Final = 4
"""The 64-bit words that make one version: two distances and a flip, or the key of a generator."""

OwnVersion = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]
"""(one row's features, a generator) to a version of it, of the same shape and type."""


class Augmentation(Message):
    """The versions of each row that a step computes.

    Attributes:
        kind: ``shift``, or ``module:function`` of the user's own.
        copies: how many versions of a row are computed in a step that takes it.
        pixels: of shift: each image is moved by at most so many along each of its last two axes. Zeros fill it up.
        flip: of shift: whether a version is mirrored along the last axis with a chance of one half.
    """

    DOMAIN: ClassVar[str] = "raycloak/augmentation/v1"

    kind: str
    copies: int = Field(ge=1)
    pixels: int = Field(default=0, ge=0)
    flip: bool = False


class Versions:
    """Makes versions of rows.

    Args:
        augmentation: their kind.
        form: of the rows, which are tried on zeros.
        base: folder that a function of the user's own is looked up in.

    Attributes:
        copies: versions of each row.
        code: SHA-256 of the source of a function of the user's own; empty for a built-in kind.

    Raises:
        ConfigError: ``augment`` if the kind does not fit the rows, or a function gives something else than a version,
            or other bytes for the same row and generator; ``module_function``.
    """

    def __init__(self, augmentation: Augmentation, form: DatasetForm, base: Path | str) -> None:
        self.copies, self._kind, shape = augmentation.copies, augmentation, form.feature_shape
        is_own = augmentation.kind != SHIFT
        self._own: OwnVersion | None = resolve(augmentation.kind, base) if is_own else None
        self.code = source_digest(augmentation.kind, base) if is_own else b""
        if form.inputs:
            raise _unfit("features by name are not one array")
        if self._own is not None:
            self._try(form)
        elif len(shape) < 2 or min(shape[-2:]) <= augmentation.pixels:
            raise _unfit(f"{augmentation.pixels} pixels need two last axes that are longer, and rows are {list(shape)}")

    def of(self, features: NDArray[Any], words: NDArray[np.uint64]) -> NDArray[Any]:
        """Return a version of each row, made by its words alone.

        Guarantee: a version is a function of its row and its words. Which rows stand beside it changes nothing.
        Precondition for a function of the user's own: it keeps nothing from one call to the next.

        Args:
            features: [n, ...]. words: uniform, uint64 [n, WORDS].

        Raises:
            ModelError: ``augment`` if a function of the user's own fails. No word of why: it is of a private row.
        """
        return self._moved(features, words) if self._own is None else self._made(features, words)

    def _moved(self, features: NDArray[Any], words: NDArray[np.uint64]) -> NDArray[Any]:
        most, (count, *shape) = self._kind.pixels, features.shape
        images = features.reshape(count, -1, *shape[-2:])
        framed = np.pad(images, ((0, 0), (0, 0), (most, most), (most, most)))
        windows = np.lib.stride_tricks.sliding_window_view(framed, shape[-2:], (2, 3))
        down, across = below(np.full((count, 2), 2 * most + 1, np.int64), words[:, :2]).T
        found = windows[np.arange(count), :, down, across]
        if self._kind.flip:
            mirrored = (words[:, 2] & np.uint64(1)).astype(np.bool_)[:, None, None, None]
            found = np.where(mirrored, found[..., ::-1], found)
        return found.reshape(features.shape)

    def _made(self, features: NDArray[Any], words: NDArray[np.uint64]) -> NDArray[Any]:
        assert self._own is not None, "a function makes its own versions"
        made = np.empty_like(features)
        for row, key, out in zip(features, words, made, strict=True):
            try:
                found = np.asarray(self._own(_lent(row), np.random.Generator(np.random.Philox(key=key[:2]))))
            except Exception as error:  # noqa: BLE001 - the user's own code; which failure it is may tell of a row
                raise _failed() from told(error)
            if found.shape != row.shape or found.dtype != row.dtype:
                raise _failed()
            out[...] = found
        return made

    def _try(self, form: DatasetForm) -> None:
        """Refuse a function that gives no versions of rows of zeros and ones, or not the same ones in another order."""
        rows, words = form.zeros(2)[0], np.arange(2 * WORDS, dtype=np.uint64).reshape(2, WORDS)
        rows[1] = 1
        try:
            once, again = self._made(rows, words), self._made(rows[::-1], words[::-1])[::-1]
        except ModelError as error:
            raise _unfit(
                f"{self._kind.kind} fails on a row of zeros or ones, or gives no array of its shape and type, "
                f"{list(form.feature_shape)} {form.feature_dtype}"
            ) from error.__cause__
        if once.tobytes() != again.tobytes():
            raise _unfit(f"{self._kind.kind} gives other values for the same row and generator")


def _lent(row: NDArray[Any]) -> NDArray[Any]:
    """Return a view that user code cannot write through."""
    view = row.view()
    view.flags.writeable = False
    return view


def _unfit(why: str) -> ConfigError:
    return ConfigError(
        "augment", f"dataset.augment: {why}.", "See docs/data.md, Versions of a row, or leave dataset.augment out."
    )


def _failed() -> ModelError:
    return ModelError(
        "augment",
        "the function of dataset.augment fails on an example.",
        "Let it take every row, and return an array of the same shape and type.",
    )
