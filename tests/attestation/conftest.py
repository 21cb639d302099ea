"""A simulated vendor and a session for which members can present evidence."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise
from raycloak.attestation.core.canonical import digest as hash_of
from raycloak.attestation.core.evidence import CollateralBundle, Presentation, Role
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import AgreementKey, IdentityKey
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.policy.policy import Policy, simulated_policy
from tests.simulators.snp_pki import RSA_BITS, AuthorityKeys
from tests.simulators.tdx import GENUINE, QuoteVariant, VariantPlatform, VariantVendor

NOW = 1_800_000_000
MEASUREMENT = bytes(range(48))
RUN, MANIFEST = "run-1", b"m" * 32


class StandIn(KeyContract):
    """The contract of a run, with a digest that tests know."""

    DOMAIN: ClassVar[str] = "raycloak/test/contract"

    virtual_workers: int

    @classmethod
    def under(cls, policy: Policy, count: int = 4, epochs: int = 3, keys_per_machine: int | None = None) -> Self:
        """Return a contract that names ``policy``, with keys of ``count`` virtual workers in each of ``epochs``."""
        return cls(
            run_id=RUN,
            known_answer=b"k" * 32,
            policy_digest=policy.digest(),
            key_commitments=(b"c" * 32,) * epochs,
            virtual_workers=count,
            keys_per_machine=keys_per_machine,
        )

    @property
    def key_owners(self) -> int:
        return self.virtual_workers

    def digest(self) -> bytes:
        return MANIFEST

    @property
    def key_context(self) -> bytes:
        return hash_of(b"computation")


@dataclass
class Member:
    """A member with keys of its own, on a simulated platform."""

    platform: VariantPlatform
    member_id: str = "worker-0"
    role: Role = "worker"
    identity: IdentityKey = field(default_factory=IdentityKey.generate)
    hpke: HpkeKey = field(default_factory=HpkeKey.generate)
    mask: AgreementKey = field(default_factory=AgreementKey.generate)

    def fields(self, **changes: Any) -> dict[str, Any]:
        """Return the fields that the member binds into its quote."""
        return {
            "nonce": b"n" * 32,
            "run_id": RUN,
            "member_id": self.member_id,
            "role": self.role,
            "hpke_key": self.hpke.public,
            "mask_key": self.mask.public,
            "identity_key": self.identity.public,
            "manifest_digest": MANIFEST,
            "known_answer": b"k" * 32 if self.role == "worker" else b"",
            "gpu_evidence": (),
        } | changes

    def presentation(self, variant: QuoteVariant = GENUINE, **changes: Any) -> Presentation:
        """Return honest evidence for :meth:`fields` with ``changes``."""
        presented = Presentation(**self.fields(**changes), quote=b"")
        quote = self.platform.quote(expected_report_data(presented), MEASUREMENT, variant)
        return presented.model_copy(update={"quote": quote})

    def envelope(self, variant: QuoteVariant = GENUINE, **changes: Any) -> Envelope:
        return seal(self.presentation(variant, **changes), self.identity)


@dataclass
class Session:
    """A verifier's material, and members to judge."""

    vendor: VariantVendor
    platform: VariantPlatform
    collateral: CollateralBundle
    policy: Policy

    def member(self, **changes: Any) -> Member:
        return Member(self.platform, **changes)

    def appraise(self, envelope: Envelope, **changes: Any) -> Appraisal:
        """Appraise as for ``worker-0`` of the session, but for ``changes``."""
        arguments: dict[str, Any] = {
            "run_id": RUN,
            "member_id": "worker-0",
            "role": "worker",
            "manifest_digest": MANIFEST,
            "policy": self.policy,
            "collateral": self.collateral,
            "now": NOW,
        }
        return appraise(envelope, **(arguments | changes))


def with_tdx(policy: Policy, **changes: Any) -> Policy:
    """Return ``policy`` with other rules for TDX quotes."""
    return policy.model_copy(update={"tdx": policy.tdx.model_copy(update=changes)})


@pytest.fixture(scope="session")
def session() -> Session:
    vendor = VariantVendor.create()
    return Session(vendor, vendor.platform(), vendor.collateral(NOW), simulated_policy(vendor, MEASUREMENT))


@pytest.fixture(scope="session")
def amd_keys() -> AuthorityKeys:
    """Return keys of a simulated AMD; both CAs share one, since an RSA key takes long to make."""
    root, ca = (generate_private_key(65537, RSA_BITS) for _ in range(2))
    return AuthorityKeys(root, ca, ca)


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Return the folder of recorded hardware evidence; skip tests that need it where it is absent."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "vectors"
    if not (folder / "INDEX.json").is_file():
        pytest.skip("no recorded hardware evidence beside the repository (../shared/vectors)")
    return folder
