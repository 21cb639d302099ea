from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.tdx.quote import MAX_QUOTE_BYTES, parse_quote
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, Session
from tests.simulators.tdx import QuoteVariant

# Behind the header and body (632), signature, key, QE report, its signature and 32 bytes of authentication data.
INNER_TYPE = 632 + 4 + 64 + 64 + 6 + 384 + 64 + 2 + 32


@pytest.fixture(scope="module")
def quote(session: Session) -> bytes:
    return session.platform.quote(bytes(range(64)), MEASUREMENT)


def refusal_of(data: bytes) -> str:
    with pytest.raises(EvidenceError) as refused:
        parse_quote(data)
    return refused.value.code


def test_fields_stand_where_the_format_puts_them(quote: bytes) -> None:
    parsed = parse_quote(quote)
    report = parsed.report
    assert report.mr_td == MEASUREMENT
    assert report.report_data == bytes(range(64))
    assert report.td_attributes == 1 << 28
    assert parsed.signed == quote[:632]
    assert [report.rtmr0, report.rtmr1, report.rtmr2, report.rtmr3] == [bytes(48)] * 4
    assert (report.tee_tcb_svn2, report.mr_service_td) == (b"", b"")


def test_every_field_is_read_from_its_own_place(session: Session) -> None:
    """Of a TD 1.5 report, by the offsets of Intel's format."""
    places = {
        "tee_tcb_svn": (0, 16), "module_signer": (64, 48), "module_attributes": (112, 8), "td_attributes": (120, 8),
        "mr_td": (136, 48), "mr_config_id": (184, 48), "rtmr0": (328, 48), "rtmr1": (376, 48), "rtmr2": (424, 48),
        "rtmr3": (472, 48), "report_data": (520, 64), "tee_tcb_svn2": (584, 16), "mr_service_td": (600, 48),
    }  # fmt: skip
    quote = session.platform.quote(bytes(64), MEASUREMENT, QuoteVariant(version=5))
    for name, (at, size) in places.items():
        value = bytes(range(1, size + 1))
        found = getattr(parse_quote(quote[: 54 + at] + value + quote[54 + at + size :]).report, name)
        assert found == (int.from_bytes(value, "little") if name == "td_attributes" else value), name


def test_the_whole_quote_is_kept(quote: bytes) -> None:
    parsed = parse_quote(quote)
    assert len(parsed.chain) == 3
    assert parsed.raw == quote


def test_zero_padding_is_cut_off_and_anything_else_refused(quote: bytes) -> None:
    assert parse_quote(quote + bytes(3065)).raw == quote
    assert refusal_of(quote + b"\1") == "evidence_malformed"
    assert refusal_of(quote + bytes(70) + b"\n") == "evidence_malformed"


def test_every_truncation_is_malformed(quote: bytes) -> None:
    for size in (*range(700), *range(700, len(quote), 37), len(quote) - 1):
        assert refusal_of(quote[:size]) == "evidence_malformed"


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 3), (0, 5), (0, 6), (2, 3), (4, 0), (764, 5), (632, 0), (635, 1), (766, 0), (INNER_TYPE, 0), (INNER_TYPE, 6)],
)
def test_other_versions_kinds_and_lengths_are_malformed(quote: bytes, offset: int, value: int) -> None:
    changed = bytearray(quote)
    changed[offset] = value
    assert refusal_of(bytes(changed)) == "evidence_malformed"


def test_certification_without_a_chain_has_no_certificates(quote: bytes) -> None:
    assert quote[INNER_TYPE] == 5
    for kind in (1, 2, 3, 4):
        assert parse_quote(quote[:INNER_TYPE] + bytes([kind]) + quote[INNER_TYPE + 1 :]).chain == ()
    unreadable = quote.replace(b"MII", b"IIM", 1)
    assert parse_quote(unreadable).chain == ()
    blank = with_chain(quote, b" \n")
    assert parse_quote(blank).chain == ()


def with_chain(quote: bytes, chain: bytes) -> bytes:
    """Return the quote with another text in place of its certificates, and all lengths to fit."""
    certification = quote[636 + 134 : INNER_TYPE] + b"\5\0" + len(chain).to_bytes(4, "little") + chain
    outer = quote[636 : 636 + 130] + len(certification).to_bytes(4, "little") + certification
    return quote[:632] + len(outer).to_bytes(4, "little") + outer


def test_nothing_but_certificates_is_in_the_certification_data(quote: bytes) -> None:
    """Readers of PEM pass over other text, which nobody signed."""
    chain = quote[INNER_TYPE + 6 :]
    assert with_chain(quote, chain) == quote
    assert with_chain(quote, b"\r\n" + chain + b"\n \t\n" + bytes(3)) != quote
    assert len(parse_quote(with_chain(quote, b"\r\n" + chain + b"\n \t\n" + bytes(3))).chain) == 3
    end = b"-----END CERTIFICATE-----\n"
    for text in (
        b"x" + chain,
        chain + b"x",
        chain + b"\0x",
        b"\0" + chain,
        chain.replace(end, end + b"subject=CN\n", 1),
        chain.replace(b"MII", b"!!!", 1),
        chain + b"-----BEGIN PRIVATE KEY-----\nMII=\n-----END PRIVATE KEY-----\n",
        chain[:-10],
        b"text",
    ):
        assert refusal_of(with_chain(quote, text)) == "evidence_malformed", text


def test_an_oversized_quote_is_refused_before_it_is_read(quote: bytes) -> None:
    assert refusal_of(quote + bytes(MAX_QUOTE_BYTES)) == "evidence_malformed"


@given(st.data())
def test_the_parser_raises_nothing_but_refusals(quote: bytes, data: st.DataObject) -> None:
    changed = bytearray(quote)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(quote) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=6))
        changed[start : start + len(piece)] = piece
    with suppress(EvidenceError):
        parse_quote(bytes(changed))
