"""Reads a PCK certificate's statements about its platform, in Intel's SGX extension (1.2.840.113741.1.13.1)."""

from dataclasses import dataclass

import dcap_qvl

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.trust.certificates import remembered

_EXTENSION = "1.2.840.113741.1.13.1"
_COMPONENTS = 16
_TRUE, _FALSE = b"\xff", b"\x00"


@dataclass(frozen=True, slots=True)
class TdxPlatform:
    """A platform, as Intel certified it.

    Attributes:
        fmspc, pce_id: the platform family, 6 and 2 bytes.
        component_svns: 16 bytes, one version each, as TCB levels are compared with. CPUSVN is no substitute: Intel
            defines it as opaque, though it has the same bytes on today's platforms.
        pce_svn: version of the provisioning enclave.
        ppid, instance_id: 16 bytes each. A single-package platform has no instance id.
        dynamic, cached_keys, smt: packages may be added, root keys are cached, threads share cores. None if the
            certificate does not say.
    """

    fmspc: bytes
    pce_id: bytes
    component_svns: bytes
    pce_svn: int
    ppid: bytes
    instance_id: bytes
    dynamic: bool | None
    cached_keys: bool | None
    smt: bool | None

    @property
    def platform_id(self) -> bytes:
        """The 16 bytes that name the machine."""
        return self.instance_id or self.ppid


@remembered
def read_platform(chain_pem: bytes) -> TdxPlatform:
    """Read the platform of ``chain_pem``'s first certificate; EvidenceError ``platform_mismatch`` if it names none."""
    try:
        extension = dcap_qvl.parse_pck_extension_from_pem(chain_pem)
    except ValueError:
        refuse(Refusal.PLATFORM_MISMATCH, "the PCK certificate does not name its platform family")
    return TdxPlatform(
        fmspc=bytes(extension.fmspc),
        pce_id=bytes(extension.pce_id),
        component_svns=_component_svns(extension),
        pce_svn=int(extension.pce_svn),
        ppid=bytes(extension.ppid),
        instance_id=bytes(extension.platform_instance_id or b""),
        dynamic=_flag(extension, "7.1"),
        cached_keys=_flag(extension, "7.2"),
        smt=_flag(extension, "7.3"),
    )


def _component_svns(extension: dcap_qvl.PckExtension) -> bytes:
    values = [extension.get_value(f"{_EXTENSION}.2.{number}") for number in range(1, _COMPONENTS + 1)]
    # DER writes a number above 127 with a zero byte in front.
    svns = [int.from_bytes(value, "big", signed=True) for value in values if value]
    if len(svns) != _COMPONENTS or not all(0 <= svn < 2**8 for svn in svns):
        refuse(Refusal.PLATFORM_MISMATCH, "the PCK certificate does not state the sixteen versions of its platform")
    return bytes(svns)


def _flag(extension: dcap_qvl.PckExtension, suffix: str) -> bool | None:
    value = extension.get_value(f"{_EXTENSION}.{suffix}")
    return {_TRUE: True, _FALSE: False}.get(bytes(value)) if value is not None else None
