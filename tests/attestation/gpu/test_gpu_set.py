"""The GPUs of one worker: exactly those declared, each once, all over the worker's own nonce."""

from typing import Any

import pytest

from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import MAX_GPUS, gpu_nonce, verify_gpus
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.simulators.gpu import VBIOS_INDICES, VBIOS_VERSION, SimulatedGpu, SimulatedGpuVendor
from tests.simulators.gpu_rim import Manifest

NOW = 1_800_000_000
CHALLENGE, HPKE_KEY = b"c" * 32, b"k" * 1216
NONCE = gpu_nonce(CHALLENGE, HPKE_KEY)


class Node:
    """A machine with three GPUs of two generations."""

    def __init__(self) -> None:
        self.vendor = SimulatedGpuVendor.create()
        self.gpus = (self.vendor.gpu(), self.vendor.gpu(), self.vendor.gpu("GB100"))
        hopper, blackwell = self.vendor.references(), self.vendor.references("GB100")
        self.rims = [each for rims in (hopper, blackwell) for each in (rims.driver, rims.vbios) if each]
        self.ocsp = [answer for gpu in self.gpus for answer in self.vendor.ocsp(gpu, NOW)]

    def evidence(self, nonce: bytes = NONCE) -> list[bytes]:
        return [gpu.evidence(nonce) for gpu in self.gpus]

    def verify(self, evidence: list[bytes], count: int = 3, **changes: Any) -> tuple[DeviceClaims, ...]:
        arguments: dict[str, Any] = {
            "nonce": NONCE,
            "anchors": self.vendor.anchors,
            "accepted": (EvidenceClass.SIMULATED,),
            "rules": GpuRules(),
            "rims": self.rims,
            "ocsp": self.ocsp,
            "now": NOW,
        }
        arguments |= changes
        terms = VerifierTerms(*(arguments.pop(name) for name in ("anchors", "accepted", "now")))
        return verify_gpus(evidence, count=count, terms=terms, **arguments)

    def code(self, evidence: list[bytes], count: int = 3, **changes: Any) -> str:
        with pytest.raises(EvidenceError) as refused:
            self.verify(evidence, count, **changes)
        return refused.value.code


@pytest.fixture(scope="module")
def node() -> Node:
    return Node()


def test_the_declared_gpus_pass_in_their_order(node: Node) -> None:
    claims = node.verify(node.evidence())
    assert [each.hwmodel for each in claims] == ["GH100 A01 GSP BROM", "GH100 A01 GSP BROM", "GB100 A01 GSP BROM"]
    backwards = node.verify(node.evidence()[::-1])
    assert [each.platform_id for each in backwards] == [each.platform_id for each in claims][::-1]
    assert node.verify([], count=0) == ()


def test_a_missing_extra_or_doubled_gpu_is_not_bound(node: Node) -> None:
    first, second, third = node.evidence()
    assert node.code([first, second]) == "gpu_not_bound"
    assert node.code([first, second, third], count=2) == "gpu_not_bound"
    assert node.code([first], count=0) == "gpu_not_bound"
    assert node.code([]) == "gpu_not_bound"
    assert node.code([first, second, second]) == "gpu_not_bound"
    assert node.code([first, second, node.gpus[0].evidence(NONCE)]) == "gpu_not_bound"
    assert node.code([first] * (MAX_GPUS + 1)) == "evidence_malformed"


def test_every_gpu_reports_over_the_nonce_of_this_worker_and_key(node: Node) -> None:
    first, second, _ = node.evidence()
    for nonce in (CHALLENGE, gpu_nonce(CHALLENGE, b"x" * 1216), gpu_nonce(b"x" * 32, HPKE_KEY)):
        assert node.code([first, second, node.gpus[2].evidence(nonce)]) == "gpu_not_bound"


def test_a_nonce_comes_from_one_challenge_and_key_alone() -> None:
    assert len(NONCE) == 32
    assert gpu_nonce(b"ab", b"c") != gpu_nonce(b"a", b"bc")


def test_one_bad_gpu_refuses_the_worker_by_its_own_code(node: Node) -> None:
    first, second, third = node.evidence()
    forged = SimulatedGpuVendor.create().gpu().evidence(NONCE)
    assert node.code([first, second, forged]) == "root_unknown"
    assert node.code([first, second, third[:-1]]) == "evidence_malformed"
    assert node.code([first, second, GpuEvidence(report=b"", chain=()).encode()]) == "evidence_malformed"
    report = node.gpus[0].report(NONCE)
    assert node.code([GpuEvidence(report=report, chain=()).encode()], count=1) == "chain_broken"
    swapped = GpuEvidence(report=report, chain=node.gpus[1].chain).encode()
    assert node.code([swapped], count=1) == "evidence_tampered"


def test_manifests_are_chosen_by_what_each_gpu_is(node: Node) -> None:
    gpu: SimulatedGpu = node.gpus[0]
    evidence = [gpu.evidence(NONCE)]
    assert node.code(evidence, 1, rims=()) == "gpu_state"
    assert node.code(evidence, 1, rims=node.rims[2:]) == "gpu_state"  # the other generation's
    other_board = node.vendor.sign(Manifest(VBIOS_VERSION, "GH100", {i: (bytes(48),) for i in VBIOS_INDICES}))
    assert node.verify(evidence, 1, rims=[other_board, *node.rims])
    assert node.code(evidence, 1, rims=[node.rims[0], other_board]) == "gpu_state"
