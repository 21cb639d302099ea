"""The fingerprint of a dataset: a keyed digest by which an account knows the data it was opened for.

It is keyed because a plain digest of private examples tells whoever knows all of them but one what that one is, and
it would lie in manifest and ledger. The key is a file beside the data, for those who may read the data anyway.

What it shows: that whoever computed it held the key and opened these bytes. Two fingerprints under one key are the
same exactly if the data is. What it does not show: that the data is of certain people, or that another file, say a
copy in another order, is not of the same ones.
"""

import hashlib
import re
from pathlib import Path

import numpy as np

from attestation.keys import Purpose, Secret, derive
from attestation.private_files import read_private
from metrics.errors import ConfigError, DatasetError
from metrics.file_errors import file_error
from workers.datasets import Dataset, slice_digest
from workers.descriptor import DatasetDescriptor

_HEX = re.compile(rb"[0-9a-fA-F]{64}")


def dataset_fingerprint(descriptor: DatasetDescriptor, dataset: Dataset, base: Path | str) -> bytes:
    """32 bytes, or none without a key; reads the whole dataset once.

    Of a file they depend on its bytes alone, so neither on where it lies nor on which columns a run reads or how it
    scales them; of data from a function or scikit-learn on every example.

    Args:
        dataset: what ``descriptor`` opens below the folder ``base``.

    Raises:
        ConfigError: ``fingerprint_key`` if the key's file cannot be read, is not 64 hexadecimal digits, or others may
            read it.
        DatasetError: ``dataset_unreadable``.
    """
    if descriptor.fingerprint_key is None:
        return b""
    key = _load_key(Path(base) / descriptor.fingerprint_key)
    if descriptor.path is None:
        return _keyed(key, "examples", slice_digest(dataset, np.arange(len(dataset), dtype=np.int64)))
    try:
        with (Path(base) / descriptor.path).open("rb") as file:
            return _keyed(key, "file", hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise file_error("dataset_unreadable", "read", descriptor.path, error, DatasetError) from None


def _keyed(key: Secret, what: str, content: bytes) -> bytes:
    return derive(key, Purpose.DATASET_FINGERPRINT, what, content).reveal()


def _load_key(path: Path) -> Secret:
    try:
        text = read_private(path, "fingerprint_key").strip()
    except OSError as error:
        raise file_error("fingerprint_key", "read", path, error) from None
    if not _HEX.fullmatch(text):
        raise ConfigError(
            "fingerprint_key",
            f"{path} must hold 64 hexadecimal digits.",
            "Make one: (umask 077; openssl rand -hex 32 > FILE).",
        )
    return Secret(bytes.fromhex(text.decode()))
