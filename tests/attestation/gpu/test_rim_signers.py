"""OCSP answers about the signers of a GPU's reference values: judged where there are any, and asked of nobody."""

import pytest
from cryptography import x509

from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import GpuReferences
from tests.attestation.gpu.gpu_bench import NOW, GpuBench
from tests.simulators.gpu import SimulatedGpuVendor
from tests.simulators.gpu_pki import OcspVariant

LAX = GpuRules(require_rim=False)


@pytest.fixture(scope="module")
def bench() -> GpuBench:
    return GpuBench.create()


def test_answers_about_the_signers_of_reference_values_are_judged_where_there_are_any(bench):
    good = bench.vendor.rim_ocsp(NOW)
    assert bench.code(ocsp=(*bench.ocsp, *good)) is None
    assert bench.code(ocsp=(*bench.ocsp, *good[1:])) is None
    for position in (0, 1):
        for variant in (OcspVariant(reason=x509.ReasonFlags.key_compromise), OcspVariant(unknown=True)):
            answers = bench.vendor.rim_ocsp(NOW, {position: variant})
            assert bench.code(ocsp=(*answers, *bench.ocsp)) == "revoked"
            assert bench.code(ocsp=(*answers, *bench.ocsp), rims=GpuReferences(), rules=LAX) is None


def test_an_answer_about_a_signer_must_be_genuine_and_current(bench):
    forged = bench.vendor.rim_ocsp(NOW, {0: OcspVariant(responder=bench.gpu.credentials[1])})
    assert bench.code(ocsp=(*bench.ocsp, *forged)) == "signer_role"
    stranger = bench.vendor.rim_ocsp(NOW, {0: OcspVariant(responder=SimulatedGpuVendor.create().rim_signer)})
    assert bench.code(ocsp=(*bench.ocsp, *stranger)) == "signer_role"
    assert bench.code(ocsp=(*bench.ocsp, *bench.vendor.rim_ocsp(NOW - 90_000))) == "collateral_stale"
    endless = bench.vendor.rim_ocsp(NOW, {1: OcspVariant(without_next_update=True)})
    assert bench.code(ocsp=(*bench.ocsp, *endless)) == "collateral_stale"


def test_evidence_ends_with_the_first_answer_about_a_signer(bench):
    later = bench.vendor.ocsp(bench.gpu, NOW + 1800)
    assert bench.verify(ocsp=later).expires_at > bench.verify(ocsp=(*later, *bench.vendor.rim_ocsp(NOW))).expires_at
