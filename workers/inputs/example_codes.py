"""Codes of examples under a key, and what they add up to: the fingerprint and the sketch of a dataset, in one pass.

A code is a keyed message authentication code of one example: the numbers in it, and not how they are stored. So float64
that is float32, integers that are floats, and -0 that is 0 are one. Codes of all examples are added modulo 2^128, so
their order does not matter. The sketch keeps the least codes of features alone: another label is the same people.

Guarantee: without the key, codes are indistinguishable from random ones. Two datasets that nobody chose with the key
have one fingerprint exactly if their examples are the same, each as often (`docs/proofs/014-data-marks.md`).

Memory: `_BYTES` of examples, however many there are.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from raycloak.attestation.core.data_marks import CODE_BYTES, SKETCH_SIZE, DataMarks, joined
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.workers.inputs.datasets import Batch, Dataset, dataset_form

# Examples read at once, and coded at once: more would leave the processor's cache, which halves the speed.
_ROWS = 1024
_BYTES = 2**24
_CODED_BYTES = 2**18
_BLOCK = 16


class ExampleCodes:
    """Adds up the codes of a dataset's examples.

    Args:
        key: of the fingerprint.
        features, labels: numbers in the features and in the label of one example.
    """

    def __init__(self, key: Secret, features: int, labels: int) -> None:
        self._key = key
        self._outline = features, labels
        self._features = _Absorber(key, "features", features)
        self._labels = _Absorber(key, "labels", labels)
        # Of the features alone, so that another label leaves it as it is.
        self._feature_code = _cipher(key, "feature code", features)
        self._example_code = _cipher(key, "example code", features, labels)
        self._count = self._sum = 0
        self._least = np.empty(0, np.uint64)

    def add(self, batch: Batch) -> None:
        """Add examples, as `raycloak.workers.inputs.datasets.Dataset.batch` gives them."""
        features, labels = (part.reshape(len(part), -1) for part in batch)
        step = max(1, _CODED_BYTES // (4 * max(1, features.shape[1])))
        for start in range(0, len(features), step):
            absorbed = self._features.absorbed(features[start : start + step])
            codes = _encrypted(self._feature_code, absorbed)[:, 0]
            if len(self._least) == SKETCH_SIZE:
                codes = codes[codes < self._least[-1]]
            if len(codes):
                self._least = np.unique(np.concatenate([self._least, codes]))[:SKETCH_SIZE]
            both = absorbed ^ self._labels.absorbed(labels[start : start + step])
            # Each column of 32-bit words is added exactly: there are fewer than 2^32 examples in a chunk.
            words = _encrypted(self._example_code, both).view(np.uint32).sum(axis=0, dtype=np.uint64)
            self._sum += sum(int(word) << (32 * place) for place, word in enumerate(words))
        self._count += len(features)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes, of all examples that were added."""
        total = (self._sum % 2**128).to_bytes(_BLOCK, "big")
        fields = ("examples", *self._outline, self._count, total)
        return derive(self._key, Purpose.DATASET_FINGERPRINT, *fields).reveal()

    @property
    def sketch(self) -> bytes:
        """The least distinct codes of features, as `raycloak.attestation.core.data_marks.DataMarks` has them."""
        return joined({int(code).to_bytes(CODE_BYTES, "big") for code in self._least})


def example_marks(dataset: Dataset, key: Secret) -> DataMarks:
    """Read all examples of a dataset, and return what it is known by under ``key``: no places."""
    form = dataset_form(dataset)
    numbers = int(np.prod(form.feature_shape, dtype=np.int64)), int(np.prod(form.label_shape, dtype=np.int64))
    codes = ExampleCodes(key, *numbers)
    step = max(1, min(_ROWS, _BYTES // (8 * max(1, sum(numbers)))))
    for start in range(0, form.num_examples, step):
        codes.add(dataset.batch(np.arange(start, min(start + step, form.num_examples), dtype=np.int64)))
    name = derive(key, Purpose.DATASET_KEY_NAME).reveal()
    return DataMarks(key=name, fingerprint=codes.fingerprint, sketch=codes.sketch)


class _Absorber:
    """Turns the numbers of a part of an example into 16 bytes: each block is masked by its place and encrypted, and all
    are added by exclusive or, as in PMAC."""

    def __init__(self, key: Secret, part: str, numbers: int) -> None:
        self._numbers = numbers
        self._blocks = -(-numbers // 4)
        self._cipher = _cipher(key, part, numbers)
        stream = Cipher(algorithms.AES256(_code_key(key, f"{part} masks", numbers)), modes.CTR(bytes(_BLOCK)))
        # As many again for what float32 leaves over of large integers.
        masks = stream.encryptor().update(bytes(2 * self._blocks * _BLOCK))
        self._masks = np.frombuffer(masks, np.uint64).reshape(2, self._blocks, 1, 2)

    def absorbed(self, values: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return [n, 2] for the values [n, numbers] of n examples."""
        with np.errstate(all="ignore"):
            near = values.astype(np.float32, copy=False)
        found = self._added(near, self._masks[0])
        if values.dtype == np.int64:
            with np.errstate(all="ignore"):
                left = (values.astype(np.float64) - near).astype(np.float32)
            large = left.any(axis=1)
            if large.any():
                found[large] ^= self._added(left[large], self._masks[1])
        return found

    def _added(self, values: NDArray[np.float32], masks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        whole = self._numbers // 4
        # Blocks first, so that both passes below run over memory in its order.
        blocks = np.zeros((self._blocks, len(values), 4), np.float32)
        split = values[:, : 4 * whole].reshape(len(values), whole, 4).transpose(1, 0, 2)
        # Zero is added, because -0 + 0 is 0.
        np.add(split, np.float32(0), out=blocks[:whole])
        if rest := self._numbers % 4:
            np.add(values[:, 4 * whole :], np.float32(0), out=blocks[whole, :, :rest])
        unknown = np.isnan(blocks)
        if unknown.any():
            blocks[unknown] = np.nan
        words = blocks.view(np.uint64)
        words ^= masks
        encrypted = _encrypted(self._cipher, words).reshape(self._blocks, -1)
        found: NDArray[np.uint64] = np.bitwise_xor.reduce(encrypted, axis=0).reshape(len(values), 2)
        return found


def _code_key(key: Secret, *fields: str | int) -> bytes:
    return derive(key, Purpose.DATASET_CODES, *fields).reveal()


def _cipher(key: Secret, *fields: str | int) -> CipherContext:
    # Single blocks of a keyed permutation, so there is nothing for a mode to chain.
    return Cipher(algorithms.AES256(_code_key(key, *fields)), modes.ECB()).encryptor()


def _encrypted(cipher: CipherContext, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return each block of 16 bytes, [..., 2], encrypted."""
    plain = np.ascontiguousarray(blocks)
    out = bytearray(plain.nbytes + _BLOCK - 1)
    cipher.update_into(plain.view(np.uint8).reshape(-1).data, out)
    return np.frombuffer(out, np.uint64, plain.size).reshape(plain.shape)
