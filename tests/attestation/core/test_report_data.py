import hashlib
from typing import Any

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.core.report_data import expected_report_data

FIELDS: dict[str, Any] = {
    "nonce": b"n" * 32,
    "run_id": "run",
    "member_id": "worker-0",
    "role": "worker",
    "hpke_key": b"h" * 1216,
    "mask_key": b"x" * 32,
    "identity_key": b"i" * 32,
    "manifest_digest": b"m" * 32,
    "known_answer": b"k" * 32,
    "gpu_evidence": (b"gpu 0", b"gpu 1"),
    "code": b"",
    "switch_evidence": (),
}


def report_data(**fields: Any) -> bytes:
    """Return the report data for fields of which some could not be presented together."""
    return expected_report_data(Presentation.model_construct(**fields, quote=b""))


def test_report_data_is_the_documented_hash() -> None:
    gpus = hashlib.sha384(length_prefixed("raycloak/gpu-evidence/v1", b"gpu 0", b"gpu 1")).digest()
    ordered = [FIELDS[name] for name in list(FIELDS)[:-3]]
    expected = hashlib.sha512(length_prefixed("raycloak/attest/v1", *ordered, gpus, 2)).digest()
    assert report_data(**FIELDS) == expected
    with_code = hashlib.sha512(length_prefixed("raycloak/attest/v1", *ordered, gpus, 2, b"c" * 32)).digest()
    assert report_data(**FIELDS | {"code": b"c" * 32}) == with_code
    switches = hashlib.sha384(length_prefixed("raycloak/switch-evidence/v1", b"switch 0")).digest()
    with_switches = length_prefixed("raycloak/attest/v1", *ordered, gpus, 2, b"", switches)
    assert report_data(**FIELDS | {"switch_evidence": (b"switch 0",)}) == hashlib.sha512(with_switches).digest()
    assert len(expected) == 64


CHANGES = [
    {"nonce": b"N" * 32},
    {"run_id": "run2"},
    {"member_id": "worker-1"},
    {"role": "aggregator"},
    {"hpke_key": b"H" + b"h" * 1215},
    {"hpke_key": b"h" * 1215 + b"H"},
    {"mask_key": b"X" * 32},
    {"identity_key": b"I" * 32},
    {"mask_key": b"i" * 32, "identity_key": b"x" * 32},
    {"run_id": "runw", "member_id": "orker-0"},
    {"manifest_digest": b"M" * 32},
    {"known_answer": b"K" * 32},
    {"known_answer": b""},
    {"gpu_evidence": ()},
    {"gpu_evidence": (b"gpu 0",)},
    {"gpu_evidence": (b"gpu 1", b"gpu 0")},
    {"gpu_evidence": (b"gpu 0", b"gpu 1", b"gpu 1")},
    {"gpu_evidence": (b"gpu 0gpu 1",)},
    {"code": b"c" * 32},
    {"code": b"d" * 32},
    {"switch_evidence": (b"switch 0", b"switch 1")},
    {"switch_evidence": (b"switch 1", b"switch 0")},
    {"switch_evidence": (b"switch 0switch 1",)},
    {"code": b"c" * 32, "switch_evidence": (b"switch 0",)},
    {"switch_evidence": (b"switch 0",)},
]


def test_every_field_is_bound() -> None:
    values = {report_data(**FIELDS)} | {report_data(**(FIELDS | change)) for change in CHANGES}
    assert len(values) == len(CHANGES) + 1
    assert {name for change in CHANGES for name in change} == set(FIELDS)


def test_every_field_of_a_presentation_is_among_them_or_only_helps_to_read_the_quote() -> None:
    assert set(Presentation.model_fields) - set(FIELDS) == {"quote", "quote_family", "certificates"}
    presented = Presentation(**FIELDS, quote=b"q", quote_family="sev_snp", certificates=(b"c",))
    assert expected_report_data(presented) == report_data(**FIELDS)
