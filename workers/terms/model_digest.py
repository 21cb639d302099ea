"""Digests of a model: the model digest, which does not depend on ranges, and the content of every tensor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.lineage import TensorDigests, parameters_digest
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.vectors.threads import ONE_THREAD, PIECE_WORDS, WordThreads

ATTRIBUTES = "attributes"
"""The dtype that stands for the plain values of a layer, which are stated together."""

AVERAGED = "averaged_weights"
"""The field of a tensor's state that holds its average; no update rule may keep a field of this name."""

_LARGE = 2**22
"""Bytes that take 2 to 4 ms to hash: below, starting threads would cost more than they spare."""


def dimension(tensors: Sequence[TensorSpec]) -> int:
    """Return the number of coordinates of all ``tensors`` together."""
    return sum(tensor.size for tensor in tensors)


def split_flat(flat: NDArray[np.float32], tensors: Sequence[TensorSpec]) -> list[NDArray[np.float32]]:
    """Return one view of ``flat`` per tensor, in order, each of shape [size]."""
    require_bound(flat.shape == (dimension(tensors),), "a vector of parameters has its tensors' size")
    return np.split(flat, np.cumsum([tensor.size for tensor in tensors])[:-1])


def own_copy(ranges: Sequence[NDArray[np.float32]], threads: WordThreads = ONE_THREAD) -> NDArray[np.float32]:
    """Return the parameters of all ranges as one float32 [d] in this process's own memory.

    The arguments may be views of an object store, whose memory every process of the node can write to. Verified there,
    they could be another model by the time they are used.
    """
    plain = all(each.dtype == np.dtype("<f4") and each.ndim == 1 for each in ranges)
    require_bound(plain, "parameters are little-endian float32")
    flat = np.empty(sum(map(len, ranges)), np.float32)
    places = np.split(flat, np.cumsum([len(each) for each in ranges])[:-1])

    def copy(pieces: Iterator[tuple[int, range]]) -> None:
        for index, piece in pieces:
            part = slice(piece.start, piece.stop)
            np.copyto(places[index][part], ranges[index][part])

    cut = [(index, piece) for index, each in enumerate(ranges) for piece in threads.cut(len(each), PIECE_WORDS)]
    threads.share(cut, copy)
    return flat


def tensor_digests(
    flat: NDArray[np.float32], tensors: Sequence[TensorSpec], threads: WordThreads = ONE_THREAD
) -> list[bytes]:
    """Return the SHA-256 of each tensor's little-endian float32 bytes, in order.

    Args:
        flat: float32 [d], the tensors one after the other, each in C order.
        threads: that share the tensors.
    """
    require_bound(flat.dtype == np.dtype("<f4"), "parameters are little-endian float32")
    return _contents(split_flat(flat, tensors), threads)


def model_digest(tensors: Sequence[TensorSpec], digests: Sequence[bytes]) -> bytes:
    """Return a SHA-256 over the name, dtype, shape and content digest of every tensor.

    Guarantee: equal for equal tensors, however they are cut into ranges, since each tensor enters by its own digest;
    two models that differ in any name, shape or byte have different digests.

    Args:
        tensors: all trainable tensors in canonical order.
        digests: their :func:`tensor_digests`, in the same order.
    """
    given = zip(tensors, digests, strict=True)
    return parameters_digest([TensorDigests(name=spec.name, shape=spec.shape, content=each) for spec, each in given])


def with_state(
    flat: NDArray[np.float32],
    state: Mapping[str, NDArray[Any]],
    tensors: Sequence[TensorSpec],
    threads: WordThreads = ONE_THREAD,
    solved: Sequence[NDArray[np.float32]] = (),
) -> tuple[TensorDigests, ...]:
    """Return the digests of ``tensors``, and of what an update rule keeps for each.

    Args:
        flat: float32 [d], as of :func:`tensor_digests`.
        state: by ``tensor name/field``; the field `AVERAGED` is the tensor's average.
        threads: that share the tensors and their state.
        solved: float32 [d] of each release that the next one is solved by, the newest first.
    """
    require_bound(flat.dtype == np.dtype("<f4"), "parameters are little-endian float32")
    names = sorted(state)
    contents = _contents([*split_flat(flat, tensors), *(state[name] for name in names)], threads)
    releases = zip(*(tensor_digests(each, tensors, threads) for each in solved), strict=True)
    earlier = list(releases) or [()] * len(tensors)
    kept: dict[str, list[bytes | str]] = {}
    averages: dict[str, bytes] = {}
    for key, content in zip(names, contents[len(tensors) :], strict=True):
        name, _, field = key.rpartition("/")
        shape = ",".join(map(str, state[key].shape))
        kept.setdefault(name, []).extend((field, state[key].dtype.str, shape, content))
        if field == AVERAGED:
            averages[name] = content
    return tuple(
        TensorDigests(
            name=spec.name,
            shape=spec.shape,
            content=content,
            state=digest(length_prefixed("raycloak/tensor-state/v1", *kept[spec.name])) if spec.name in kept else b"",
            averaged=averages.get(spec.name, b""),
            solved=of_releases,
        )
        for spec, content, of_releases in zip(tensors, contents, earlier, strict=False)
    )


def _contents(arrays: Sequence[NDArray[Any]], threads: WordThreads) -> list[bytes]:
    """Return the SHA-256 of each array's bytes, in C order."""
    views = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    digests = [b""] * len(views)

    def hash_all(places: Iterator[int]) -> None:
        for place in places:
            digests[place] = digest(views[place])

    small = sum(view.nbytes for view in views) < _LARGE
    # The largest first: at the end no thread is alone with it.
    largest = sorted(range(len(views)), key=lambda place: -views[place].nbytes)
    (ONE_THREAD if small else threads).share(largest, hash_all)
    return digests


@dataclass(frozen=True, slots=True)
class TensorContent:
    """The content of one tensor or array of a built model or a loss, or of all plain values of one layer.

    Attributes:
        dtype: torch's name of it, such as ``float32``; NumPy's for an array; or ``ATTRIBUTES``.
        content: SHA-256 of its bytes, in C order.
        trained: whether the run changes it; every other parameter and buffer is frozen.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes
    trained: bool


def frozen_digest(tensors: Sequence[TensorContent]) -> bytes:
    """Return a SHA-256 over the name, dtype, shape and content digest of everything frozen, in the model's order.

    Guarantee: two models that differ in a frozen parameter, a buffer, or another value that they or the loss hold, by a
    name, a shape or a byte, have different digests. The trained tensors are in the model digest instead.
    """
    fields: list[bytes | str] = []
    for tensor in tensors:
        if not tensor.trained:
            fields += (tensor.name, tensor.dtype, ",".join(map(str, tensor.shape)), tensor.content)
    return digest(length_prefixed("raycloak/frozen/v1", *fields))


def check_same_tensors(expected: Sequence[TensorContent], found: Sequence[TensorContent]) -> None:
    """Require the tensors of a model to be those that the run has.

    Raises:
        ProtocolError: ``model_mismatch``, with the name of the first tensor that differs.
    """
    for wanted, tensor in zip(expected, found, strict=False):
        if wanted != tensor:
            _refuse(_shown(wanted) if wanted.name == tensor.name else f"{_shown(wanted)} or {_shown(tensor)}")
    if len(expected) != len(found):
        longer = max(expected, found, key=len)
        _refuse(_shown(longer[min(len(expected), len(found))]))


def _shown(tensor: TensorContent) -> str:
    kind = "a plain value of layer" if tensor.dtype == ATTRIBUTES else "tensor"
    return f"{kind} '{tensor.name}'"


def _refuse(shown: str) -> None:
    raise ProtocolError(
        "model_mismatch",
        f"{shown} of the model built here is not that of the run",
        "Let the model's function and the files it reads be the same on every node.",
    )
