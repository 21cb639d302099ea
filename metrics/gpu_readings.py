"""NVML readings of one node's GPUs: load, memory, health and confidential-compute state."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pynvml

ConfidentialState = Literal["off", "on", "ppcie", "devtools", "simulated"]


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; a field is None where the driver or board does not support the query.

    Args:
        node: label of the node.
        index: NVML index of the GPU on that node.
        utilization_ratio: share of the driver's last sample period in which a kernel ran, 0 to 1.
        memory_used_bytes, memory_total_bytes: used includes what the driver reserves.
        power_watts: board power.
        temperature_celsius: GPU die.
        thermal_slowdown: whether clocks are held down for heat.
        ecc_corrected_total, ecc_uncorrected_total: memory errors over the life of the board.
        confidential_state: of the whole node. ``ppcie`` is protected PCIe; ``devtools`` and ``simulated`` protect
            nothing.
    """

    node: str
    index: int
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    confidential_state: ConfidentialState | None = None
    thermal_slowdown: bool | None = None


class GpuSampler:
    """Reads every GPU of the node that it runs on. It uses no GPU and creates no CUDA context.

    Args:
        node: label put on each reading.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._ready = False
        self._reason: str | None = None
        try:
            pynvml.nvmlInit()
            self._ready = True
        except pynvml.NVMLError as error:
            self._reason = f"no GPU metrics from {node}: {error}"

    def unavailable_reason(self) -> str | None:
        """Return why this node has no readings, to the first caller only; None afterwards and where NVML works."""
        reason, self._reason = self._reason, None
        return reason

    def sample(self) -> tuple[GpuReading, ...]:
        """Return one reading per GPU in NVML's order; empty on a machine without NVML."""
        # A node without a driver is usual, so it is no error.
        if not self._ready:
            return ()
        state = confidential_state()
        count = supported(pynvml.nvmlDeviceGetCount) or 0
        return tuple(self._read(index, state) for index in range(count))

    def close(self) -> None:
        """Release NVML; later samples are empty."""
        if self._ready:
            self._ready = False
            pynvml.nvmlShutdown()

    def _read(self, index: int, state: ConfidentialState | None) -> GpuReading:
        handle = supported(pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return GpuReading(self._node, index, confidential_state=state)
        memory = supported(pynvml.nvmlDeviceGetMemoryInfo, handle)
        rates = supported(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = supported(pynvml.nvmlDeviceGetPowerUsage, handle)
        # Drivers before 560 lack the versioned call; drivers after CUDA 14 lack the other.
        celsius = supported(pynvml.nvmlDeviceGetTemperatureV, handle, pynvml.NVML_TEMPERATURE_GPU)
        if celsius is None:
            celsius = supported(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        # The name is that of NVML before 535, whose symbol newer drivers keep.
        reasons = supported(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:
            reasons = supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        thermal = pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        return GpuReading(
            node=self._node,
            index=index,
            utilization_ratio=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=None if celsius is None else float(celsius),
            ecc_corrected_total=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected_total=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            confidential_state=state,
            thermal_slowdown=None if reasons is None else bool(reasons & thermal),
        )


def supported(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the query's answer, or None if NVML refuses it (not supported, lost GPU, not in this driver)."""
    try:
        return query(*arguments)
    # Boards and drivers differ in what they report; a missing figure must not hide the others.
    except pynvml.NVMLError:
        return None


def _ecc_errors(handle: Any, kind: int) -> int | None:
    errors = supported(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_AGGREGATE_ECC)
    return None if errors is None else int(errors)


def confidential_state(nvml: Any = pynvml) -> ConfidentialState | None:
    """Return the mode of the node as NVML states it, None where it does not; ``nvml`` must be initialised."""
    # Drivers that lack the settings may have the older state, which knows no protected PCIe.
    settings = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    # The binding hands its argument to the C function as it is and returns the raw status.
    if supported(nvml.nvmlSystemGetConfComputeSettings, ctypes.byref(settings)) != pynvml.NVML_SUCCESS:
        settings = supported(nvml.nvmlSystemGetConfComputeState)
    if settings is None:
        return None
    enabled = settings.ccFeature == pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    multi_gpu = getattr(settings, "multiGpuMode", pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE)
    protected_pcie = multi_gpu == pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE
    if not (enabled or protected_pcie):
        return "off"
    # First: devtools and the simulator protect nothing, whatever else is on.
    if settings.devToolsMode == pynvml.NVML_CC_SYSTEM_DEVTOOLS_MODE_ON:
        return "devtools"
    if settings.environment == pynvml.NVML_CC_SYSTEM_ENVIRONMENT_SIM:
        return "simulated"
    return "ppcie" if protected_pcie else "on"
