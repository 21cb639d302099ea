"""OCSP answers about a GPU's certificates: whose count, which counts, and when."""

import random
from datetime import UTC, datetime

import pytest
from cryptography import x509

from raycloak.attestation.gpu.rules import GpuRules
from tests.attestation.gpu.gpu_bench import NOW, GpuBench
from tests.simulators.gpu_pki import OcspVariant, issue, issue_responder, ocsp_answer


@pytest.fixture(scope="module")
def bench() -> GpuBench:
    return GpuBench.create()


@pytest.mark.parametrize(
    "variant",
    [
        OcspVariant(reason=x509.ReasonFlags.key_compromise),
        OcspVariant(reason=x509.ReasonFlags.certificate_hold),
        OcspVariant(unknown=True),
    ],
    ids=["revoked", "hold", "unknown"],
)
@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_certificate_whose_answer_is_not_good_is_revoked(
    bench: GpuBench, variant: OcspVariant, position: int
) -> None:
    answers = bench.vendor.ocsp(bench.gpu, NOW, {position: variant})
    assert bench.code(ocsp=answers) == "revoked"
    assert bench.code(ocsp=answers, rules=GpuRules(require_ocsp=False)) == "revoked"


def test_answers_come_from_whom_the_issuer_authorised(bench: GpuBench) -> None:
    boot_rom, provisioner = bench.gpu.credentials[1:3]
    stranger = issue_responder(issue("NVIDIA GH100 Provisioner ICA 1", None, is_ca=True))
    for responder, code in (
        (provisioner, None),
        (issue_responder(provisioner), None),
        (issue_responder(provisioner, authorised=False), "signer_role"),
        (issue_responder(bench.gpu.credentials[3]), "signer_role"),
        (boot_rom, "signer_role"),
        (stranger, "signer_role"),
    ):
        answers = bench.vendor.ocsp(bench.gpu, NOW, {1: OcspVariant(responder=responder)})
        assert bench.code(ocsp=answers) == code


def test_an_answer_names_the_issuer_and_not_the_serial_number_alone(bench: GpuBench) -> None:
    boot_rom, provisioner, family = bench.gpu.credentials[1:4]
    at = datetime.fromtimestamp(NOW, UTC)
    for issuer, code in ((provisioner, None), (family, "collateral_stale")):
        variant = OcspVariant(responder=issue_responder(provisioner))
        answer = ocsp_answer(boot_rom.certificate, issuer, at, variant)
        assert bench.code(ocsp=(answer, *bench.ocsp[1:])) == code


def test_a_changed_answer_is_tampered_or_none(bench: GpuBench) -> None:
    draw, answer = random.Random(3), bench.ocsp[0]
    for position in draw.sample(range(len(answer)), 20):
        changed = bytearray(answer)
        changed[position] ^= draw.randrange(1, 256)
        code = bench.code(ocsp=(bytes(changed), *bench.ocsp[1:]))
        assert code in ("evidence_tampered", "collateral_stale", "revoked", "signer_role")


def test_answers_must_be_there_and_current(bench: GpuBench) -> None:
    lax = GpuRules(require_ocsp=False)
    assert bench.code(ocsp=()) == "collateral_stale"
    assert bench.code(ocsp=(), rules=lax) is None
    assert bench.code(ocsp=bench.ocsp[1:], rules=lax) == "collateral_stale"
    assert bench.code(ocsp=(b"", *bench.ocsp[1:])) == "collateral_stale"
    assert bench.code(ocsp=bench.vendor.ocsp(bench.vendor.gpu(), NOW)) == "collateral_stale"
    endless = bench.vendor.ocsp(bench.gpu, NOW, {2: OcspVariant(without_next_update=True)})
    assert bench.code(ocsp=endless) == "collateral_stale"


@pytest.mark.parametrize(
    ("offset", "code"),
    [(-3601, "collateral_stale"), (-3600, None), (82_799, None), (82_800, "collateral_stale")],
)
def test_the_window_of_an_answer_excludes_its_end(bench: GpuBench, offset: int, code: str | None) -> None:
    assert bench.code(now=NOW + offset) == code


def test_the_newest_answer_counts(bench: GpuBench) -> None:
    held = bench.vendor.ocsp(bench.gpu, NOW - 60, {1: OcspVariant(reason=x509.ReasonFlags.certificate_hold)})
    assert bench.code(ocsp=(*bench.ocsp, *held)) is None
    held = bench.vendor.ocsp(bench.gpu, NOW + 60, {1: OcspVariant(reason=x509.ReasonFlags.certificate_hold)})
    assert bench.code(ocsp=(*held, *bench.ocsp)) == "revoked"


HOLD = OcspVariant(reason=x509.ReasonFlags.certificate_hold)
REVOKED = OcspVariant(reason=x509.ReasonFlags.key_compromise)


@pytest.mark.parametrize("worse", [HOLD, REVOKED, OcspVariant(unknown=True)], ids=["hold", "revoked", "unknown"])
def test_of_two_answers_of_one_time_the_worse_counts_in_any_order(bench: GpuBench, worse: OcspVariant) -> None:
    bad = bench.vendor.ocsp(bench.gpu, NOW, {1: worse})
    assert bench.code(ocsp=(*bad, *bench.ocsp)) == "revoked"
    assert bench.code(ocsp=(*bench.ocsp, *bad)) == "revoked"


@pytest.mark.parametrize(("earlier", "code"), [(HOLD, None), (REVOKED, "revoked"), (OcspVariant(unknown=True), None)])
def test_only_a_hold_is_lifted_by_a_newer_good_answer(bench: GpuBench, earlier: OcspVariant, code: str | None) -> None:
    old = bench.vendor.ocsp(bench.gpu, NOW - 60, {1: earlier})
    assert bench.code(ocsp=(*old, *bench.ocsp)) == code
    assert bench.code(ocsp=(*bench.ocsp, *old)) == code


def test_an_answer_of_a_stranger_is_not_hidden_by_a_sound_one_of_its_time(bench: GpuBench) -> None:
    forged = bench.vendor.ocsp(bench.gpu, NOW, {1: OcspVariant(responder=bench.gpu.credentials[1])})
    assert bench.code(ocsp=(*forged, *bench.ocsp)) == bench.code(ocsp=(*bench.ocsp, *forged)) == "signer_role"
