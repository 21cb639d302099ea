"""The marks of a dataset, by which the ledger knows whose account pays; see `raycloak.attestation.core.data_marks`.

Fingerprint and sketch of data in the clear are keyed, because manifest and ledger show them. A plain digest there would
reveal the last unknown example to anyone who knows all the others. The key is a file beside the data, for people who
may read the data anyway. A sealed dataset has the digest of its header, which commits to every encrypted file, and the
sketch that its owner computed when it was sealed.

Guarantee: a worker that states a fingerprint held the key and read all its examples, or opens only sealed slices of
this header. Two fingerprints under one key are equal exactly if the examples are, in whatever order.

Guarantee: marks are of the data alone, whatever an audit adds to it.

Not guaranteed: that the data is about certain people. Nor that examples which were changed, or cut in another way, are
recognised anywhere but at their place.
"""

import re
from pathlib import Path

from raycloak.attestation.core.data_marks import PLACE_BYTES, DataMarks, joined
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.files.private import read_private
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_errors
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset
from raycloak.workers.inputs.example_codes import example_marks
from raycloak.workers.inputs.sealed import SealedDataset

# A key that was typed or cut short must not pass for one of 32 random bytes.
_HEX = re.compile(rb"[0-9a-fA-F]{64}")


def data_marks(descriptor: DatasetDescriptor, opened: OpenedDataset, base: Path | str) -> DataMarks:
    """Return what the data is known by. With a key, it reads every example.

    Neither the columns that a run reads of a file nor their scale change every mark: the bytes of files are one, too.

    Args:
        opened: from ``descriptor`` below the folder ``base``.

    Raises:
        ConfigError: ``fingerprint_key`` if the key's file cannot be read, is not 64 hexadecimal digits, or others may
            read it.
        DatasetError: ``data_changed``, if a function's dataset does not give the same examples twice.
    """
    examples, places = opened.own_examples, opened.places
    if isinstance(examples, SealedDataset):
        header = examples.header
        return header.marks.model_copy(update={"fingerprint": header.digest(), "places": joined(places)})
    if descriptor.fingerprint_key is None:
        return DataMarks(places=joined(places))
    key = load_key(Path(base) / descriptor.fingerprint_key)
    if opened.file_digest:
        places |= {_keyed(key, "file", opened.file_digest)[:PLACE_BYTES]}
    return example_marks(examples, key).model_copy(update={"places": joined(places)})


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
    with file_errors("fingerprint_key", "read", path):
        text = read_private(path, "fingerprint_key").strip()
    if not _HEX.fullmatch(text):
        raise ConfigError(
            "fingerprint_key",
            f"{path} must hold 64 hexadecimal digits.",
            "Make one: (umask 077; openssl rand -hex 32 > FILE).",
        )
    return Secret(bytes.fromhex(text.decode()))
