"""The parsers of GPU reports and OCSP answers on bytes that no device made."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.gpu.ocsp import find_answers
from raycloak.attestation.gpu.report import MAX_REPORT_BYTES, Opaque, parse_device_report
from raycloak.metrics.errors import EvidenceError

REQUEST = bytes.fromhex("11e001ff") + bytes(32) + b"\0"


def block(index: int, value: bytes, specification: int = 1) -> bytes:
    inner = b"\x01" + len(value).to_bytes(2, "little") + value
    return bytes((index, specification)) + len(inner).to_bytes(2, "little") + inner


def field(kind: int, value: bytes) -> bytes:
    return kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value


def report(
    *,
    request: bytes = REQUEST,
    head: bytes = bytes.fromhex("11600000"),
    count: int = 2,
    record: bytes = block(1, b"a") + block(2, b"b" * 48),
    opaque: bytes = field(3, b"590.12\0"),
    signature: bytes = bytes(96),
) -> bytes:
    sizes = (len(record).to_bytes(3, "little"), len(opaque).to_bytes(2, "little"))
    return request + head + bytes([count]) + sizes[0] + record + bytes(32) + sizes[1] + opaque + signature


def code(data: bytes) -> str | None:
    try:
        parse_device_report(data, "GPU")
    except EvidenceError as error:
        return error.code
    return None


def test_parts_of_a_report() -> None:
    parsed = parse_device_report(report(signature=b"s" * 96) + bytes(5), "GPU")
    assert parsed.signed == report(signature=b"")
    assert (parsed.nonce, parsed.signature) == (bytes(32), b"s" * 96)
    assert parsed.measurements == {1: b"a", 2: b"b" * 48}
    assert parsed.driver_version == "590.12"
    assert parsed.vbios_version == ""


@pytest.mark.parametrize(
    ("raw", "version"),
    [
        ("009f009601000000", "96.00.9F.00.01"),
        ("008800970f000000", "97.00.88.00.0F"),
        (b"96.10.55.00.01".hex(), "96.10.55.00.01"),
        ("009f00960100ff00", ""),
        ("0a", ""),
        ("", ""),
    ],
)
def test_versions_of_the_vbios(raw: str, version: str) -> None:
    opaque = field(Opaque.VBIOS_VERSION, bytes.fromhex(raw))
    assert parse_device_report(report(opaque=opaque), "GPU").vbios_version == version


@pytest.mark.parametrize(
    "data",
    [
        report(request=bytes.fromhex("10e001ff") + REQUEST[4:]),
        report(request=bytes.fromhex("116001ff") + REQUEST[4:]),
        report(request=bytes.fromhex("11e000ff") + REQUEST[4:]),
        report(request=bytes.fromhex("11e00101") + REQUEST[4:]),
        report(head=bytes.fromhex("12600000")),
        report(head=bytes.fromhex("11610000")),
        report(count=1),
        report(count=3),
        report(record=block(0, b"a") + block(1, b"b")),
        report(record=block(1, b"a") + block(1, b"b")),
        report(record=block(1, b"a") + block(2, b"b", specification=2)),
        report(record=block(1, b"a") + b"\x02\x01\x04\x00\x01\x02\x00a"),
        report(record=block(1, b"a") + b"\x02\x01\x05\x00\x01\x01\x00ab"),
        report(opaque=field(3, b"a") + field(3, b"a")),
        report(opaque=b"\x03\x00\x02\x00a"),
        report(opaque=b"\x03\x00\x02"),
        report(signature=bytes(95)),
        report() + b"\x01",
        report() + bytes(MAX_REPORT_BYTES),
        b"",
    ],
)
def test_anything_else_is_malformed(data: bytes) -> None:
    assert code(data) == "evidence_malformed"


def test_a_report_cut_anywhere_is_malformed() -> None:
    whole = report(signature=b"s" * 96)
    assert code(whole) is None
    assert {code(whole[:size]) for size in range(len(whole))} == {"evidence_malformed"}


@given(st.data())
def test_changed_reports_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(report())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    assert code(bytes(whole)) in (None, "evidence_malformed")


@given(st.binary(max_size=600))
def test_any_bytes_are_a_report_or_malformed(data: bytes) -> None:
    assert code(data) in (None, "evidence_malformed")
    assert code(REQUEST + data) in (None, "evidence_malformed")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_none(data: bytes) -> None:
    with suppress(EvidenceError):
        assert find_answers([data], ()) == ()
