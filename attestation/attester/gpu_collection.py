"""Collects the evidence of a node's confidential GPUs through NVML, the driver's management library.

Nothing here is verified: the receiver of the evidence appraises it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pynvml

from raycloak.attestation.attester.switch_collection import SwitchCollector
from raycloak.attestation.core.evidence import GpuEvidence
from raycloak.attestation.gpu.device import CHAIN_LENGTH, chain_in
from raycloak.attestation.gpu.report import NONCE_BYTES
from raycloak.metrics.errors import EvidenceError
from raycloak.metrics.gpu_readings import confidential_state

_DRIVER_REMEDY: Final = (
    "Run the worker where the NVIDIA driver (R535 or later) and a Hopper or Blackwell GPU are, or declare no GPU."
)
_MODE_REMEDY: Final = "Turn confidential computing on for the GPU from the host, and start the guest again."


def visible_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the GPU indices that a scheduler set in ``CUDA_VISIBLE_DEVICES``; None if it is unset.

    Raises:
        EvidenceError: ``gpu_unavailable`` if GPUs are named in another way.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names = [name.strip() for name in given.split(",") if name.strip()]
    # `isdigit` alone accepts digits that `int` refuses, such as superscripts.
    if not all(name.isascii() and name.isdigit() for name in names):
        raise EvidenceError(
            "gpu_unavailable",
            f"CUDA_VISIBLE_DEVICES is '{given}', which names no indices of GPUs.",
            "Name GPUs by their indices; parts of a GPU give no evidence.",
        )
    return tuple(int(name) for name in names)


class GpuCollector:
    """The `raycloak.attestation.attester.attester.GpuSource` of this machine's GPUs.

    Args:
        devices: NVML indices of the worker's declared GPUs, in the order of presentation. None takes every GPU.
        nvml: the ``pynvml`` module.
        used: UUIDs of the GPUs that the worker computes on, as NVML writes them.
        switches: the collector of the switches between them.
    """

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        nvml: Any = pynvml,
        used: Sequence[str] = (),
        switches: SwitchCollector | None = None,
    ) -> None:
        self._devices = devices
        self._used = used
        self._nvml = nvml
        self._switches = switches or SwitchCollector()

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `GpuEvidence` per GPU over ``nonce`` (32 bytes).

        Guarantee: a worker that computes on a GPU that is not among them gives no evidence.

        Raises:
            EvidenceError: ``gpu_unavailable`` if there is no driver, no such GPU, confidential computing is off, or
                the driver gives no report; ``gpu_differs`` for a worker that computes on another GPU.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a GPU reports over {NONCE_BYTES} bytes, not {len(nonce)}")
        with self._driver():
            state = confidential_state(self._nvml)
            if state not in ("on", "ppcie"):
                found = {None: "cannot be asked for its mode", "off": "is not in confidential-computing mode"}
                what = found.get(state, f"is in mode '{state}', which protects nothing")
                raise EvidenceError("gpu_unavailable", f"the machine's NVIDIA driver {what}.", _MODE_REMEDY)
            indices = self._indices()
            if self._used:
                self._require_used(indices)
            return tuple(self._evidence(index, nonce) for index in indices)

    def collect_switches(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `SwitchEvidence` per switch of the machine in protected-PCIe mode; none in other modes.

        Raises:
            EvidenceError: ``gpu_unavailable`` if there is no driver, or as
                `raycloak.attestation.attester.switch_collection.SwitchCollector.collect`.
        """
        with self._driver():
            needed = confidential_state(self._nvml) == "ppcie"
        return self._switches.collect(nonce) if needed else ()

    @contextmanager
    def _driver(self) -> Iterator[None]:
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise EvidenceError(
                "gpu_unavailable", f"there is no NVIDIA driver to ask for GPU evidence: {error}.", _DRIVER_REMEDY
            ) from None
        try:
            yield
        finally:
            self._nvml.nvmlShutdown()

    def _indices(self) -> Sequence[int]:
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise EvidenceError("gpu_unavailable", f"the GPUs cannot be counted: {error}.", _DRIVER_REMEDY) from None
        if self._devices is None:
            return range(count)
        missing = [index for index in self._devices if not 0 <= index < count]
        if missing:
            raise EvidenceError(
                "gpu_unavailable", f"the worker declares GPU {missing[0]}, and the machine has {count}.", _DRIVER_REMEDY
            )
        return self._devices

    def _require_used(self, indices: Sequence[int]) -> None:
        try:
            shown = {self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByIndex(index)) for index in indices}
        except pynvml.NVMLError as error:
            raise EvidenceError("gpu_unavailable", f"a GPU does not tell its UUID: {error}.", _DRIVER_REMEDY) from None
        if others := sorted(set(self._used) - shown):
            raise EvidenceError(
                "gpu_differs",
                f"the worker computes on {others[0]}, and the evidence would be of {', '.join(sorted(shown))}.",
                "Leave CUDA_DEVICE_ORDER to raycloak, and CUDA_VISIBLE_DEVICES to Ray or the vault's settings.",
            )

    def _evidence(self, index: int, nonce: bytes) -> bytes:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            report = self._nvml.nvmlDeviceGetConfComputeGpuAttestationReport(handle, nonce)
            certificate = self._nvml.nvmlDeviceGetConfComputeGpuCertificate(handle)
        except pynvml.NVMLError as error:
            raise EvidenceError("gpu_unavailable", f"GPU {index} gives no evidence: {error}.", _MODE_REMEDY) from None
        chain = chain_in(bytes(certificate.attestationCertChain[: certificate.attestationCertChainSize]))
        if not chain:
            raise EvidenceError(
                "gpu_unavailable", f"GPU {index} has no chain of {CHAIN_LENGTH} certificates.", _DRIVER_REMEDY
            )
        return GpuEvidence(report=bytes(report.attestationReport[: report.attestationReportSize]), chain=chain).encode()
