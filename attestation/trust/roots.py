"""Roots that vouch for evidence: the vendors' pinned certificates, and the anchors of a policy.

AMD pins a root (ARK) per generation of processors, and below it one CA (ASK) per kind of key. With them a report's
endorsement certificate suffices. NVIDIA pins two roots: one certifies devices, the other signers of reference values.

Guarantee: a root counts as hardware only if its public key is pinned here, so no policy file can declare a simulator's
root to be hardware. Roots are compared by public key, since a vendor may issue a root certificate again with the same
key.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import model_validator

from raycloak.attestation.core.evidence import EvidenceClass, Refusal, refuse
from raycloak.attestation.core.messages import Message
from raycloak.attestation.trust.certificates import check_links, common_name, key_id, read_root
from raycloak.attestation.trust.floors import NO_FLOORS, Floors

_ANCHORS: Final = Path(__file__).resolve().parent / "anchors"


def _read(name: str) -> bytes:
    return x509.load_pem_x509_certificate((_ANCHORS / name).read_bytes()).public_bytes(Encoding.DER)


# Intel SGX Root CA, valid 2018-05-21 to 2049-12-31; it vouches for SGX and TDX alike.
INTEL_SGX_ROOT_DER: Final = _read("intel_sgx_root_ca.pem")
NVIDIA_DEVICE_ROOT_DER: Final = _read("nvidia_device_identity_ca.pem")
NVIDIA_RIM_ROOT_DER: Final = _read("nvidia_corim_signing_root_ca.pem")
_AMD_CHAINS: Final = [
    x509.load_pem_x509_certificates(path.read_bytes()) for path in sorted(_ANCHORS.glob("ask_ark_*.pem"))
]
AMD_INTERMEDIATES: Final = tuple(intermediate for intermediate, _ in _AMD_CHAINS)
"""The six CAs that issue endorsement certificates: for VCEK and VLEK of Milan, Genoa and Turin."""
AMD_ROOTS: Final = tuple(dict.fromkeys(root for _, root in _AMD_CHAINS))
"""The three roots, of Milan, Genoa and Turin."""

Family = Literal["tdx", "sev_snp", "nvidia_gpu", "nvidia_rim"]
"""The format of the data that a root vouches for: evidence, and so its verifier, or signed reference values."""


class PinnedRoot(NamedTuple):
    """A vendor's root certificate, and the one class and family that it vouches for."""

    evidence_class: EvidenceClass
    family: Family
    root_der: bytes


# Roots of another family: one line here that unpacks what `anchors/` holds for the family.
_PINNED_ROOTS: Final[tuple[PinnedRoot, ...]] = (
    PinnedRoot(EvidenceClass.INTEL_TDX, "tdx", INTEL_SGX_ROOT_DER),
    *(PinnedRoot(EvidenceClass.AMD_SEV_SNP, "sev_snp", root.public_bytes(Encoding.DER)) for root in AMD_ROOTS),
    PinnedRoot(EvidenceClass.NVIDIA_GPU, "nvidia_gpu", NVIDIA_DEVICE_ROOT_DER),
    PinnedRoot(EvidenceClass.NVIDIA_GPU, "nvidia_rim", NVIDIA_RIM_ROOT_DER),
)

PINNED: Final[Mapping[bytes, PinnedRoot]] = MappingProxyType(
    {key_id(read_root(root.root_der)): root for root in _PINNED_ROOTS}
)
"""Maps :func:`key_id` to the pinned root."""


@lru_cache(maxsize=64)
def _loaded(der: bytes) -> tuple[x509.Certificate, bytes]:
    root = read_root(der)
    return root, key_id(root)


class Anchor(Message):
    """A root that the verifier trusts to vouch for one class of evidence of one family.

    Attributes:
        root_der: the self-signed root certificate.
    """

    DOMAIN: ClassVar[str] = "raycloak/anchor/v2"

    evidence_class: EvidenceClass
    family: Family = "tdx"
    root_der: bytes

    @classmethod
    def simulated(cls, family: Family, root: x509.Certificate) -> Self:
        """Make the anchor of class ``simulated`` with that root; ValidationError if the root is a vendor's."""
        der = root.public_bytes(Encoding.DER)
        return cls(evidence_class=EvidenceClass.SIMULATED, family=family, root_der=der)

    @property
    def root(self) -> x509.Certificate:
        return _loaded(self.root_der)[0]

    @property
    def root_key_id(self) -> bytes:
        """The root's :func:`key_id`, 48 bytes."""
        return _loaded(self.root_der)[1]

    @model_validator(mode="after")
    def _class_follows_root(self) -> Self:
        pinned = PINNED.get(self.root_key_id)
        expected = (pinned.evidence_class, pinned.family) if pinned else (EvidenceClass.SIMULATED, self.family)
        if (self.evidence_class, self.family) != expected:
            raise ValueError(f"this root does not vouch for {self.evidence_class} evidence of family {self.family}")
        return self


def pinned_anchors(evidence_class: EvidenceClass) -> tuple[Anchor, ...]:
    """Return the anchors of a hardware class: every pinned root of it."""
    return tuple(Anchor(**root._asdict()) for root in PINNED.values() if root.evidence_class is evidence_class)


class VerifierTerms(NamedTuple):
    """The terms on which a verifier judges evidence of any family.

    Attributes:
        anchors: the roots that it knows.
        accepted: the classes that it admits.
        now: unix seconds.
        floors: highest numbers of collateral seen so far. Collateral below them is refused.
    """

    anchors: Sequence[Anchor]
    accepted: Collection[EvidenceClass]
    now: int
    floors: Floors = NO_FLOORS

    @property
    def instant(self) -> datetime:
        """The same moment as `now`."""
        return datetime.fromtimestamp(self.now, UTC)

    def anchor_of(self, family: Family, chain: Sequence[x509.Certificate], what: str) -> Anchor:
        """Return the anchor of ``family`` with the public key of the root of ``chain``, whose links hold.

        Guarantee: evidence under a simulator's root never passes where only hardware is accepted.

        Args:
            what: names the chain in a refusal.

        Raises:
            EvidenceError: ``chain_broken``, ``root_unknown`` for a consistent chain to a foreign root or to one of
                another hardware class, or ``simulator_not_allowed``.
        """
        root = key_id(chain[-1])
        anchor = next((each for each in self.anchors if each.family == family and each.root_key_id == root), None)
        if anchor is None:
            check_links(chain, what)
            refuse(Refusal.ROOT_UNKNOWN, f"'{common_name(chain[-1])}' is not a root that the policy trusts")
        if anchor.evidence_class not in self.accepted:
            if anchor.evidence_class is EvidenceClass.SIMULATED:
                only = "the evidence comes from a simulator, and the policy takes hardware only"
                refuse(Refusal.SIMULATOR_NOT_ALLOWED, only)
            refuse(Refusal.ROOT_UNKNOWN, f"the policy does not accept evidence of class {anchor.evidence_class}")
        check_links(chain, what)
        return anchor
