"""What an NVIDIA GPU must look like to be accepted."""

from typing import ClassVar

from attestation.messages import Message


class GpuRules(Message):
    """Acceptance rules for GPU reports; the defaults are those of a hardware run.

    Attributes:
        allow_ppcie: whether protected-PCIe mode is accepted, in which traffic between GPUs is not encrypted.
        require_rim: whether signed reference values of the driver and of the VBIOS must be there. Those that are
            there are always compared.
        require_ocsp: whether there must be OCSP answers, without which no revocation of a GPU would be seen, since
            device certificates do not expire. Answers that are there are always checked.
    """

    DOMAIN: ClassVar[str] = "raycloak/gpu-rules/v1"

    allow_ppcie: bool = False
    require_rim: bool = True
    require_ocsp: bool = True
