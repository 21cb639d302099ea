"""The rules by which an NVIDIA GPU, and a switch between GPUs, is accepted."""

from typing import Annotated, ClassVar

from pydantic import Field

from raycloak.attestation.core.messages import Message

Model = Annotated[str, Field(pattern=r"^G[A-Z][0-9]\w*$", max_length=20)]


class GpuRules(Message):
    """The acceptance rules for GPU reports. The defaults suit a hardware run.

    Attributes:
        models: accepted chips, by the name in the boot ROM's certificate, which NVIDIA issues, such as ``GH100``;
            None accepts any GPU.
        allow_ppcie: whether protected-PCIe mode is accepted. In it, traffic between GPUs is not encrypted, so all
            switches of the machine have to vouch for themselves beside the GPUs.
        allow_unstated_mode: whether a report is accepted that does not state the mode (FEATURE_FLAG), as drivers 550
            and 570 do not on a Hopper GPU. Only reference values then show how the GPU was started.
        require_rim: whether signed reference values of driver and VBIOS must be present, and of a switch's VBIOS.
            Present ones are always compared.
        require_ocsp: whether OCSP answers must be present. Device certificates do not expire, so without answers no
            revocation of a GPU or a switch is seen. Present ones are always checked.
    """

    DOMAIN: ClassVar[str] = "raycloak/gpu-rules/v2"

    models: tuple[Model, ...] | None = None
    allow_ppcie: bool = False
    allow_unstated_mode: bool = False
    require_rim: bool = True
    require_ocsp: bool = True
