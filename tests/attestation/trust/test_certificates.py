from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.simulators.tdx_pki import Credential, new_platform_ca, new_root, new_tcb_signer
from raycloak.attestation.trust.certificates import (
    MAX_PRESENTED_BYTES,
    check_certificate_windows,
    check_crl_window,
    check_links,
    check_not_revoked,
    ecdsa_is_valid,
    key_id,
    load_chain,
    load_crl,
    order_chain,
    point,
    read_certificates,
    read_presented,
    read_root,
    serial_number,
)
from raycloak.attestation.trust.roots import INTEL_SGX_ROOT_DER
from raycloak.metrics.errors import EvidenceError
from tests.simulators.tdx import new_crl

START = datetime(2027, 1, 1, tzinfo=UTC)
END = START + timedelta(days=30)
SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def pki() -> tuple[Credential, Credential, Credential]:
    """Return root, CA and a leaf under the CA."""
    root = new_root()
    ca = new_platform_ca(root)
    return root, ca, new_tcb_signer(ca)


def codes(call, *arguments) -> str | None:
    try:
        call(*arguments)
    except EvidenceError as error:
        return error.code
    return None


def certificate(subject: str, public, issuer: str, signer, extensions=()) -> x509.Certificate:
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (issuer, subject)]
    builder = x509.CertificateBuilder(*names, public, 7, START, END)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(signer, hashes.SHA256())


INTEL_SGX_ROOT_KEY_ID = bytes.fromhex(
    "46e403bd34f05a3f2817ab9badcaacc7ffc98e0f261008cd30dae936cace18d5dcf58eef31463613de1570d516200993"
)


def test_a_root_is_known_by_its_public_key() -> None:
    root = x509.load_der_x509_certificate(INTEL_SGX_ROOT_DER)
    assert key_id(root) == INTEL_SGX_ROOT_KEY_ID
    check_links((root, root), "root")


def test_links_of_a_genuine_chain_hold(pki) -> None:
    root, ca, leaf = (credential.certificate for credential in pki)
    check_links((leaf, ca, root), "test")


def test_broken_chains_are_refused(pki) -> None:
    root, ca, leaf = (credential.certificate for credential in pki)
    other = new_root().certificate
    for chain in ((), (root,), (leaf, root), (ca, leaf), (leaf, ca), (leaf, ca, other), (leaf, ca, root, root, root)):
        assert codes(check_links, chain, "test") == "chain_broken"


def test_a_chain_is_ordered_from_whatever_is_presented(pki) -> None:
    root, ca, leaf = (credential.certificate for credential in pki)
    namesakes = new_root().certificate, new_platform_ca(new_root()).certificate
    assert order_chain(leaf, (*namesakes, root, leaf, ca)) == (leaf, ca, root)
    assert order_chain(leaf, (*namesakes, root)) == (leaf,)
    assert order_chain(leaf, (ca, *namesakes)) == (leaf, ca)
    assert order_chain(root, (ca, root)) == (root,)


@pytest.mark.parametrize(("curve", "digest"), [(ec.SECP256R1(), hashes.SHA256()), (ec.SECP384R1(), hashes.SHA384())])
def test_a_raw_signature_holds_with_either_s_and_for_its_message_alone(curve, digest) -> None:
    key = ec.generate_private_key(curve)
    r, s = decode_dss_signature(key.sign(b"message", ec.ECDSA(digest)))
    size = curve.key_size // 8
    order = {32: 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551}.get(
        size, 2**384 - 0x389CB27E0BC8D220A7E5F24DB74F58851313E695333AD68D
    )
    raw = [r.to_bytes(size, "big") + value.to_bytes(size, "big") for value in (s, order - s, 0, order)]
    assert [ecdsa_is_valid(key.public_key(), each, b"message") for each in raw] == [True, True, False, False]
    assert not ecdsa_is_valid(key.public_key(), raw[0], b"another")
    assert not ecdsa_is_valid(key.public_key(), raw[0] + b"\0", b"message")
    assert not ecdsa_is_valid(ec.generate_private_key(ec.SECP521R1()).public_key(), raw[0], b"message")


def test_certificates_are_read_from_either_encoding(pki) -> None:
    leaf, root = pki[2].certificate, pki[0].certificate
    assert read_presented(leaf.public_bytes(Encoding.DER)) == (leaf,)
    assert read_presented((pki[2].pem + pki[0].pem).encode()) == (leaf, root)
    assert serial_number(leaf) == leaf.serial_number
    for unreadable in (b"", b"-----BEGIN CERTIFICATE-----", leaf.public_bytes(Encoding.DER) + b"\0"):
        with pytest.raises(ValueError, match="not"):
            read_presented(unreadable)


def test_what_somebody_presents_is_remembered_only_if_it_is_small(pki) -> None:
    """Each of 512 answers is kept, so that certificates of any size would fill as much memory as anybody likes."""
    pem = pki[0].pem.encode()
    before = read_certificates.cache_info().currsize, read_root.cache_info().currsize
    for data in (pem + b"\n" * MAX_PRESENTED_BYTES, b"\0" * (MAX_PRESENTED_BYTES + 1)):
        with pytest.raises(ValueError, match="more than"):
            read_presented(data)
    assert (read_certificates.cache_info().currsize, read_root.cache_info().currsize) == before
    assert read_presented(pem + b"\n" * (MAX_PRESENTED_BYTES - len(pem))) == read_presented(pem)


def test_an_rsa_key_that_takes_long_to_verify_with_is_of_no_known_kind(pki) -> None:
    for bits, known in ((4096, True), (8192, True), (8193, False), (16384, False)):
        key = rsa.RSAPublicNumbers(2**64 - 1, (1 << (bits - 1)) + 1).public_key()
        name = x509.Name([])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1).public_key(key)
        certificate = builder.not_valid_before(START).not_valid_after(END).sign(pki[0].key, hashes.SHA256())
        with nullcontext() if known else pytest.raises(ValueError, match="not readable"):
            read_root(certificate.public_bytes(Encoding.DER))


def test_a_leaf_cannot_issue(pki) -> None:
    root, ca, leaf = pki
    forged = new_tcb_signer(leaf).certificate
    chain = (forged, leaf.certificate, ca.certificate, root.certificate)
    assert codes(check_links, chain, "test") == "chain_broken"


def test_a_path_longer_than_its_ca_allows_is_refused(pki) -> None:
    root, ca, _ = pki
    below = new_platform_ca(ca)
    chain = (new_tcb_signer(below).certificate, below.certificate, ca.certificate, root.certificate)
    assert codes(check_links, chain, "test") == "chain_broken"


def test_certificates_without_a_known_kind_of_key_or_ca_extensions_are_refused(pki) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    plain = certificate("a", key.public_key(), "a", key)
    assert codes(check_links, (plain, plain), "test") == "chain_broken"
    for other in (ec.generate_private_key(ec.SECP521R1()), rsa.generate_private_key(65537, 1024)):
        der = certificate("a", other.public_key(), "a", other).public_bytes(Encoding.DER)
        with pytest.raises(ValueError, match="not readable"):
            read_root(der)


def test_a_ca_whose_key_usage_leaves_out_signing_certificates_cannot_issue() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    ca = x509.BasicConstraints(True, None)
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    usage = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    for signs, code in ((True, None), (False, "chain_broken")):
        stated = x509.KeyUsage(digital_signature=True, key_cert_sign=signs, **usage)
        root = certificate("a", key.public_key(), "a", key, (ca, stated))
        assert codes(check_links, (root, root), "test") == code
    silent = certificate("a", key.public_key(), "a", key, (ca,))
    assert codes(check_links, (silent, silent), "test") is None


@given(st.data())
def test_damaged_certificates_are_read_or_refused(pki, data: st.DataObject) -> None:
    der = bytearray(pki[0].certificate.public_bytes(Encoding.DER))
    der[data.draw(st.integers(0, len(der) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        root = read_root(bytes(der))
        assert codes(check_links, (root, root), "test") == "chain_broken"


def test_a_signature_has_no_unused_bits() -> None:
    """A signature that ends in a zero bit, which every second one does, can be encoded in two ways."""
    roots = (new_root().certificate for _ in range(200))
    even = next(root for root in roots if root.signature[-1] % 2 == 0)
    der = bytearray(even.public_bytes(Encoding.DER))
    der[-len(even.signature) - 1] = 1
    with pytest.raises(ValueError, match="not readable"):
        read_root(bytes(der))


def test_certificate_windows_include_both_ends(pki) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    chain = (certificate("a", key.public_key(), "a", key),)
    for now, code in (
        (START - SECOND, "collateral_stale"),
        (START, None),
        (END, None),
        (END + SECOND, "collateral_stale"),
    ):
        assert codes(check_certificate_windows, chain, now, "test") == code
    assert check_certificate_windows(chain, START, "test") == END


def test_crl_windows_exclude_the_next_update(pki) -> None:
    root = pki[0]
    crl = load_crl(new_crl(root, [], START, END, 1), root.certificate, "test")
    cases = ((START - SECOND, "collateral_stale"), (START, None), (END - SECOND, None), (END, "collateral_stale"))
    for now, code in cases:
        assert codes(check_crl_window, crl, now, "test") == code


def test_a_revoked_certificate_is_named(pki) -> None:
    root, ca, _ = pki
    crl = load_crl(new_crl(root, [ca.certificate], START, END, 1), root.certificate, "test")
    check_not_revoked(crl, (root.certificate,))
    assert codes(check_not_revoked, crl, (root.certificate, ca.certificate)) == "revoked"


def test_a_crl_of_another_issuer_or_none_at_all_is_refused(pki) -> None:
    root, ca, _ = pki
    der = new_crl(ca, [], START, END, 1)
    assert codes(load_crl, der, root.certificate, "test") == "evidence_tampered"
    assert codes(load_crl, der, new_platform_ca(root).certificate, "test") == "evidence_tampered"
    assert codes(load_crl, b"", root.certificate, "test") == "collateral_stale"
    assert codes(load_crl, der[:-3], root.certificate, "test") == "collateral_stale"


def test_unreadable_pem_and_points_off_the_curve() -> None:
    assert codes(load_chain, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "test") == "chain_broken"
    assert codes(load_chain, "", "test") == "chain_broken"
    assert point(bytes(64)) is None


def test_a_country_of_many_letters_is_unreadable(pki) -> None:
    """One byte of an object identifier makes a common name a country; the library only warns of its length."""
    der = pki[0].certificate.public_bytes(Encoding.DER)
    common_name_oid, country_oid = bytes.fromhex("0603550403"), bytes.fromhex("0603550406")
    assert common_name_oid in der
    with pytest.raises(ValueError, match="not readable"):
        read_root(der.replace(common_name_oid, country_oid))
