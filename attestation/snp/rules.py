"""The rules by which an AMD SEV-SNP guest and its machine are accepted."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES
from raycloak.attestation.core.messages import Message

Generation = Literal["Milan", "Genoa", "Turin"]
"""The third, fourth and fifth generation of EPYC, by their names in AMD's certificates."""

Svn = Annotated[int, Field(ge=0, lt=2**8)]
Vmpl = Annotated[int, Field(ge=0, le=3)]
Measurement = Annotated[bytes, Field(min_length=MEASUREMENT_BYTES, max_length=MEASUREMENT_BYTES)]


def _floors() -> dict[Generation, int]:
    # AMD's fixes for CVE-2024-56161.
    return {"Milan": 24, "Genoa": 23}


class SnpRules(Message):
    """The acceptance rules for SEV-SNP reports. The defaults suit a hardware run.

    Attributes:
        allowed_generations: admitted generations. Milan is not a default, because software can read the seed of its
            endorsement keys (arXiv 2605.12990). Nor is Turin, because there is no floor to set for it yet.
        min_snp_svn: lowest version of the SNP firmware (its SVN) by generation, for the reported, the committed and
            the launch TCB. A generation without a floor is not admitted. 24 and 23 are AMD's fixes for
            CVE-2024-56161.
        require_alias_check: whether the firmware must have looked for memory modules that lie about their size
            (CVE-2024-21944).
        allow_debug: whether a guest is accepted whose memory its host can read.
        allow_migrate_ma: whether a guest may be bound to a migration agent, which can move its memory elsewhere.
        allow_smt: whether the guest may share a core with another guest's hardware thread. Clouds launch guests so.
        allowed_vmpl: privilege levels from which a report is accepted.
        require_crl: whether a current revocation list of AMD's root must be present.
        measurements: accepted launch measurements, 48 bytes each. An empty set admits nothing; None compares nothing,
            which no policy of a run may say.
    """

    DOMAIN: ClassVar[str] = "raycloak/snp-rules/v1"

    allowed_generations: tuple[Generation, ...] = ("Genoa",)
    min_snp_svn: dict[Generation, Svn] = Field(default_factory=_floors)
    require_alias_check: bool = True
    allow_debug: bool = False
    allow_migrate_ma: bool = False
    allow_smt: bool = True
    allowed_vmpl: tuple[Vmpl, ...] = (0,)
    require_crl: bool = True
    measurements: tuple[Measurement, ...] | None = ()

    def __hash__(self) -> int:
        """Hash the encoded message, because one of its fields is a mapping."""
        return hash(self.encode())
