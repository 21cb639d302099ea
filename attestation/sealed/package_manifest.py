"""A sealed package's manifest, and the codes with which a package is refused.

The manifest is canonical JSON, and both signatures cover its bytes. It names every file of the package by size and
SHA-256. So once it is verified, a package can be checked without any key that opens it.
"""

from enum import StrEnum
from typing import ClassVar, Final, Literal, NoReturn, Self

from pydantic import Field, model_validator

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import EvidenceError

FORMAT: Final = 2
# AES-GCM's.
TAG_BYTES = 16
NONCE_PREFIX_BYTES = 7  # with four bytes of position and one end mark, the 12-byte nonce of AES-GCM


class PackageRefusal(StrEnum):
    """The reason for which a package is refused; the value is the code of the EvidenceError."""

    remedy: str

    def __new__(cls, code: str, remedy: str = "Do not use this package.") -> Self:
        member = str.__new__(cls, code)
        member._value_, member.remedy = code, remedy
        return member

    MALFORMED = "package_malformed"
    """Manifest or signature cannot be read, or is not in canonical form."""
    UNKNOWN_SIGNER = "package_unknown_signer", "If you trust its signer: raycloak package trust."
    """The trust store does not have the signer's keys."""
    SIGNATURE = "package_signature"
    """Neither signature verifies."""
    HALF_SIGNED = "package_half_signed"
    """Only one of the two signatures verifies."""
    FILE_MISSING = "package_file_missing"
    """A file that the manifest names is not there."""
    STRAY_FILE = "package_stray_file"
    """A file is there that the manifest does not name."""
    FILE_CHANGED = "package_file_changed"
    """A file has another size or other bytes than the manifest says, or a chunk is not the one of its place."""
    OTHER_RUN = "package_other_run"
    """The package is of another run than the reader asked for."""
    OTHER_STEP = "package_other_step"
    """The package is of another step than its name says, or than the reader asked for."""
    ROLLED_BACK = "package_rolled_back", "Bring back the newest package, or find out who removed it."
    """A newer package was published than the one presented as the newest."""
    LEDGER_ROLLED_BACK = (
        "ledger_rolled_back",
        "Bring back the newest state of the ledger; older ones forget what was spent.",
    )
    """The ledger does not have the entry that the package was sealed after."""
    LOG_ROLLED_BACK = "log_rolled_back", "Bring back the newest state of the orchestrator."
    """The evidence log does not have the entry that the package was sealed after."""
    NOT_A_RECIPIENT = "not_a_recipient", "Ask one of its recipients, or use the key file that belongs to one of them."
    """The package was not sealed to this key."""
    PARAMETERS_DIFFER = "package_parameters_differ"
    """The decrypted parameters, or averaged weights, do not have the digest that the manifest states."""


def refuse(refusal: PackageRefusal, message: str) -> NoReturn:
    """Raise the EvidenceError of ``refusal``."""
    raise EvidenceError(refusal, f"the package is refused: {message}", refusal.remedy) from None


class Payload(Message):
    """An encrypted file of a package.

    Attributes:
        name: name of the file.
        plain_bytes, cipher_bytes: sizes before and after encryption.
        chunk_bytes: plaintext bytes of every chunk but the last, which is shorter or equal.
        chunks: number of chunks, at least one.
        sha256: digest of the encrypted file.
        nonce_prefix: first 7 bytes of every chunk's nonce.
    """

    DOMAIN: ClassVar[str] = "raycloak/package/payload-entry/v1"

    name: str = Field(pattern=r"^[a-z]+(\.[a-z]+)*\.enc$")
    plain_bytes: int = Field(ge=0)
    cipher_bytes: int = Field(ge=0)
    # Bounded, because a reader holds whole chunks in memory.
    chunk_bytes: int = Field(gt=0, le=2**24)
    chunks: int = Field(gt=0, lt=2**32)  # a nonce gives the position four bytes
    sha256: bytes
    nonce_prefix: bytes = Field(min_length=NONCE_PREFIX_BYTES, max_length=NONCE_PREFIX_BYTES)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.chunks != chunk_count(self.plain_bytes, self.chunk_bytes):
            raise ValueError("the number of chunks does not follow from the sizes")
        if self.cipher_bytes != self.plain_bytes + TAG_BYTES * self.chunks:
            raise ValueError("the size of the encrypted file does not follow from that of its content")
        return self


def chunk_count(plain_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks of a payload; an empty one has one empty chunk."""
    return max(1, -(-plain_bytes // chunk_bytes))


class Recipient(Message):
    """A party that can open a package. ``wrapped_key`` is the data key, HPKE-sealed to the key of ``key_id``."""

    DOMAIN: ClassVar[str] = "raycloak/package/recipient-entry/v1"

    name: str
    key_id: bytes
    wrapped_key: bytes


class PackageManifest(Message):
    """The statements of a package.

    Attributes:
        format: version of the format.
        run_id, manifest_digest: the run, and the digest of its manifest, which lies in the package in the clear.
        step: number of finished steps.
        ranges: number of parameter ranges that the optimizer state is cut into.
        model_digest: of the released parameters after ``step`` steps.
        averaged_digest: of the averaged weights; left out of the bytes where the run keeps none.
        epsilon, delta: what the run claims, of its whole plan and not of the steps so far: which package is used may
            depend on what was released. epsilon is None for a run that is not private.
        evidence_class: of the run's members.
        roster_digest: of the roster under which the last step was computed.
        ledger_sequence, ledger_hash: the ledger's newest entry about the last step, its binding.
        log_length, log_hash: entries of the evidence log at the time of the snapshot, and the Merkle root over them.
        previous: digest of the package published before this one; empty for the first.
        evaluation_accuracy, evaluation_loss: released metrics of these parameters.
        created_at: unix seconds.
        payloads, recipients: see :class:`Payload` and :class:`Recipient`.
    """

    DOMAIN: ClassVar[str] = "raycloak/package/manifest/v1"

    format: Literal[2] = FORMAT
    run_id: str
    manifest_digest: bytes
    step: int = Field(gt=0)
    ranges: int = Field(gt=0)
    model_digest: bytes
    averaged_digest: bytes = Field(default=b"", exclude_if=lambda averaged: not averaged)
    epsilon: float | None
    delta: float
    evidence_class: str
    roster_digest: bytes
    ledger_sequence: int
    ledger_hash: bytes
    log_length: int
    log_hash: bytes
    previous: bytes
    evaluation_accuracy: float | None
    evaluation_loss: float | None
    created_at: int
    payloads: tuple[Payload, ...]
    recipients: tuple[Recipient, ...]

    def info(self) -> bytes:
        """Return the HPKE context of the data key: everything but the wrapped keys."""
        # The wrapped keys are sealed under this context, so they cannot be part of it.
        unwrapped = tuple(each.model_copy(update={"wrapped_key": b""}) for each in self.recipients)
        return self.model_copy(update={"recipients": unwrapped}).digest()

    def context(self) -> bytes:
        """Return the context that every payload's key is derived for, besides the payload's name."""
        return package_context(self.run_id, self.manifest_digest, self.step, self.model_digest)


def package_context(run_id: str, manifest_digest: bytes, step: int, model_digest: bytes) -> bytes:
    """Compute :meth:`PackageManifest.context` from its fields, before the payloads are encrypted."""
    return digest(length_prefixed("raycloak/package/context/v1", run_id, manifest_digest, step, model_digest))
