"""The real NVML binding over a library made of Python functions, which write through the pointers they are given."""

# ruff: noqa: N802, N815 - the C library gives the names

import ctypes

import pynvml
import pytest

from raycloak.metrics.gpu_readings import GpuReading, GpuSampler


def written(pointer):
    """Return the object behind a ``byref``; fail for a structure passed by value, which C would read as a pointer."""
    return pointer._obj


class FakeNvml:
    """A libnvidia-ml with the C calling convention: status returned, results through pointers."""

    def __init__(self, gpus=2, conf_compute=(2, 1, 0, 0)):
        self.gpus = gpus
        self.conf_compute = conf_compute
        self.shutdowns = 0

    def nvmlInitWithFlags(self, flags):
        return pynvml.NVML_SUCCESS

    def nvmlShutdown(self):
        self.shutdowns += 1
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCount_v2(self, count):
        written(count).value = self.gpus
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMemoryInfo(self, device, memory):
        written(memory).used, written(memory).total = 3 * 2**30, 141 * 2**30
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUtilizationRates(self, device, rates):
        written(rates).gpu = 75
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetPowerUsage(self, device, milliwatts):
        written(milliwatts).value = 312_500
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetTemperatureV(self, device, temperature):
        assert written(temperature).sensorType == pynvml.NVML_TEMPERATURE_GPU
        written(temperature).temperature = 44
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCurrentClocksEventReasons(self, device, reasons):
        written(reasons).value = pynvml.nvmlClocksEventReasonHwThermalSlowdown | 1
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetTotalEccErrors(self, device, kind, counter, errors):
        assert counter.value == pynvml.NVML_AGGREGATE_ECC
        written(errors).value = {
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: 5,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 1,
        }[kind.value]
        return pynvml.NVML_SUCCESS

    def nvmlSystemGetConfComputeSettings(self, settings):
        s = written(settings)
        assert s.version == pynvml.nvmlSystemConfComputeSettings_v1
        s.environment, s.ccFeature, s.devToolsMode, s.multiGpuMode = self.conf_compute
        return pynvml.NVML_SUCCESS


class OldNvml(FakeNvml):
    """A driver that knows neither the settings call nor the versioned temperature."""

    nvmlSystemGetConfComputeSettings = property()
    nvmlDeviceGetTemperatureV = property()
    nvmlDeviceGetCurrentClocksEventReasons = property()

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device, reasons):
        written(reasons).value = pynvml.nvmlClocksEventReasonSwPowerCap
        return pynvml.NVML_SUCCESS

    def nvmlSystemGetConfComputeState(self, state):
        s = written(state)
        s.environment, s.ccFeature, s.devToolsMode = self.conf_compute[:3]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetTemperature(self, device, sensor, celsius):
        written(celsius).value = 39
        return pynvml.NVML_SUCCESS


class BareNvml(FakeNvml):
    """A board that supports nothing beyond being counted."""

    def _unsupported(self, *arguments):
        return pynvml.NVML_ERROR_NOT_SUPPORTED

    nvmlDeviceGetMemoryInfo = nvmlDeviceGetUtilizationRates = nvmlDeviceGetPowerUsage = _unsupported
    nvmlDeviceGetTemperatureV = nvmlDeviceGetTemperature = nvmlDeviceGetTotalEccErrors = _unsupported
    nvmlSystemGetConfComputeSettings = nvmlSystemGetConfComputeState = _unsupported
    nvmlDeviceGetCurrentClocksEventReasons = _unsupported


class LostNvml(FakeNvml):
    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return pynvml.NVML_ERROR_GPU_IS_LOST if index.value == 0 else pynvml.NVML_SUCCESS


@pytest.fixture
def install(monkeypatch):
    def _install(library):
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    return _install


def test_every_field_is_read_in_base_units(install):
    install(FakeNvml())
    sampler = GpuSampler("node-a")
    readings = sampler.sample()
    assert readings == tuple(
        GpuReading("node-a", index, 0.75, 3 * 2**30, 141 * 2**30, 312.5, 44.0, 5, 1, "on", True) for index in (0, 1)
    )
    assert sampler.unavailable_reason() is None


def test_an_older_driver_is_read_through_the_older_calls(install):
    install(OldNvml(gpus=1))
    (reading,) = GpuSampler("n").sample()
    assert reading.temperature_celsius == 39
    assert reading.thermal_slowdown is False
    assert reading.confidential_state == "on"


def test_what_the_board_does_not_support_is_none(install):
    install(BareNvml(gpus=1))
    assert GpuSampler("n").sample() == (GpuReading("n", 0),)


def test_a_lost_gpu_does_not_hide_the_others(install):
    install(LostNvml())
    lost, alive = GpuSampler("n").sample()
    assert lost == GpuReading("n", 0, confidential_state="on")
    assert alive.memory_total_bytes == 141 * 2**30


@pytest.mark.parametrize(
    ("environment", "feature", "devtools", "multi_gpu", "state"),
    [
        (0, 0, 0, 0, "off"),
        (2, 0, 1, 0, "off"),
        (2, 1, 0, 0, "on"),
        (2, 1, 0, 2, "on"),
        (2, 0, 0, 1, "ppcie"),
        (2, 1, 1, 0, "devtools"),
        (1, 1, 0, 0, "simulated"),
    ],
)
def test_confidential_state_is_never_better_than_the_driver_says(
    install, environment, feature, devtools, multi_gpu, state
):
    install(FakeNvml(gpus=1, conf_compute=(environment, feature, devtools, multi_gpu)))
    assert GpuSampler("n").sample()[0].confidential_state == state


def test_a_machine_without_nvml_has_no_readings_and_says_so_once(monkeypatch):
    def missing(name, *arguments):
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", missing)
    sampler = GpuSampler("node-b")
    assert sampler.sample() == ()
    reason = sampler.unavailable_reason()
    assert reason is not None
    assert "node-b" in reason
    assert "not found" in reason.lower()
    assert sampler.unavailable_reason() is None
    sampler.close()


def test_a_closed_sampler_has_let_go_of_nvml(install):
    library = install(FakeNvml())
    sampler = GpuSampler("n")
    sampler.close()
    sampler.close()
    assert library.shutdowns == 1
    assert sampler.sample() == ()


def test_the_fake_refuses_a_structure_passed_by_value():
    with pytest.raises(AttributeError):
        FakeNvml().nvmlSystemGetConfComputeSettings(ctypes.c_uint())
