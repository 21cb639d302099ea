"""Sealed data: a dataset that is encrypted per slice for one policy, and the keys of its slices.

Guarantee: without the key of a slice, only the header's clear text is known: shapes, types, counts and sizes. A slice
opens only at its place in this dataset, for the policy and the use (training or evaluation) it was sealed for. Training
data opens only in runs that meet its owner's demand (`raycloak.attestation.sealed.demand`). The orchestrator releases
slice keys with the virtual-worker keys, to workers that were appraised by that policy. It has no key of the same slice
for any other policy, use or demand.
Not guaranteed: that the data owner's dataset key, a file that the orchestrator reads, stays where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from raycloak.attestation.core.canonical import canonical_json, length_prefixed
from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import Message, parse_stored
from raycloak.attestation.files.private import read_hex_key
from raycloak.attestation.keys.release import key_commitment
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.sealed.demand import SealedDemand, StatedRun
from raycloak.attestation.sealed.package_manifest import Payload
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError
from raycloak.metrics.file_errors import file_error

Use = Literal["training", "evaluation"]
"""The use that a dataset was sealed for. Training results leave with noise only, evaluation results as they are."""

HEADER_FILE = "header.json"
PAYLOAD = "slice.enc"
_PURPOSES: dict[Use, Purpose] = {
    "training": Purpose.SEALED_SLICE,
    "evaluation": Purpose.SEALED_EVALUATION_SLICE,
}


class SealedHeader(Message):
    """The clear text of a sealed dataset.

    Attributes:
        use: the use that its slices may be opened for.
        dataset_id: 16 random bytes, drawn when it was sealed.
        virtual_workers: number of slices; example i, or unit i with all its rows, is in slice i mod V.
        policy_digest: digest of the evidence policy that it was sealed for.
        demand: the owner's demand of every run that trains on it; None for an evaluation split, whose results are
            exact.
        form: shapes and types of the examples.
        unit: public name of the units whose rows the examples are; None, and left out of the bytes, where each example
            is a unit of its own.
        marks: fingerprint and sketch of the examples under the owner's key, by which another seal of them is known.
        key_commitments: the commitments to the slice keys.
        slices: the encrypted file of each slice.
    """

    DOMAIN: ClassVar[str] = "raycloak/sealed-data/header/v1"

    format: Literal[4] = 4
    use: Use
    dataset_id: bytes = Field(min_length=16, max_length=16)
    virtual_workers: int = Field(gt=0)
    policy_digest: bytes = Field(min_length=32, max_length=32)
    demand: SealedDemand | None
    form: dict[str, JsonValue]
    unit: str | None = Field(default=None, exclude_if=lambda unit: unit is None)
    marks: DataMarks
    key_commitments: tuple[bytes, ...]
    slices: tuple[Payload, ...] = ()

    @model_validator(mode="after")
    def _demand_of_use(self) -> Self:
        if (self.use == "training") != (self.demand is not None):
            raise ValueError("training data comes with a demand, an evaluation split without")
        return self

    def context(self, v: int) -> bytes:
        """Return the context that slice ``v`` and its key are bound to."""
        demand = b"" if self.demand is None else self.demand.digest()
        form = canonical_json(self.form)
        fields = (self.use, self.dataset_id, self.virtual_workers, self.policy_digest, demand, form, v)
        # Without units the context is what it was before there were any.
        units = () if self.unit is None else (self.unit,)
        return length_prefixed("raycloak/sealed-data/slice/v3", *fields, *units)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the header of the sealed dataset in ``folder``.

        Raises:
            ConfigError: ``sealed_data`` if there is none; ``former_format``.
        """
        try:
            content = (folder / HEADER_FILE).read_bytes()
            header = parse_stored(cls, content, str(folder / HEADER_FILE))
        except OSError as error:
            raise file_error("sealed_data", "read", folder / HEADER_FILE, error) from None
        except ProtocolError:
            raise ConfigError(
                "sealed_data",
                f"{folder / HEADER_FILE} is not the header of a sealed dataset.",
                "Seal one: raycloak data seal.",
            ) from None
        if not len(header.slices) == len(header.key_commitments) == header.virtual_workers:
            raise ConfigError(
                "sealed_data",
                f"{folder} does not have one slice for each virtual worker.",
                "Seal it again: raycloak data seal.",
            )
        return header

    def require_use(self, use: Use) -> None:
        """Raise ConfigError ``sealed_data`` unless the dataset was sealed for ``use``."""
        if self.use != use:
            raise ConfigError(
                "sealed_data",
                f"the dataset is sealed for {self.use}, and no key of it opens anything for {use}.",
                f"Seal it with raycloak data seal --part {use}.",
            )


def slice_file(folder: Path, v: int) -> Path:
    """Return the path of slice ``v``'s encrypted file."""
    return folder / f"slice-{v:05d}.enc"


def slice_key(dataset_key: Secret, header: SealedHeader, v: int) -> Secret:
    """Derive the key of slice ``v``. Only the data owner and the orchestrator can.

    Guarantee: another policy, use, demand, form, unit or number of slices in ``header`` gives another key. So an
    attacker may show the orchestrator a header with a weaker policy or demand, or training data as an evaluation split.
    The keys released for it open no slice.
    """
    return derive(dataset_key, _PURPOSES[header.use], header.context(v))


def load_dataset_key(path: Path) -> Secret:
    """Read the data owner's key, 64 hexadecimal digits in a file of mode 0600; ConfigError ``dataset_key``."""
    return Secret(read_hex_key(path, "dataset_key", "Use the key it was sealed with.", owner_alone=True))


@dataclass(frozen=True, slots=True)
class SealedSource:
    """The orchestrator's view of a run's sealed data: the header, and the path of the dataset key."""

    header: SealedHeader
    key_file: str


@dataclass(frozen=True, slots=True, repr=False)
class SliceKeys:
    """The slice keys of a sealed dataset, as the orchestrator holds them."""

    header: SealedHeader
    dataset_key: Secret

    @classmethod
    def open(cls, terms: SealedSource, use: Use) -> Self:
        """Read the dataset key.

        Raises:
            ConfigError: ``sealed_data`` if the dataset was not sealed for ``use``. ``dataset_key`` if it was sealed
                with another key.
        """
        terms.header.require_use(use)
        keys = cls(terms.header, load_dataset_key(Path(terms.key_file)))
        # One slice's commitment identifies the dataset key, because every slice key derives from it.
        if key_commitment(keys.of(0)) != terms.header.key_commitments[0]:
            raise ConfigError(
                "dataset_key",
                f"{terms.key_file} is not the key that the dataset was sealed with.",
                "Name that key as key_file.",
            )
        return keys

    def of(self, v: int) -> Secret:
        """Derive the key of slice ``v``."""
        return slice_key(self.dataset_key, self.header, v)

    def require_demand(self, manifest: bytes, manifest_digest: bytes) -> None:
        """Require that the manifest with this digest meets the owner's demand, if there is one.

        Args:
            manifest: the manifest's bytes; no trust is placed in their origin.

        Raises:
            EvidenceError: ``sealed_demand``.
        """
        if self.header.demand is not None:
            self.header.demand.require(StatedRun.read(manifest, manifest_digest))

    def require_code(self, policy: Policy, manifest: bytes, manifest_digest: bytes) -> None:
        """Require that ``policy``, which the dataset is sealed for, lists the code that the manifest states.

        Args:
            manifest: as of :meth:`require_demand`.

        Raises:
            EvidenceError: ``code_unlisted``; ``sealed_demand`` for the bytes of another manifest.
        """
        if policy.code is not None:
            policy.require_code(StatedRun.read(manifest, manifest_digest).code, "the run")

    def require_policy(self, evidence_policy: bytes) -> None:
        """Raise EvidenceError ``release_denied`` unless the dataset was sealed for this policy."""
        if self.header.policy_digest != evidence_policy:
            raise EvidenceError(
                "release_denied",
                f"the dataset is sealed for the policy {self.header.policy_digest.hex()}, and the run's is "
                f"{evidence_policy.hex()}",
                "Seal it for the policy of the run: raycloak data seal.",
            )


def require_committed(header: SealedHeader, keys: Sequence[tuple[int, Secret]]) -> None:
    """Raise EvidenceError ``key_not_committed`` unless ``header`` commits to every key for its slice."""
    for v, key in keys:
        if v >= len(header.key_commitments) or key_commitment(key) != header.key_commitments[v]:
            raise EvidenceError("key_not_committed", f"the key of slice {v} is not the one the dataset was sealed with")
