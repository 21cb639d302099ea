"""Simulated NVSwitches, and machines of simulated GPUs and switches in protected-PCIe mode.

Evidence has the genuine format and proves nothing about a machine.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from raycloak.attestation.core.evidence import SwitchEvidence
from raycloak.attestation.gpu.report import Opaque
from tests.simulators.gpu import GpuVariant, SimulatedGpu, SimulatedGpuVendor, genuine_value, spdm_report
from tests.simulators.gpu_pki import GpuCredential
from tests.simulators.gpu_rim import Manifest

SWITCH_VBIOS_VERSION: Final = "96.10.55.00.01"
_COUNT: Final = 31
_REQUEST: Final = bytes.fromhex("11e001ff")
_PORTS: Final = b"\xff" * 64
_FMC = b"switch firmware"


@dataclass(frozen=True, slots=True)
class SwitchVariant:
    """A report's content. The defaults pass, any other value is for testing refusals.

    Attributes:
        measurements: values by index, counted from 0, that replace the genuine ones.
        lock_status: None leaves it out.
        device_id: replaces the switch's own; empty leaves it out.
        gpus_last_byte_first: whether the ids of its GPUs are written in that order.
    """

    measurements: Mapping[int, bytes] = field(default_factory=dict)
    lock_status: int | None = 1
    device_id: bytes | None = None
    gpus_last_byte_first: bool = False
    vbios_version: str = SWITCH_VBIOS_VERSION


GENUINE_SWITCH: Final = SwitchVariant()


@dataclass(frozen=True, slots=True)
class SimulatedSwitch:
    """One simulated switch.

    Attributes:
        credentials: firmware leaf, boot ROM, provisioner, family and root.
        gpu_ids: of the GPUs at its ports.
    """

    credentials: tuple[GpuCredential, ...]
    device_id: bytes
    gpu_ids: tuple[bytes, ...]

    @property
    def chain(self) -> tuple[bytes, ...]:
        return tuple(each.der for each in self.credentials)

    def report(self, nonce: bytes, variant: SwitchVariant = GENUINE_SWITCH) -> bytes:
        """Return the SPDM request over ``nonce`` (32 bytes) followed by the answer to it."""
        own = self.device_id if variant.device_id is None else variant.device_id
        step = -1 if variant.gpus_last_byte_first else 1
        listed = b"".join(each[::step] for each in self.gpu_ids)
        opaque: dict[int, bytes] = {
            Opaque.VBIOS_VERSION: variant.vbios_version.encode(),
            # Eight places, and the port of each link behind them.
            Opaque.SWITCH_TOPOLOGY: listed + bytes(64 - len(listed)) + _PORTS,
        }
        if own:
            opaque[Opaque.DEVICE_ID] = own
        if variant.lock_status is not None:
            opaque[Opaque.LOCK_STATUS] = variant.lock_status.to_bytes(2, "little")
        values = [variant.measurements.get(index, genuine_value(index)) for index in range(_COUNT)]
        return spdm_report(self.credentials[0], _REQUEST, nonce, values, opaque)

    def evidence(self, nonce: bytes, variant: SwitchVariant = GENUINE_SWITCH) -> bytes:
        """Return the encoded message that a worker presents."""
        return SwitchEvidence(report=self.report(nonce, variant), chain=self.chain).encode()


@dataclass(frozen=True, slots=True)
class SwitchedMachine:
    """A machine of GPUs in protected-PCIe mode, each with links to all of its switches.

    It is the `raycloak.attestation.attester.attester.GpuSource` of an actor that has all of its GPUs.
    """

    gpus: tuple[SimulatedGpu, ...]
    switches: tuple[SimulatedSwitch, ...]

    @property
    def mode(self) -> GpuVariant:
        """The report of one of its GPUs."""
        ids = tuple(each.device_id for each in self.switches)
        return GpuVariant(feature_flag=2, protected_pcie=True, switch_ids=ids)

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        return tuple(gpu.evidence(nonce, self.mode) for gpu in self.gpus)

    def collect_switches(self, nonce: bytes) -> tuple[bytes, ...]:
        return tuple(switch.evidence(nonce) for switch in self.switches)


def switched_machine(vendor: SimulatedGpuVendor, gpus: int = 2, switches: int = 2) -> SwitchedMachine:
    """Make a new machine."""
    own = tuple(vendor.gpu() for _ in range(gpus))
    made = tuple(simulated_switch(vendor, tuple(each.device_id for each in own)) for _ in range(switches))
    return SwitchedMachine(own, made)


def simulated_switch(vendor: SimulatedGpuVendor, gpu_ids: Sequence[bytes]) -> SimulatedSwitch:
    """Make a new switch with a new chain and these GPUs at its ports."""
    device_id = secrets.token_bytes(8)
    chain = vendor.issue_chain("LS_10", device_id, hashlib.sha384(_FMC).digest())
    return SimulatedSwitch(chain, device_id, tuple(gpu_ids))


def switch_references(vendor: SimulatedGpuVendor) -> bytes:
    """Sign values of the VBIOS that simulated switches state."""
    values = {index: (genuine_value(index),) for index in range(_COUNT)}
    return vendor.sign(Manifest(SWITCH_VBIOS_VERSION, "LS10", values, range(0)))
