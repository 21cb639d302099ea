"""The messages of attestation: challenge, presentation and collateral; and the codes that a refusal may have.

The roles are RFC 9334's. A challenge goes to an attester, whose presentation comes back in an envelope signed by the
identity key it presents. The verifier appraises it with collateral that it obtained over its own channel.
"""

import json
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NoReturn, Self

from pydantic import Field, model_validator

from raycloak.attestation.core.canonical import read_json
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import EvidenceError

NONCE_BYTES = 32
MLKEM_BYTES = 1184  # an ML-KEM-768 public key (FIPS 203)
HPKE_KEY_BYTES = MLKEM_BYTES + 32
REPORT_DATA_BYTES = 64  # in TDX quotes and SEV-SNP reports alike
MEASUREMENT_BYTES = 48  # SHA-384, in both formats

Role = Literal["worker", "aggregator", "orchestrator", "observer"]
QuoteFamily = Literal["tdx", "sev_snp"]
Bytes32 = Annotated[bytes, Field(min_length=32, max_length=32)]
CodeDigest = Bytes32 | Literal[b""]
"""Digest of the bundle of code that a run's own code is in; empty for none, or under a policy that lists no code."""
Links = Literal["not attested", "clear over attested switches", "encrypted"]
"""The links between the GPUs of one worker, as evidence shows them; the weakest first."""
Name = Annotated[str, Field(min_length=1, max_length=200)]


class EvidenceClass(StrEnum):
    """The kind of root that vouches for a piece of evidence."""

    SIMULATED = "simulated"
    INTEL_TDX = "intel_tdx"
    AMD_SEV_SNP = "amd_sev_snp"
    NVIDIA_GPU = "nvidia_gpu"


class Refusal(StrEnum):
    """A code of refused evidence, in the order in which stages are judged. The first that fails sets exactly one.

    Attributes:
        stage: the name of its stage.
        remedy: what a person can do about it; empty if nothing is to be said.
    """

    stage: str
    remedy: str

    def __new__(cls, code: str, stage: str, remedy: str = "") -> Self:
        member = str.__new__(cls, code)
        member._value_, member.stage, member.remedy = code, stage, remedy
        return member

    EVIDENCE_MALFORMED = "evidence_malformed", "format"
    ROOT_UNKNOWN = "root_unknown", "root", "Compare the anchors of the policy with the hardware that is used."
    SIMULATOR_NOT_ALLOWED = (
        *("simulator_not_allowed", "root"),
        "Run on hardware of an accepted class, or accept simulated evidence on purpose.",
    )
    CHAIN_BROKEN = "chain_broken", "chain"
    PLATFORM_MISMATCH = "platform_mismatch", "platform"
    ATTESTATION_KEY_UNCERTIFIED = "attestation_key_uncertified", "attestation key"
    EVIDENCE_TAMPERED = "evidence_tampered", "signatures"
    SIGNER_ROLE = "signer_role", "signer roles"
    REVOKED = "revoked", "revocation"
    COLLATERAL_STALE = "collateral_stale", "validity", "Fetch current collateral and check the verifier's clock."
    COLLATERAL_ROLLBACK = "collateral_rollback", "rollback", "Fetch current collateral from the vendor."
    TCB_UNACCEPTABLE = "tcb_unacceptable", "TCB level", "Update the platform's firmware."
    TCB_STATUS = (
        *("tcb_status", "TCB status"),
        "Update the platform's firmware, or list the status in the policy on purpose.",
    )
    FIRMWARE_FLOOR = "firmware_floor", "firmware"
    DEBUG = "debug", "debug", "Launch the guest without the debug attribute."
    ATTRIBUTES = "attributes", "attributes"
    PRIVILEGE_LEVEL = "privilege_level", "privilege level"
    MEASUREMENT_UNKNOWN = (
        *("measurement_unknown", "measurement"),
        "Deploy the measured code, or add its measurement to the policy after review.",
    )
    NONCE_REPLAYED = "nonce_replayed", "nonce", "Ask for a new challenge."
    NONCE_FOREIGN = "nonce_foreign", "nonce", "Ask for a new challenge."
    KEY_NOT_BOUND = "key_not_bound", "binding"
    CODE_UNLISTED = (
        *("code_unlisted", "code"),
        "Run code that the policy lists, or add its digest after review: raycloak attest policy code PROJECT.",
    )
    PEER_NOT_BOUND = "peer_not_bound", "peer"
    GPU_NOT_BOUND = "gpu_not_bound", "GPU binding"
    GPU_STATE = "gpu_state", "GPU state"
    SWITCH_MISSING = (
        *("switch_missing", "switches"),
        "Give the guest all GPUs and all NVSwitches of its machine, and install libnvidia-nscq.",
    )
    SWITCH_DOUBLED = "switch_doubled", "switches"
    SWITCH_FOREIGN = "switch_foreign", "switches"
    SWITCH_OTHER_GPUS = "switch_other_gpus", "switches"
    RELEASE_DENIED = "release_denied", "release"


def refuse(code: Refusal, message: str) -> NoReturn:
    """Raise EvidenceError with ``code``, ``message`` and the code's remedy."""
    raise EvidenceError(code.value, message, code.remedy) from None


class Challenge(Message):
    """A nonce for one member of one run, in one role.

    Attributes:
        nonce: 32 random bytes, used once.
        expires_at: unix seconds from which the nonce is no longer accepted.
    """

    DOMAIN: ClassVar[str] = "raycloak/challenge/v1"

    nonce: Bytes32
    run_id: Name
    member_id: Name
    role: Role
    manifest_digest: Bytes32
    expires_at: int


class GpuEvidence(Message):
    """The evidence that one GPU presents.

    Attributes:
        report: SPDM request and response, as the device answers.
        chain: the device's certificates in DER, leaf first.
    """

    DOMAIN: ClassVar[str] = "raycloak/gpu-evidence/v1"

    report: bytes
    chain: tuple[bytes, ...]


class SwitchEvidence(Message):
    """The evidence that one NVSwitch presents; fields as in :class:`GpuEvidence`."""

    DOMAIN: ClassVar[str] = "raycloak/switch-evidence/v1"

    report: bytes
    chain: tuple[bytes, ...]


class Presentation(Message):
    """The evidence for a member's keys. It travels in an envelope signed by ``identity_key``.

    Attributes:
        hpke_key: ML-KEM-768 raw (1,184 bytes) followed by X25519 raw (32 bytes).
        mask_key: X25519 raw, 32 bytes.
        identity_key: Ed25519 raw, 32 bytes.
        known_answer: 32-byte digest of the numerics known answer; empty for an aggregator.
        quote: the TEE's quote or report. Its report data binds every field except this one, ``quote_family`` and
            ``certificates``, which only help to read it.
        quote_family: the format of ``quote``. It selects the parser; the class follows from the root.
        certificates: in DER, the endorsement key of an SEV-SNP report first. Empty for TDX, whose quotes carry theirs.
        gpu_evidence: one encoded :class:`GpuEvidence` per GPU in a fixed order; empty without a confidential GPU.
        code: of the run that it is a member of. Left out of the bytes where it is empty.
        switch_evidence: one encoded :class:`SwitchEvidence` per NVSwitch of a machine whose GPUs are in protected-PCIe
            mode. Left out of the bytes where it is empty.
    """

    DOMAIN: ClassVar[str] = "raycloak/presentation/v2"

    nonce: Bytes32
    run_id: Name
    member_id: Name
    role: Role
    manifest_digest: Bytes32
    hpke_key: Annotated[bytes, Field(min_length=HPKE_KEY_BYTES, max_length=HPKE_KEY_BYTES)]
    mask_key: Bytes32
    identity_key: Bytes32
    known_answer: Annotated[bytes, Field(max_length=32)]
    quote: bytes
    quote_family: QuoteFamily = "tdx"
    certificates: tuple[bytes, ...] = ()
    gpu_evidence: tuple[bytes, ...] = ()
    code: CodeDigest = Field(default=b"", exclude_if=lambda code: not code)
    switch_evidence: tuple[bytes, ...] = Field(default=(), exclude_if=lambda switches: not switches)

    @model_validator(mode="after")
    def _known_answer_fits_role(self) -> Self:
        if len(self.known_answer) != (32 if self.role == "worker" else 0):
            raise ValueError("a worker presents a 32-byte known answer, any other role none")
        return self


class Collateral(Message):
    """The vendor's published data about a platform family, as needed to judge a TDX quote.

    A PCK certificate chain is left out on purpose: the verifier would prefer it to the quote's own.

    Attributes:
        pck_crl_issuer_chain, tcb_info_issuer_chain, qe_identity_issuer_chain: PEM, signer first, root last.
        root_ca_crl, pck_crl: DER.
        tcb_info, qe_identity: the exact JSON text that is signed.
        tcb_info_signature, qe_identity_signature: ECDSA P-256, r and s as 64 raw bytes.
    """

    DOMAIN: ClassVar[str] = "raycloak/collateral/v1"

    pck_crl_issuer_chain: str
    root_ca_crl: bytes
    pck_crl: bytes
    tcb_info_issuer_chain: str
    tcb_info: str
    tcb_info_signature: bytes
    qe_identity_issuer_chain: str
    qe_identity: str
    qe_identity_signature: bytes

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read dcap-qvl's JSON form. Other fields, such as a PCK certificate chain, are dropped.

        Raises:
            EvidenceError: ``collateral_stale`` if the text is not collateral.
        """
        try:
            fields = read_json(text)
            known = {name: fields[name] for name in cls.model_fields}
            # Through JSON, because only there a strict model takes bytes as hexadecimal text.
            return cls.model_validate_json(json.dumps(known))
        except (LookupError, TypeError, ValueError):
            refuse(Refusal.COLLATERAL_STALE, "the collateral is not in the expected form")


class CollateralBundle(Message):
    """The vendors' published data, as a run's verifiers hold it. They obtain it themselves, never from a member.

    Attributes:
        tdx: one entry per platform family.
        snp_vcek_crls, snp_vlek_crls: AMD's revocation lists for each kind of endorsement key, DER. AMD publishes the
            two at addresses of their own; a list need not say which one it is.
        gpu_rims: NVIDIA's signed reference values of GPUs and switches, XML. A report names the versions to compare it
            with.
        gpu_ocsp: NVIDIA's OCSP answers about the certificates of GPUs and switches, DER.
    """

    DOMAIN: ClassVar[str] = "raycloak/collateral-bundle/v2"

    tdx: tuple[Collateral, ...] = ()
    snp_vcek_crls: tuple[bytes, ...] = ()
    snp_vlek_crls: tuple[bytes, ...] = ()
    gpu_rims: tuple[bytes, ...] = ()
    gpu_ocsp: tuple[bytes, ...] = ()
