"""The rules by which an Intel TDX guest and its platform are accepted."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES
from raycloak.attestation.core.messages import Message

TcbStatus = Literal[
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded", "OutOfDate",
    "OutOfDateConfigurationNeeded", "TDRelaunchAdvised", "TDRelaunchAdvisedConfigurationNeeded",
]  # fmt: skip
RELAUNCH_STATUSES: Final = frozenset({"TDRelaunchAdvised", "TDRelaunchAdvisedConfigurationNeeded"})
"""The statuses of a guest that was launched under an older TDX module than the one that runs it now."""
RTMRS: Final = ("rtmr0", "rtmr1", "rtmr2", "rtmr3")
REGISTERS: Final = (*RTMRS, "mr_config_id")
Advisory = Annotated[str, Field(pattern=r"^INTEL-SA-[0-9]{5}$")]
"""An advisory in the spelling of Intel's TCB info; any other would match none."""
ANY: Final = "any"
Measurement = Annotated[bytes, Field(min_length=MEASUREMENT_BYTES, max_length=MEASUREMENT_BYTES)]

Register = tuple[Measurement, ...] | Literal["any"] | None


class TdxRules(Message):
    """The acceptance rules for TDX quotes. The defaults suit a hardware run.

    Attributes:
        measurements: accepted ``mr_td`` values, 48 bytes each. An empty set admits nothing; None compares nothing,
            which no policy of a run may say.
        rtmr0, rtmr1, rtmr2, rtmr3: accepted values of each run-time register, 48 bytes each. ``mr_td`` covers the
            firmware alone. These cover its setup, kernel, command line and containers. Zero is a value: the register
            has no measurements. ``any`` compares nothing. So does None, which no policy for TDX hardware may say: such
            a policy must say explicitly what is not compared.
        mr_config_id: accepted values that the host may set at launch, 48 bytes each; None compares nothing.
        tcb_statuses: accepted status of platform, TDX module and quoting enclave.
        rejected_advisories: vendor advisories that must not apply to the platform.
        min_tcb_evaluation_data_number: lowest accepted ``tcbEvaluationDataNumber`` of TCB info and QE identity.
        allow_dynamic_platform, allow_cached_keys, allow_smt: tolerated platform properties. Real multi-socket hosts
            have all three.
        allow_debug: whether a guest is accepted whose memory its host can read.
        require_sept_ve_disable: whether the guest must be safe from exceptions that its host injects on page faults.
    """

    DOMAIN: ClassVar[str] = "raycloak/tdx-rules/v2"

    measurements: tuple[Measurement, ...] | None = ()
    rtmr0: Register = None
    rtmr1: Register = None
    rtmr2: Register = None
    rtmr3: Register = None
    mr_config_id: tuple[Measurement, ...] | None = None
    tcb_statuses: tuple[TcbStatus, ...] = ("UpToDate",)
    rejected_advisories: tuple[Advisory, ...] = ()
    min_tcb_evaluation_data_number: Annotated[int, Field(ge=0, lt=2**32)] = 0
    allow_dynamic_platform: bool = True
    allow_cached_keys: bool = True
    allow_smt: bool = True
    allow_debug: bool = False
    require_sept_ve_disable: bool = True

    @property
    def registers(self) -> dict[str, tuple[Measurement, ...] | None]:
        """The accepted values of every register beside ``mr_td``, by name; None where any value is accepted."""
        accepted = {name: getattr(self, name) for name in REGISTERS}
        return {name: None if values == ANY else values for name, values in accepted.items()}
