"""Seals the virtual-worker keys of one member, derived from the run secret, to its attested key.

HPKE (RFC 9180) with the hybrid KEM of ML-KEM-768 and X25519. The orchestrator that the manifest names signs a package.
The worker checks its keys against the manifest's commitments, and accepts no others. A proof that the evidence log has
the release comes with the package: a worker accepts no key that left without being logged.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

from pydantic import JsonValue

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.hpke import HpkeKey, hpke_seal
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.keys import SECRET_BYTES, IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.attestation.log.entries import EntryProof, LogHead
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.policy.key_policy import KeyKind, KeyPolicy
from raycloak.attestation.policy.policy import Policy
from raycloak.metrics.errors import EvidenceError


class KeyContract(Message):
    """The base of the documents that keys are derived for: the manifest of a run, the contract of a service.

    Attributes:
        run_id: derived from the secret that the keys come from.
        known_answer: digest of the result on a public input that every worker must present.
        policy_digest: digest of the policy that evidence is judged by.
        key_commitments: per epoch, digest of the commitments to all virtual-worker keys.
        keys_per_machine: most virtual workers whose keys of one epoch may ever go to one platform or GPU; None for any
            number.
    """

    run_id: str
    known_answer: bytes
    policy_digest: bytes
    key_commitments: tuple[bytes, ...]
    keys_per_machine: int | None = None

    @property
    @abstractmethod
    def key_owners(self) -> int:
        """The number of virtual workers, each of which has keys in every epoch."""

    @property
    def lineage(self) -> Lineage | None:
        """The terms by which each model of a run follows from the one before; None where no aggregator makes them."""
        return None

    @property
    def epochs(self) -> int:
        """The number of key epochs that the contract commits to."""
        return len(self.key_commitments)

    @property
    def key_context(self) -> bytes:
        """The part of every key that says what it is for.

        Guarantee: differs with every field but ``key_commitments``, which follow from the keys. So another account,
        policy, ledger, model or numerics class has other keys, even under one run secret.
        """
        return digest(length_prefixed("raycloak/key-context/v2", self.with_keys(()).digest()))

    def with_keys(self, key_commitments: tuple[bytes, ...]) -> Self:
        """Return the same document with these ``key_commitments``."""
        return self.model_copy(update={"key_commitments": key_commitments})


class KeyPackage(Message):
    """A package of virtual-worker keys of one epoch, for one member.

    Attributes:
        session: the execution of the run in which it is released.
        policy_digest: digest of its kind's `raycloak.attestation.policy.key_policy.KeyPolicy`.
        nonce: the nonce that the evidence answered. With ``evidence_digest`` it names the presentation behind the
            release.
        virtual_workers: the virtual workers whose keys are inside, ascending.
        commitments: of the keys of all V virtual workers in this epoch; the manifest holds their digest.
        ciphertext: HPKE of the concatenated key pairs (2 x 32 bytes each), with all other fields in ``info``.
    """

    DOMAIN: ClassVar[str] = "raycloak/key-package/v1"

    kind: KeyKind
    run_id: str
    session: str
    member_id: str
    manifest_digest: bytes
    policy_digest: bytes
    nonce: bytes
    evidence_digest: bytes
    epoch: int
    virtual_workers: tuple[int, ...]
    commitments: tuple[bytes, ...]
    ciphertext: bytes

    def info(self) -> bytes:
        """Return the HPKE context: every field but the ciphertext."""
        return _info(self.model_copy(update={"ciphertext": b""}) if self.ciphertext else self)


@lru_cache(maxsize=16)  # the log, the encryption and the receiver all ask for it
def _info(package: KeyPackage) -> bytes:
    return package.digest()


class KeyRelease(Message):
    """The keys that a member is sent, with their proof.

    Attributes:
        package: a signed :class:`KeyPackage`.
        proof: an `raycloak.attestation.log.entries.EntryProof` of the release, encoded.
        slices: the release of the slices' keys, where the data is sealed.
        evaluation: the release of the evaluation split's keys, where that is sealed.
        extends: proof that the head in ``proof`` extends the newest one that the member had seen; empty if none.
    """

    DOMAIN: ClassVar[str] = "raycloak/key-release/v1"

    package: Envelope
    proof: bytes
    slices: "KeyRelease | None" = None
    evaluation: "KeyRelease | None" = None
    extends: tuple[bytes, ...] = ()

    @property
    def log_length(self) -> int:
        """Return the entries under the head in ``proof``; ProtocolError ``malformed``. For parties that relay it."""
        return parse(LogHead, parse(EntryProof, self.proof).head.head).length


def released_body(package: KeyPackage) -> dict[str, JsonValue]:
    """Return the body of the log entry, kind ``released``, that records a release."""
    return {
        "kind": package.kind.value,
        "member_id": package.member_id,
        "epoch": package.epoch,
        "virtual_workers": list(package.virtual_workers),
        "evidence_digest": package.evidence_digest.hex(),
        "package": package.info().hex(),
    }


@dataclass(frozen=True, slots=True, repr=False)
class VirtualWorkerKeys:
    """The keys that the host of a virtual worker holds.

    Attributes:
        stream: root of its sampling, noise and tag keys in one epoch.
        data: key of its data commitment. It is the same in every epoch, so that a swapped slice shows in any epoch.
        sent: opens what the owner's clients send it in one epoch; None unless the owner has a key service.
    """

    stream: Secret
    data: Secret
    sent: Secret | None = None


@dataclass(frozen=True, slots=True, repr=False)
class RunKeys:
    """The keys of a run. Only the holder of its secret can derive them."""

    secret: Secret
    run_id: str

    def of(self, key_context: bytes, v: int, epoch: int) -> VirtualWorkerKeys:
        """Derive the keys of virtual worker ``v`` in ``epoch``."""
        return VirtualWorkerKeys(
            stream=derive(self.secret, Purpose.VIRTUAL_WORKER, self.run_id, key_context, v, epoch),
            # Without context and epoch, because the key must be the same in every epoch.
            data=derive(self.secret, Purpose.DATA_COMMITMENT, self.run_id, v),
        )

    def commitments(self, key_context: bytes, virtual_workers: int, epoch: int) -> tuple[bytes, ...]:
        """Return the commitments of one epoch, by virtual worker."""
        return tuple(key_commitment(self.of(key_context, v, epoch).stream) for v in range(virtual_workers))


def key_commitment(key: Secret) -> bytes:
    """Derive 32 bytes that fix ``key`` and tell nothing about it: a keyed PRF of the key itself."""
    return derive(key, Purpose.KEY_COMMITMENT).reveal()


def commitments_digest(commitments: Sequence[bytes]) -> bytes:
    """Return the digest of one epoch's commitments, as the manifest holds it."""
    return digest(length_prefixed(Purpose.KEY_COMMITMENT, *commitments))


def seal_package(package: KeyPackage, plaintext: bytes, recipient: bytes, signer: IdentityKey) -> Envelope:
    """Encrypt ``plaintext`` to ``recipient`` and sign the package."""
    ciphertext = hpke_seal(plaintext, recipient, package.info())
    return seal(package.model_copy(update={"ciphertext": ciphertext}), signer)


@dataclass(frozen=True, slots=True)
class ExpectedRelease:
    """The expectations that a member checks its key packages against.

    Attributes:
        orchestrator: the manifest's public keys, which must sign packages and heads of the log.
        policy: the run's policy.
        keys_per_machine: the manifest's bound, under which virtual workers' keys must have been released.
        watch: heads of the log that the member has seen; None for a member that remembers nothing.
    """

    orchestrator: SignerPublic
    run_id: str
    member_id: str
    manifest_digest: bytes
    policy: Policy
    watch: LogWatch | None = None
    keys_per_machine: int | None = None

    def open(self, release: KeyRelease, kind: KeyKind, hpke_key: HpkeKey) -> tuple[KeyPackage, bytes]:
        """Verify and decrypt a package. Commitments to the keys in it are not checked here."""
        # Verified first: nothing in an unsigned package is interpreted.
        package = open_envelope(KeyPackage, release.package, self.orchestrator.ed25519)
        expected = (self.run_id, self.member_id, self.manifest_digest)
        if (package.run_id, package.member_id, package.manifest_digest) != expected:
            raise EvidenceError("key_package_mismatch", "the key package is for another run, member or manifest")
        # A package of one kind must not pass for another, nor one under weaker terms.
        terms = KeyPolicy.of(kind, self.policy, self.keys_per_machine)
        if (package.kind, package.policy_digest) != (kind, terms.digest()):
            raise EvidenceError("key_package_mismatch", "the key package is of another kind, or under another policy")
        entry, head = parse(EntryProof, release.proof).check(self.orchestrator, self.run_id)
        if self.watch is not None:
            self.watch.accept(head, release.extends)
        if (entry.kind, entry.content) != ("released", released_body(package)):
            raise EvidenceError("release_not_logged", f"entry {entry.sequence} of the log is not this release")
        # Opened last: a worker takes no key that left without being logged.
        return package, hpke_key.open(package.ciphertext, package.info())


def _keys_in(package: KeyPackage, plaintext: bytes, each: int) -> list[Secret]:
    """Split the plaintext into the ``each`` keys of every virtual worker of ``package``, in order."""
    if len(plaintext) != each * SECRET_BYTES * len(package.virtual_workers):
        raise EvidenceError("key_package_mismatch", "the key package holds a different number of keys than it names")
    return [Secret(plaintext[i : i + SECRET_BYTES]) for i in range(0, len(plaintext), SECRET_BYTES)]


def open_slice_keys(
    release: KeyRelease | None, kind: KeyKind, terms: ExpectedRelease, hpke_key: HpkeKey
) -> dict[int, Secret]:
    """Verify and decrypt a package of slice keys. The header of the dataset tells whether they are the right ones.

    Args:
        release: None if there is none, and then there are no keys.
        kind: ``DATASET`` or ``EVALUATION``.

    Raises:
        ProtocolError, EvidenceError: as :func:`open_keys`.
    """
    if release is None:
        return {}
    package, plaintext = terms.open(release, kind, hpke_key)
    return dict(zip(package.virtual_workers, _keys_in(package, plaintext, 1), strict=True))


def open_keys(
    release: KeyRelease, terms: ExpectedRelease, *, hpke_key: HpkeKey, key_commitments: Sequence[bytes]
) -> tuple[int, Mapping[int, VirtualWorkerKeys]]:
    """Verify and decrypt a package; return (epoch, keys by virtual worker).

    Guarantee: the manifest's commitment of the epoch fixes every returned stream key. The orchestrator signed the
    package for this run, member and manifest. Its evidence log has exactly this release.

    Raises:
        ProtocolError: ``signature`` or ``malformed``.
        EvidenceError: ``key_package_mismatch``, ``key_not_for_us`` or ``key_not_committed``. ``log_broken`` or
            ``release_not_logged`` if the log lacks the release. ``log_forked`` if it is another log than before.
    """
    package, plaintext = terms.open(release, KeyKind.VIRTUAL_WORKER, hpke_key)
    in_manifest = package.epoch < len(key_commitments)
    if not in_manifest or commitments_digest(package.commitments) != key_commitments[package.epoch]:
        raise EvidenceError("key_not_committed", f"the manifest does not commit to the keys of epoch {package.epoch}")
    chunks = _keys_in(package, plaintext, 2)
    pairs = zip(package.virtual_workers, chunks[::2], chunks[1::2], strict=True)
    keys = {v: VirtualWorkerKeys(stream, data) for v, stream, data in pairs}
    for v, key in keys.items():
        if v >= len(package.commitments) or key_commitment(key.stream) != package.commitments[v]:
            raise EvidenceError("key_not_committed", f"the key of virtual worker {v} is not the committed one")
    return package.epoch, keys
