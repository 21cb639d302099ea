"""The fingerprint of a dataset: a digest by which an account knows the data it was opened for.

The fingerprint of a sealed dataset is the digest of its header, which commits to every encrypted file. Anyone may see
it: the files are encrypted under random keys. Any other fingerprint is keyed, because manifest and ledger show it. A
plain digest there would reveal the last unknown example to anyone who knows all the others. The key is a file beside
the data, for people who may read the data anyway.

Guarantee: a worker that states a fingerprint held the key, and read all its examples from these bytes; or it opens only
sealed slices of this header. The file is read once: examples and digest come from one copy in memory. Two fingerprints
under one key are equal exactly if the data is.

Not guaranteed: that the data is about certain people. Nor that another file, such as a copy in another order or a
second seal, is about others.
"""

import re
from pathlib import Path

import numpy as np

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.files.private import read_private
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.datasets import slice_digest
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset
from raycloak.workers.inputs.sealed import SealedDataset

# A key that was typed or cut short must not pass for one of 32 random bytes.
_HEX = re.compile(rb"[0-9a-fA-F]{64}")


def dataset_fingerprint(descriptor: DatasetDescriptor, opened: OpenedDataset, base: Path | str) -> bytes:
    """Return 32 bytes, or none without a key for data in the clear.

    The fingerprint of a file depends on its bytes alone: not on its place, nor on the columns that a run reads, nor on
    their scale. That of data from no single file depends on every example, and reads them all.

    Args:
        opened: from ``descriptor`` below the folder ``base``.

    Raises:
        ConfigError: ``fingerprint_key`` if the key's file cannot be read, is not 64 hexadecimal digits, or others may
            read it.
        DatasetError: ``data_changed``, if a function's dataset does not give the same examples twice.
    """
    if isinstance(opened.examples, SealedDataset):
        return opened.examples.header.digest()
    if descriptor.fingerprint_key is None:
        return b""
    key = load_key(Path(base) / descriptor.fingerprint_key)
    if opened.file_digest:
        return _keyed(key, "file", opened.file_digest)
    everything = np.arange(len(opened.examples), dtype=np.int64)
    return _keyed(key, "examples", slice_digest(opened.examples, everything))


def check_digest(key: Secret, report: bytes) -> bytes:
    """Return 32 bytes that name the report of a check: keyed, since a report is counts that could be tried out.

    Args:
        key: of the fingerprint, or the data owner's of a sealed dataset.
        report: its SHA-256.
    """
    return _keyed(key, "check", report)


def _keyed(key: Secret, what: str, content: bytes) -> bytes:
    return derive(key, Purpose.DATASET_FINGERPRINT, what, content).reveal()


def load_key(path: Path) -> Secret:
    """Read the key of a fingerprint; ConfigError ``fingerprint_key``."""
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
