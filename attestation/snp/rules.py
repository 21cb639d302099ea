"""The rules by which an AMD SEV-SNP guest and its machine are accepted."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES
from raycloak.attestation.core.messages import Message

KeyKind = Literal["VCEK", "VLEK"]
"""The kinds of endorsement key: the chip's own (VCEK), or one that a cloud provider's machines share (VLEK)."""
Generation = Literal["Milan", "Genoa", "Turin"]
"""The third, fourth and fifth generation of EPYC, by their names in AMD's certificates."""

Component = Literal["boot loader", "TEE", "SNP firmware", "microcode"]
"""The parts of a machine's firmware whose versions (SVN) a report states in its TCB versions."""
HOST_DATA_BYTES: Final = 32
HostData = Annotated[bytes, Field(min_length=HOST_DATA_BYTES, max_length=HOST_DATA_BYTES)]
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
        min_boot_loader_svn, min_tee_svn, min_microcode_svn: the same for the other parts of the firmware. A generation
            that is not named has no floor for that part.
        require_alias_check: whether the firmware must have checked for memory modules that lie about their size
            (CVE-2024-21944).
        allow_debug: whether a guest is accepted whose memory its host can read.
        allow_migrate_ma: whether a guest may be bound to a migration agent, which can move its memory elsewhere.
        allow_smt: whether the guest may share a core with another guest's hardware thread. Clouds launch guests so.
        allowed_vmpl: privilege levels from which a report is accepted.
        key_kinds: kinds of endorsement key that may sign. A VCEK is one chip's own. The machines of one cloud provider
            share a VLEK, and the provider may mask the chip's id. Such a report names a guest and no machine.
        require_crl: whether a current revocation list of AMD's root must be present, the one for the kind of key that
            signed.
        measurements: accepted launch measurements, 48 bytes each. An empty set admits nothing; None compares nothing,
            which no policy of a run may say.
        host_data: accepted values that the host may set at launch (HOST_DATA), 32 bytes each; None compares nothing. A
            launcher puts there what the measurement does not cover, such as the digest of a container's policy.
    """

    DOMAIN: ClassVar[str] = "raycloak/snp-rules/v2"

    allowed_generations: tuple[Generation, ...] = ("Genoa",)
    min_snp_svn: dict[Generation, Svn] = Field(default_factory=_floors)
    min_boot_loader_svn: dict[Generation, Svn] = Field(default_factory=dict)
    min_tee_svn: dict[Generation, Svn] = Field(default_factory=dict)
    min_microcode_svn: dict[Generation, Svn] = Field(default_factory=dict)
    require_alias_check: bool = True
    allow_debug: bool = False
    allow_migrate_ma: bool = False
    allow_smt: bool = True
    allowed_vmpl: tuple[Vmpl, ...] = (0,)
    key_kinds: tuple[KeyKind, ...] = ("VCEK",)
    require_crl: bool = True
    measurements: tuple[Measurement, ...] | None = ()
    host_data: tuple[HostData, ...] | None = None

    def floors(self, generation: Generation) -> dict[Component, int]:
        """Return the floor of each part of the firmware that has one."""
        given: dict[Component, dict[Generation, int]] = {
            "SNP firmware": self.min_snp_svn,
            "boot loader": self.min_boot_loader_svn,
            "TEE": self.min_tee_svn,
            "microcode": self.min_microcode_svn,
        }
        return {part: by_generation[generation] for part, by_generation in given.items() if generation in by_generation}

    @property
    def registers(self) -> dict[str, tuple[bytes, ...] | None]:
        """The accepted values of what is compared beside the measurement, by name; None where any value is accepted."""
        return {"host_data": self.host_data}

    def __hash__(self) -> int:
        """Hash the encoded message, because one of its fields is a mapping."""
        return hash(self.encode())
