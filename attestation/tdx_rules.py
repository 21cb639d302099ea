"""What an Intel TDX guest and its platform must look like to be accepted."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from attestation.evidence import MEASUREMENT_BYTES
from attestation.messages import Message

TcbStatus = Literal[
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded", "OutOfDate",
    "OutOfDateConfigurationNeeded", "TDRelaunchAdvised", "TDRelaunchAdvisedConfigurationNeeded",
]  # fmt: skip
RELAUNCH_STATUSES: Final = frozenset({"TDRelaunchAdvised", "TDRelaunchAdvisedConfigurationNeeded"})
"""Of a guest that was launched under an older TDX module than the current one that runs it now."""
Measurement = Annotated[bytes, Field(min_length=MEASUREMENT_BYTES, max_length=MEASUREMENT_BYTES)]


class TdxRules(Message):
    """Acceptance rules for TDX quotes; the defaults are those of a hardware run.

    Attributes:
        measurements: accepted ``mr_td`` values, 48 bytes each. An empty set admits nothing; None compares nothing,
            which no policy of a run may say.
        tcb_statuses: accepted status of platform, TDX module and quoting enclave.
        rejected_advisories: vendor advisories that must not apply to the platform.
        min_tcb_evaluation_data_number: lowest accepted ``tcbEvaluationDataNumber`` of TCB info and QE identity.
        allow_dynamic_platform, allow_cached_keys, allow_smt: platform properties that are tolerated; real
            multi-socket hosts have all three.
        allow_debug: whether a guest whose memory its host can read is accepted.
        require_sept_ve_disable: whether the guest must be safe from exceptions that its host injects on page faults.
    """

    DOMAIN: ClassVar[str] = "raycloak/tdx-rules/v1"

    measurements: tuple[Measurement, ...] | None = ()
    tcb_statuses: tuple[TcbStatus, ...] = ("UpToDate",)
    rejected_advisories: tuple[str, ...] = ()
    min_tcb_evaluation_data_number: Annotated[int, Field(ge=0, lt=2**32)] = 0
    allow_dynamic_platform: bool = True
    allow_cached_keys: bool = True
    allow_smt: bool = True
    allow_debug: bool = False
    require_sept_ve_disable: bool = True
