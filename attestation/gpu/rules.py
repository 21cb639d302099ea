"""The rules by which an NVIDIA GPU is accepted."""

from typing import ClassVar

from raycloak.attestation.core.messages import Message


class GpuRules(Message):
    """The acceptance rules for GPU reports. The defaults suit a hardware run.

    Attributes:
        allow_ppcie: whether protected-PCIe mode is accepted. In it, traffic between GPUs is not encrypted.
        require_rim: whether signed reference values of driver and VBIOS must be present. Present ones are always
            compared.
        require_ocsp: whether OCSP answers must be present. Device certificates do not expire, so without answers no
            revocation of a GPU is seen. Present ones are always checked.
    """

    DOMAIN: ClassVar[str] = "raycloak/gpu-rules/v1"

    allow_ppcie: bool = False
    require_rim: bool = True
    require_ocsp: bool = True
