"""The product of encrypted activations and one adapted projection, X·Aᵀ·Bᵀ·α/r, by rotations of token blocks.

Slot ``b * T + t`` of ciphertext g holds column ``g * columns + b`` of token t. Both matrices are applied by diagonals:
2(r - 1) + log2(columns / r) rotations, no relinearisation, and no rescale before the answer is hidden.

It assumes nothing about the client: what it computes is a linear map of whatever was encrypted.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.metrics.errors import ModelError
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.parameters import SET_F, BlockShape, context, library


def padded_rank(rank: int) -> int:
    """Return the power of two at or above a rank, and at least 2.

    At rank 1 the first sum over columns comes before any other rotation. A false key would keep its two terms apart,
    and a block would tell twice what it is charged (tests/lab/encrypted/test_false_rotations.py does that).
    """
    return max(2, 1 << (rank - 1).bit_length())


class PackedProjection:
    """One projection's delta in encoded form.

    The product B·A is factored anew: scaled so that no row has a norm above 1, and with both factors of one size. So
    neither the factors' scales nor a cancellation between them costs precision.

    Args:
        down: A, shape [r, width_in].
        up: B, shape [width_out, r], with the adapter's factor α/r in it.
        shape: the blocks of the session; its rank must be at least r.

    Raises:
        ModelError: ``adapter_shape`` or ``adapter_not_finite``.

    Attributes:
        gain: the power of two that an answer is to be multiplied by; 0 where B·A is zero. The client is told it.
        width_in: columns of an activation.
        width_out: columns of a delta.
    """

    def __init__(self, down: NDArray[Any], up: NDArray[Any], shape: BlockShape) -> None:
        _require_adapter(down, up, shape)
        self.shape = shape
        self.width_in: int = down.shape[1]
        self.width_out: int = up.shape[0]
        down, up, self.gain = _balanced(np.asarray(down, np.float64), np.asarray(up, np.float64), shape.rank)
        encode = _Encoder(shape)
        rank, blocks = shape.rank, np.arange(shape.columns)
        self._down = [encode(down, (blocks - turn) % rank) for turn in range(rank)]
        self._up = [encode(up.T, (blocks + turn) % rank) for turn in range(rank)]

    def apply(self, activations: list[Any], keys: EvaluationKeys) -> list[Any | None]:
        """Return the encrypted deltas, not hidden yet: nothing of them may leave but through `Rerandomiser.answer`.

        Args:
            activations: as `EvaluationKeys.read_batch` returns them.
            keys: the client's, of the same block shape.

        Returns:
            One ciphertext for each block of columns, at scale 2^108; None where the delta is zero.
        """
        assert keys.shape == self.shape
        rotation = _Rotation(keys)
        hidden: Any | None = None
        for encoded in reversed(self._down):
            hidden = _sum(rotation.by_one(hidden), _product(activations, encoded))
        step = self.shape.tokens * self.shape.rank
        while hidden is not None and step < SET_F.slots:
            hidden = _sum(hidden, rotation.copy_by(hidden, step))
            step *= 2
        deltas: list[Any | None] = [None] * self.shape.ciphertexts(self.width_out)
        for turn, encoded in enumerate(self._up):
            hidden = rotation.by_one(hidden) if turn else hidden
            if hidden is not None:
                deltas = [_sum(delta, _product([hidden], [each])) for delta, each in zip(deltas, encoded, strict=True)]
        return deltas


def _require_adapter(down: NDArray[Any], up: NDArray[Any], shape: BlockShape) -> None:
    fits = down.ndim == up.ndim == 2 and 1 <= down.shape[0] == up.shape[1] <= shape.rank
    if not fits or not all(1 <= width <= shape.max_width for width in (down.shape[1], up.shape[0])):
        raise ModelError(
            "adapter_shape",
            f"an adapter of shapes {list(down.shape)} and {list(up.shape)} does not fit rank {shape.rank} and blocks "
            f"of {shape.tokens} tokens.",
            f"Serve LoRA matrices [r, width] and [width, r] with r up to the rank and widths up to {shape.max_width}. "
            "Smaller blocks allow wider ones.",
        )
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise ModelError(
            "adapter_not_finite", "an adapter's matrix has numbers that are not finite.", "Train or export it again."
        )


def _balanced(
    down: NDArray[np.float64], up: NDArray[np.float64], rank: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return factors of ``up @ down`` over its gain, of rank ``rank``, and the gain."""
    left, left_small = np.linalg.qr(up)
    right, right_small = np.linalg.qr(down.T)
    inner_left, sizes, inner_right = np.linalg.svd(left_small @ right_small.T)
    root = np.sqrt(sizes)
    new_up, new_down = (left @ inner_left) * root, (right @ inner_right.T).T * root[:, None]
    # The Gram matrix of A gives the rows' norms without the whole product.
    norms = np.sqrt(np.einsum("ik,kl,il->i", new_up, new_down @ new_down.T, new_up))
    largest = float(norms.max())
    if largest == 0:
        return np.zeros((rank, down.shape[1])), np.zeros((up.shape[0], rank)), 0.0
    gain = 2.0 ** int(np.ceil(np.log2(largest)))
    missing = rank - len(sizes)
    return (
        np.pad(new_down / np.sqrt(gain), ((0, missing), (0, 0))),
        np.pad(new_up / np.sqrt(gain), ((0, 0), (0, missing))),
        gain,
    )


class _Encoder:
    """The encoding of a matrix's generalised diagonals."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape
        self._encoder = library().CKKSEncoder(context())

    def __call__(self, matrix: NDArray[np.float64], rows: NDArray[np.intp]) -> list[Any | None]:
        """Return a plaintext for each block of columns of ``matrix`` [rank, width]; block b takes row ``rows[b]``.

        A plaintext of zeros is None: SEAL refuses the product with one, since it could be read by anybody.
        """
        columns, width = self._shape.columns, matrix.shape[1]
        count = self._shape.ciphertexts(width)
        padded = np.zeros((len(matrix), count * columns))
        padded[:, :width] = matrix
        chosen = padded.reshape(len(matrix), count, columns)[rows, :, np.arange(columns)]
        return [self._encode(np.repeat(block, self._shape.tokens)) for block in chosen.T]

    def _encode(self, slots: NDArray[np.float64]) -> Any | None:
        # Half a unit of the encoding's last place cannot become a coefficient that is not zero.
        if np.abs(slots).max() < 2.0 ** -(SET_F.weight_scale_bits + 1):
            return None
        encoded = library().Plaintext()
        level = context().first_parms_id()
        self._encoder.encode(slots.tolist(), level, 2.0**SET_F.weight_scale_bits, encoded)
        return None if encoded.is_zero() else encoded


def _sum(total: Any | None, addend: Any | None) -> Any | None:
    """Add in place where both are there."""
    if total is None or addend is None:
        return addend if total is None else total
    library().Evaluator(context()).add_inplace(total, addend)
    return total


def _product(ciphertexts: list[Any], encoded: list[Any | None]) -> Any | None:
    """Return the sum of products over the blocks, None if each plaintext is zero."""
    seal = library()
    evaluator = seal.Evaluator(context())
    total: Any | None = None
    for each, factor in zip(ciphertexts, encoded, strict=True):
        if factor is not None:
            product = seal.Ciphertext()
            evaluator.multiply_plain(each, factor, product)
            total = _sum(total, product)
    return total


class _Rotation:
    """Rotations under one client's keys."""

    def __init__(self, keys: EvaluationKeys) -> None:
        self._evaluator = library().Evaluator(context())
        self._keys = keys

    def by_one(self, value: Any | None) -> Any | None:
        """Rotate in place by one block of tokens."""
        if value is not None:
            self._evaluator.rotate_vector_inplace(value, self._keys.shape.tokens, self._keys.rotations)
        return value

    def copy_by(self, value: Any, step: int) -> Any:
        rotated = library().Ciphertext()
        self._evaluator.rotate_vector(value, step, self._keys.rotations, rotated)
        return rotated
