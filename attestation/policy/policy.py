"""The rules for the evidence that a run accepts, fixed before the run. The manifest names them by their digest.

The rules of each family of evidence have their own file. The roots are in `raycloak.attestation.trust.roots`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.evidence import Bytes32, EvidenceClass, Refusal, refuse
from raycloak.attestation.core.messages import Message
from raycloak.attestation.files.yaml_reader import read_yaml
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.tdx.rules import RTMRS, TdxRules
from raycloak.attestation.trust.roots import Anchor, pinned_anchors
from raycloak.metrics.errors import ConfigError

# Of a TDX platform, and of a SEV-SNP chip. An id of any other length is no machine's.
_PLATFORM_ID_BYTES = (16, 64)


def _of_a_machine(platform_id: bytes) -> bytes:
    if len(platform_id) not in _PLATFORM_ID_BYTES:
        raise ValueError(f"a platform id has 16 bytes (TDX) or 64 (SEV-SNP), not {len(platform_id)}")
    return platform_id


PlatformId = Annotated[bytes, AfterValidator(_of_a_machine)]

DEFAULT_LIFETIME_S = 24 * 3600


BoundaryRule = Literal[
    "tdx.rtmr0", "tdx.rtmr1", "tdx.rtmr2", "tdx.rtmr3", "tdx.mr_config_id", "sev_snp.measurements", "sev_snp.host_data"
]
_CARRIED_BY: Final[Mapping[EvidenceClass, str]] = MappingProxyType(
    {EvidenceClass.INTEL_TDX: "tdx.", EvidenceClass.AMD_SEV_SNP: "sev_snp."}
)


class KeyQuotas(Message):
    """The limits on how often one key may be drawn.

    A member draws a key again whenever it hosts that virtual worker again, and whenever an answer was lost.

    Attributes:
        per_member: draws by one member in one session of the run.
        per_run: draws by all members, in all sessions.
    """

    DOMAIN: ClassVar[str] = "raycloak/key-quotas/v1"

    per_member: Annotated[int, Field(gt=0, lt=2**31)] = 64
    per_run: Annotated[int, Field(gt=0, lt=2**31)] = 4096


class Policy(Message):
    """The acceptance rules for evidence. The defaults suit a hardware run.

    Attributes:
        accepted_classes: classes that are admitted.
        anchors: known roots. One whose class is not accepted is recognised and refused by its name.
        evidence_lifetime_s: seconds after which appraised evidence must be renewed.
        platforms: admitted machines by platform id, 16 bytes for TDX and 64 for SEV-SNP; None admits any platform.
        workers_per_platform: most workers that may present the same platform id; None sets no limit.
        gpus_per_worker: confidential GPUs that each worker must present, no more and no less.
        key_quotas: limits on how often a key is released, over all recoveries.
        collateral_service: where verifiers fetch collateral; None uses only given files.
        code: digests of the bundles that code of the user's may come from, as ``raycloak attest policy code`` prints
            them; an empty list admits none, and None any code. Left out of the bytes where it is None.
        require_boundary: what of hardware evidence covers the vaults of the machine, their users and settings, such as
            ``tdx.rtmr2``: it names the rule whose accepted values say so. The run has to have a boundary. None demands
            none, and is left out of the bytes.
        tdx, sev_snp, nvidia_gpu: rules for TDX quotes, SEV-SNP reports and GPU reports.
    """

    DOMAIN: ClassVar[str] = "raycloak/policy/v3"

    accepted_classes: Annotated[tuple[EvidenceClass, ...], Field(min_length=1)]
    anchors: Annotated[tuple[Anchor, ...], Field(min_length=1)]
    evidence_lifetime_s: Annotated[int, Field(gt=0, le=366 * 24 * 3600)] = DEFAULT_LIFETIME_S
    platforms: tuple[PlatformId, ...] | None = None
    # One machine could otherwise pretend to be several workers.
    workers_per_platform: Annotated[int, Field(gt=0, lt=2**16)] | None = 1
    gpus_per_worker: Annotated[int, Field(ge=0, lt=2**8)] = 0
    key_quotas: KeyQuotas = KeyQuotas()
    collateral_service: CollateralService | None = None
    code: tuple[Bytes32, ...] | None = Field(default=None, exclude_if=lambda code: code is None)
    require_boundary: tuple[BoundaryRule, ...] | None = Field(default=None, exclude_if=lambda rules: rules is None)
    tdx: TdxRules = TdxRules()
    sev_snp: SnpRules = SnpRules()
    nvidia_gpu: GpuRules = GpuRules()

    @field_validator("anchors")
    @classmethod
    def _no_root_twice(cls, anchors: tuple[Anchor, ...]) -> tuple[Anchor, ...]:
        if len({(anchor.family, anchor.root_key_id) for anchor in anchors}) != len(anchors):
            raise ValueError("a root is listed twice")
        return anchors

    @model_validator(mode="after")
    def _measurements_are_compared(self) -> Self:
        for name, rules in (("tdx", self.tdx), ("sev_snp", self.sev_snp)):
            # None compares nothing. That is for verifying single pieces of evidence, never for a run.
            if rules.measurements is None:
                raise ValueError(f"{name}.measurements must be a list; an empty one admits nothing")
        return self

    @model_validator(mode="after")
    def _hardware_is_judged_by_what_was_said(self) -> Self:
        """Refuse rules that would ask for less of a hardware class than naming it suggests."""
        if EvidenceClass.NVIDIA_GPU in self.accepted_classes and not self.gpus_per_worker:
            raise ValueError("nvidia_gpu is accepted, but gpus_per_worker asks for no GPU; say how many")
        open_registers = [name for name in RTMRS if getattr(self.tdx, name) is None]
        if EvidenceClass.INTEL_TDX in self.accepted_classes and open_registers:
            names = ", ".join(f"tdx.{name}" for name in open_registers)
            raise ValueError(f"{names}: list accepted values or say 'any', as the measurement is of firmware alone")
        return self

    @model_validator(mode="after")
    def _a_boundary_is_carried_by_what_is_compared(self) -> Self:
        """Refuse a boundary that evidence of an accepted class would not show."""
        if self.require_boundary is None:
            return self
        for rule in self.require_boundary:
            family, _, name = rule.partition(".")
            rules = self.tdx if family == "tdx" else self.sev_snp
            if rules.registers.get(name, rules.measurements) is None:
                raise ValueError(f"require_boundary: {rule} compares nothing; list accepted values")
        for accepted, prefix in _CARRIED_BY.items():
            if accepted in self.accepted_classes and not any(each.startswith(prefix) for each in self.require_boundary):
                raise ValueError(f"require_boundary: name what of {prefix.rstrip('.')} evidence carries it")
        return self

    @property
    def accepts_simulated(self) -> bool:
        """Return whether a run under this policy may rest on simulated evidence. Its outputs then say SIMULATED."""
        return EvidenceClass.SIMULATED in self.accepted_classes

    def require_code(self, code: bytes, whose: str) -> None:
        """Require that a run may have code of its own from the bundle with this digest.

        Args:
            code: empty for a run without code of its own, which any policy admits.
            whose: states it, for the refusal.

        Raises:
            EvidenceError: ``code_unlisted``.
        """
        if self.code is not None and code and code not in self.code:
            refuse(Refusal.CODE_UNLISTED, f"the code {code.hex()} of {whose} is not on the policy's list.")


class HasRoot(Protocol):
    """An owner of a root, such as `raycloak.attestation.simulators.tdx_vendor.SimulatedVendor`."""

    @property
    def root_der(self) -> bytes: ...


def simulated_policy(vendor: HasRoot, measurement: bytes) -> Policy:
    """Make the policy of a run on this machine: ``vendor``'s simulated platforms running the code ``measurement``."""
    return Policy(
        accepted_classes=(EvidenceClass.SIMULATED,),
        anchors=(Anchor(evidence_class=EvidenceClass.SIMULATED, family="tdx", root_der=vendor.root_der),),
        workers_per_platform=None,
        tdx=TdxRules(measurements=(measurement,)),
    )


def load_policy(path: Path) -> Policy:
    """Read a policy from YAML. Byte strings are hexadecimal; a hardware class's name stands for its pinned anchors.

    Raises:
        ConfigError: ``policy`` if the file cannot be read, has unknown, missing or wrong fields, or a key twice.
    """
    try:
        raw = read_yaml(path, "policy")
        if isinstance(raw, dict) and isinstance(raw.get("anchors"), list):
            raw["anchors"] = [anchor for given in raw["anchors"] for anchor in _named_anchors(given)]
        return Policy.model_validate_json(canonical_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ConfigError("policy", f"{path}: {field}: {first['msg']}.", "See docs/attestation.md.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "policy", f"{path} holds a value that no policy field takes: {error}.", "See docs/attestation.md."
        ) from None


def _named_anchors(anchor: Any) -> list[Any]:
    """Return the pinned roots if ``anchor`` names a hardware class, else ``anchor`` itself."""
    named = {evidence_class.value for evidence_class in EvidenceClass}
    pinned = pinned_anchors(EvidenceClass(anchor)) if isinstance(anchor, str) and anchor in named else ()
    return [each.model_dump(mode="json") for each in pinned] or [anchor]
