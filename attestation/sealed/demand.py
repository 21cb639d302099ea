"""The demand of a sealed dataset: the ledger, the account and the least noise under which its owner lets it be used.

The demand is in the header, and every slice key derives from it. So a header with another demand yields keys that open
nothing. The orchestrator checks it before it releases a slice key, each worker before it asks for one. Both read the
run's manifest, so a driver that tells either of them anything else gets nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from pydantic import BaseModel, Field, ValidationError

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.counted_noise import NoiseTerms, counted_noise
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import EvidenceError

_ROUNDING: Final = 1e-9

MANIFEST_DOMAIN: Final = "raycloak/manifest/v1"
"""The domain of a run's manifest, whose type is in a room above this one."""


@dataclass(frozen=True, slots=True)
class StatedRun:
    """The part of a run's manifest that an owner of data may make demands of.

    Attributes:
        ledger_key: raw Ed25519 key of the ledger that signs its receipts.
        noise_multipliers: of everything that it may release, as the shares of its virtual workers add up to it; 0 for a
            release without noise.
        code: digest of the bundle of its own code; empty for none.
    """

    ledger_key: bytes
    account: str
    noise_multipliers: tuple[float, ...]
    code: bytes

    @classmethod
    def of(cls, ledger_key: bytes, account: str, mechanisms: Sequence[NoiseTerms], code: bytes) -> Self:
        """Return what a manifest states.

        Args:
            mechanisms: the gradient's first. Its virtual workers are those of the run, whatever the others say.
        """
        workers = mechanisms[0].virtual_workers
        return cls(ledger_key, account, tuple(_noise_of(each, workers) for each in mechanisms), code)

    @classmethod
    def read(cls, manifest: bytes, manifest_digest: bytes) -> Self:
        """Read a manifest's bytes.

        Guarantee: returns only what the manifest with that digest states, whoever brought the bytes.

        Raises:
            EvidenceError: ``sealed_demand`` if these are not the bytes of that manifest.
        """
        if digest(length_prefixed(MANIFEST_DOMAIN, manifest)) != manifest_digest:
            raise _refusal("the manifest of the run was not given, or is another one")
        try:
            stated = _StatedManifest.model_validate_json(manifest)
        except ValidationError:
            raise _refusal("the run's manifest does not state ledger, account and mechanisms") from None
        computation = stated.computation
        mechanisms = [computation.mechanism, *(each.mechanism for each in computation.measurements)]
        return cls.of(stated.ledger_key, stated.account, mechanisms, stated.code)


class SealedDemand(Message):
    """The terms that the owner of a sealed dataset demands of every run on it.

    Attributes:
        ledger_key: raw Ed25519 key of the ledger that must sign the run's receipts.
        account: the account that must pay.
        least_noise_multiplier: the smallest noise multiplier that any release of the run may have; above 0.
    """

    DOMAIN: ClassVar[str] = "raycloak/sealed-data/demand/v1"

    ledger_key: bytes = Field(min_length=32, max_length=32)
    account: str = Field(min_length=1)
    least_noise_multiplier: float = Field(gt=0)

    def require(self, stated: StatedRun) -> None:
        """Require that a run states this ledger and account, and at least this noise in everything it may release.

        Raises:
            EvidenceError: ``sealed_demand``, with what differs.
        """
        if stated.ledger_key != self.ledger_key:
            raise _refusal(f"it demands the ledger {self.ledger_key.hex()}, and the run's is {stated.ledger_key.hex()}")
        if stated.account != self.account:
            raise _refusal(f"it demands the account '{self.account}', and the run pays from '{stated.account}'")
        least = min(stated.noise_multipliers, default=0.0)
        # The comparison is turned around so that a number that is none is refused.
        if not least >= self.least_noise_multiplier:
            raise _refusal(
                f"it demands a noise multiplier of at least {self.least_noise_multiplier:g}, and the run has a release "
                f"with {least:g}"
            )


class _StatedMeasurement(BaseModel, frozen=True, strict=True):
    mechanism: NoiseTerms


class _StatedComputation(BaseModel, frozen=True, strict=True):
    mechanism: NoiseTerms
    measurements: tuple[_StatedMeasurement, ...]


class _StatedManifest(BaseModel, frozen=True, strict=True, val_json_bytes="hex"):
    # Fields of the manifest that no demand is made of are left unread.
    ledger_key: bytes
    account: str
    computation: _StatedComputation
    code: bytes = b""


def _noise_of(terms: NoiseTerms, virtual_workers: int) -> float:
    """Return the noise multiplier that a release claims, or what it has where that is less by more than rounding."""
    if not terms.private:
        return 0.0
    # A number beyond all floats counts as none.
    found = counted_noise(terms, min(virtual_workers, 2**64) * min(terms.honest_share, 1.0))
    return terms.noise_multiplier if found >= terms.noise_multiplier * (1 - _ROUNDING) else found


def _refusal(why: str) -> EvidenceError:
    return EvidenceError(
        "sealed_demand",
        f"the dataset is sealed for other terms: {why}.",
        "Run on the ledger, account and noise that its owner demands, or ask for another seal.",
    )
