import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.snp.report import REPORT_BYTES, SIGNED_BYTES, parse_report
from raycloak.metrics.errors import EvidenceError


def blank(version: int = 3, algorithm: int = 1, flags: int = 0) -> bytearray:
    report = bytearray(REPORT_BYTES)
    report[0], report[0x34], report[0x48] = version, algorithm, flags
    return report


def code(data: bytes) -> str | None:
    try:
        parse_report(bytes(data))
    except EvidenceError as error:
        return error.code
    return None


@pytest.mark.parametrize("version", range(8))
def test_versions_that_firmware_emits_are_read(version: int) -> None:
    assert code(blank(version)) == (None if 2 <= version <= 5 else "evidence_malformed")


def test_the_kind_of_key_is_what_the_flags_say() -> None:
    kinds = [parse_report(bytes(blank(flags=flags))).key_kind for flags in (0b0, 0b1, 0b11, 0b100, 0b101)]
    assert kinds == ["VCEK", "VCEK", "VCEK", "VLEK", "VLEK"]
    assert {code(blank(flags=kind << 2)) for kind in range(2, 8)} == {"evidence_malformed"}


def test_another_signature_algorithm_is_malformed() -> None:
    assert [code(blank(algorithm=algorithm)) for algorithm in (0, 2, 255)] == ["evidence_malformed"] * 3


@pytest.mark.parametrize("size", [0, 1, 671, 672, REPORT_BYTES - 1, REPORT_BYTES + 1, 4000])
def test_every_other_length_is_malformed(size: int) -> None:
    assert code(bytes(blank()).ljust(size, b"\0")[:size]) == "evidence_malformed"


def test_only_the_48_bytes_of_r_and_s_may_differ_from_zero_behind_what_is_signed() -> None:
    values = {*range(SIGNED_BYTES, SIGNED_BYTES + 48), *range(SIGNED_BYTES + 72, SIGNED_BYTES + 120)}
    for position in range(SIGNED_BYTES, REPORT_BYTES):
        report = blank()
        report[position] = 1
        assert code(report) == (None if position in values else "evidence_malformed"), position


def test_fields_are_where_the_specification_has_them() -> None:
    report = blank(5)
    fields = {
        "policy": (0x08, 8), "vmpl": (0x30, 4), "platform_info": (0x40, 8), "report_data": (0x50, 64),
        "measurement": (0x90, 48), "host_data": (0xC0, 32), "report_id": (0x140, 32), "reported_tcb": (0x180, 8),
        "chip_id": (0x1A0, 64), "committed_tcb": (0x1E0, 8), "launch_tcb": (0x1F0, 8),
    }  # fmt: skip
    for number, (at, size) in enumerate(fields.values(), 1):
        report[at : at + size] = bytes([number]) * size
    parsed = parse_report(bytes(report))
    for number, (name, (_, size)) in enumerate(fields.items(), 1):
        value = getattr(parsed, name)
        assert value == (bytes([number]) * size if isinstance(value, bytes) else int(f"{number:02x}" * size, 16)), name
    report[SIGNED_BYTES : SIGNED_BYTES + 3], report[SIGNED_BYTES + 72] = b"\1\2\3", 9
    parsed = parse_report(bytes(report))
    assert parsed.signature == (bytes(45) + b"\3\2\1") + (bytes(47) + b"\x09")
    assert parsed.signed == bytes(report[:SIGNED_BYTES])


@given(st.one_of(st.binary(max_size=1300), st.binary(min_size=REPORT_BYTES, max_size=REPORT_BYTES)))
def test_any_bytes_are_a_report_or_malformed(data: bytes) -> None:
    assert code(data) in (None, "evidence_malformed")


@given(st.data())
def test_a_report_with_changed_bytes_is_read_as_written_or_malformed(data: st.DataObject) -> None:
    report = blank()
    for position in data.draw(st.lists(st.integers(0, REPORT_BYTES - 1), max_size=5)):
        report[position] = data.draw(st.integers(0, 255))
    refused = code(report)
    assert refused in (None, "evidence_malformed")
    if refused is None:
        parsed = parse_report(bytes(report))
        assert parsed.signed + parsed.raw[SIGNED_BYTES:] == report
