"""Collecting GPU evidence through NVML, on a library that answers as the driver's binding does."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.attester.gpu_collection import GpuCollector, visible_devices
from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Presentation
from raycloak.attestation.core.messages import open_envelope, parse
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import gpu_nonce, verify_gpus
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.attestation.attester.test_attester import Source, challenge
from tests.attestation.conftest import MANIFEST, NOW, Session
from tests.simulators.gpu import SimulatedGpu, SimulatedGpus, SimulatedGpuVendor

NONCE = bytes(range(32))


class FakeNvml:
    """The functions of ``pynvml`` that are used, on simulated devices behind one switch for the whole machine."""

    def __init__(self, gpus: tuple[SimulatedGpu, ...], *, feature: int = 1, devtools: int = 0) -> None:
        self.gpus = gpus
        self.state = SimpleNamespace(ccFeature=feature, devToolsMode=devtools, environment=2)
        self.open = 0
        self.root_first = False
        self.chain_length = 5

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's name
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetConfComputeSettings(self, settings: Any) -> int:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlSystemGetConfComputeState(self) -> SimpleNamespace:  # noqa: N802
        return self.state

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimulatedGpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: SimulatedGpu) -> str:  # noqa: N802
        return f"GPU-{self.gpus.index(gpu)}"

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, gpu: SimulatedGpu, nonce: bytes) -> Any:  # noqa: N802
        found = pynvml.c_nvmlConfComputeGpuAttestationReport_t()
        report = gpu.report(bytes(nonce))
        found.attestationReport[: len(report)] = report
        found.attestationReportSize = len(report)
        return found

    def nvmlDeviceGetConfComputeGpuCertificate(self, gpu: SimulatedGpu) -> Any:  # noqa: N802
        found = pynvml.c_nvmlConfComputeGpuCertificate_t()
        chain = gpu.credentials[: self.chain_length]
        pem = "".join(each.pem for each in (chain[::-1] if self.root_first else chain)).encode()
        found.attestationCertChain[: len(pem)] = pem
        found.attestationCertChainSize = len(pem)
        return found


class Missing(FakeNvml):
    """A machine without a driver."""

    def nvmlInit(self) -> None:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


class Silent(FakeNvml):
    """A driver whose GPU does not answer."""

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, gpu: SimulatedGpu, nonce: bytes) -> Any:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture(scope="module")
def vendor() -> SimulatedGpuVendor:
    return SimulatedGpuVendor.create()


@pytest.fixture(scope="module")
def gpus(vendor: SimulatedGpuVendor) -> tuple[SimulatedGpu, ...]:
    return vendor.gpu(), vendor.gpu()


def refusal(nvml: Any, devices: tuple[int, ...] | None = None) -> EvidenceError:
    with pytest.raises(EvidenceError) as refused:
        GpuCollector(devices, nvml).collect(NONCE)
    assert refused.value.code == "gpu_unavailable"
    assert refused.value.remedy
    return refused.value


def test_every_gpu_reports_over_the_nonce_with_its_chain_leaf_first(gpus: tuple[SimulatedGpu, ...]) -> None:
    nvml = FakeNvml(gpus)
    for nvml.root_first in (False, True):
        found = [parse(GpuEvidence, each) for each in GpuCollector(nvml=nvml).collect(NONCE)]
        assert [each.chain for each in found] == [gpu.chain for gpu in gpus]
        assert all(each.report[4:36] == NONCE for each in found)
    assert nvml.open == 0


def test_the_declared_gpus_come_in_the_declared_order(gpus: tuple[SimulatedGpu, ...]) -> None:
    (first,) = GpuCollector((1,), FakeNvml(gpus)).collect(NONCE)
    assert parse(GpuEvidence, first).chain == gpus[1].chain
    found = GpuCollector((1, 0), FakeNvml(gpus)).collect(NONCE)
    assert [parse(GpuEvidence, each).chain for each in found] == [gpus[1].chain, gpus[0].chain]


@pytest.mark.parametrize(
    ("state", "says"),
    [({"feature": 0}, "not in confidential-computing mode"), ({"devtools": 1}, "devtools")],
)
def test_a_machine_outside_confidential_computing_is_named(
    gpus: tuple[SimulatedGpu, ...], state: dict[str, int], says: str
) -> None:
    nvml = FakeNvml(gpus, **state)
    assert says in refusal(nvml).message
    assert nvml.open == 0


def test_a_missing_driver_gpu_or_report_is_named(gpus: tuple[SimulatedGpu, ...]) -> None:
    assert "no NVIDIA driver" in refusal(Missing(gpus)).message
    assert "declares GPU 2, and the machine has 2" in refusal(FakeNvml(gpus), (0, 2)).message
    assert "GPU 0 gives no evidence" in refusal(Silent(gpus)).message
    short = FakeNvml(gpus)
    short.chain_length = 4
    assert "no chain of 5 certificates" in refusal(short).message


def test_guarantee_a_worker_that_computes_on_another_gpu_gives_no_evidence(gpus: tuple[SimulatedGpu, ...]) -> None:
    nvml = FakeNvml(gpus)
    assert len(GpuCollector((1,), nvml, used=("GPU-1",)).collect(NONCE)) == 1
    for used in (("GPU-0",), ("GPU-1", "GPU-0")):
        with pytest.raises(EvidenceError, match="computes on GPU-0, and the evidence would be of GPU-1") as refused:
            GpuCollector((1,), nvml, used=used).collect(NONCE)
        assert refused.value.code == "gpu_differs"
        assert refused.value.remedy
    assert nvml.open == 0


def test_a_scheduler_says_which_gpus_are_visible() -> None:
    for given, devices in (({}, None), ({"CUDA_VISIBLE_DEVICES": ""}, ()), ({"CUDA_VISIBLE_DEVICES": "2, 0"}, (2, 0))):
        assert visible_devices(given) == devices
    with pytest.raises(EvidenceError, match="MIG-1"):
        visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-1"})


def test_a_nonce_has_32_bytes(gpus: tuple[SimulatedGpu, ...]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        GpuCollector(nvml=FakeNvml(gpus)).collect(b"short")


def test_gpus_report_first_and_the_quote_binds_what_they_said(
    session: Session, vendor: SimulatedGpuVendor, gpus: tuple[SimulatedGpu, ...]
) -> None:
    for source in (GpuCollector(nvml=FakeNvml(gpus)), SimulatedGpus(gpus)):
        attester = Attester("worker-0", Source(session.platform), source)
        envelope = attester.present(challenge(), MANIFEST, b"k" * 32)
        presentation = open_envelope(Presentation, envelope, attester.identity.public)
        references = vendor.references()
        claims = verify_gpus(
            presentation.gpu_evidence,
            GpuRules(),
            VerifierTerms(vendor.anchors, (EvidenceClass.SIMULATED,), NOW),
            count=2,
            nonce=gpu_nonce(challenge().nonce, attester.hpke.public),
            rims=[each for each in (references.driver, references.vbios) if each],
            ocsp=[answer for gpu in gpus for answer in vendor.ocsp(gpu, NOW)],
        )
        assert len(claims) == 2
        bound = expected_report_data(presentation)
        assert bound in presentation.quote
        others = (presentation.gpu_evidence[::-1], presentation.gpu_evidence[:1], ())
        for changed in others:
            assert expected_report_data(presentation.model_copy(update={"gpu_evidence": changed})) != bound
