"""Walks X.509 chains to a pinned root and reads revocation lists, for the certificates behind any kind of evidence.

Keys are ECDSA on P-256 (Intel) or P-384 (AMD leaves, NVIDIA), or RSA (AMD).

A root is compared by its public key, since a vendor may issue its root certificate again with the same key.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import NameOID

from raycloak.attestation.core.evidence import Refusal, refuse

PublicKey = EllipticCurvePublicKey | RSAPublicKey

_PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"
_PEM_BLOCKS = re.compile(rb"\s*(?:" + _PEM_BEGIN + rb"[A-Za-z0-9+/=\s]*-----END CERTIFICATE-----\s*)*")
_MAX_CHAIN = 5  # NVIDIA's device chain has five certificates
# AMD's keys have 4,096 bits. Much larger ones, of 16,384 bits for example, verify slowly.
_MIN_RSA_BITS, _MAX_RSA_BITS = 3072, 8192
MAX_PRESENTED_BYTES = 1 << 16
"""Bounds one presented certificate, or a file of them. Vendors' own have a few thousand bytes."""
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    UserWarning,
)


# A verifier meets the same roots, intermediates, lists and documents at every appraisal. The functions below depend on
# their arguments alone, so an answer stays true. An exception is never kept.
remembered = lru_cache(maxsize=512)


@remembered
def key_id(certificate: x509.Certificate) -> bytes:
    """Return SHA-384 of the certificate's uncompressed point, or of an RSA key's SubjectPublicKeyInfo; 48 bytes."""
    key = public_key(certificate)
    if isinstance(key, EllipticCurvePublicKey):
        return hashlib.sha384(key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)).digest()
    return hashlib.sha384(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def public_key(certificate: x509.Certificate) -> PublicKey:
    """Return the certificate's key; ValueError if it is none of the kinds that vendors use."""
    key = certificate.public_key()
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1 | SECP384R1):
        return key
    if isinstance(key, RSAPublicKey) and _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS:
        return key
    raise ValueError("the certificate has no P-256, P-384 or RSA key")


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of the subject; empty unless there is exactly one."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def serial_number(certificate: x509.Certificate) -> int:
    """Return the serial number, which is 0 in AMD's endorsement certificates."""
    with _tolerating_serial_zero():
        return certificate.serial_number


def is_pem(data: bytes) -> bool:
    """Return whether ``data`` holds a PEM certificate; it may be DER otherwise."""
    return _PEM_BEGIN in data


def has_only_blocks(pem: bytes) -> bool:
    """Return whether ``pem`` holds only PEM certificates and white space. PEM readers skip any other text."""
    return _PEM_BLOCKS.fullmatch(pem) is not None


def read_presented(data: bytes) -> tuple[x509.Certificate, ...]:
    """Read the certificates in ``data``, which is PEM or one certificate in DER, as :func:`read_certificates` does.

    Guarantee: anything too large is refused before it is read, so nothing of it is remembered.
    """
    if len(data) > MAX_PRESENTED_BYTES:
        raise ValueError(f"more than {MAX_PRESENTED_BYTES} bytes of certificates")
    if is_pem(data):
        return read_certificates(data)
    return (read_root(data),)


@remembered
def read_certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Read the certificates in ``pem``: each has a known kind of key, and every part used later is readable.

    Raises:
        ValueError: for any other content.
    """
    return _read(x509.load_pem_x509_certificates, pem)


@remembered
def read_root(der: bytes) -> x509.Certificate:
    """Read one certificate in DER, checked as in :func:`read_certificates`."""
    return _read(lambda data: [x509.load_der_x509_certificate(data)], der)[0]


def _read(load: Callable[[bytes], list[x509.Certificate]], data: bytes) -> tuple[x509.Certificate, ...]:
    try:
        with _tolerating_serial_zero():
            certificates = tuple(load(data))
            for certificate in certificates:
                _read_through(certificate)
    except _UNREADABLE as error:
        raise ValueError("not readable certificates") from error
    return certificates


def load_chain(pem: str, what: str) -> tuple[x509.Certificate, ...]:
    """Read the certificates in ``pem``; EvidenceError ``chain_broken`` if they cannot be read."""
    try:
        return read_certificates(pem.encode())
    except ValueError:
        refuse(Refusal.CHAIN_BROKEN, f"the {what} chain cannot be read")


def order_chain(leaf: x509.Certificate, pool: Iterable[x509.Certificate]) -> tuple[x509.Certificate, ...]:
    """Return ``leaf``, its issuer and so on up to a self-signed certificate, each the first in ``pool`` that fits.

    Nothing is judged here. The result ends where ``pool`` has no issuer, and :func:`check_links` says whether it is a
    chain.
    """
    known, chain = tuple(pool), [leaf]
    while len(chain) <= _MAX_CHAIN and chain[-1].subject != chain[-1].issuer:
        issuer = next((each for each in known if is_issued_by(chain[-1], each)), None)
        if issuer is None:
            break
        chain.append(issuer)
    return tuple(chain)


@remembered
def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Return whether ``issuer`` has the issuer's name and its key signed ``certificate``."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def check_links(chain: Sequence[x509.Certificate], what: str) -> None:
    """Require that each certificate is issued by the next, which may issue, and that the last is self-signed.

    Raises:
        EvidenceError: ``chain_broken``.
    """
    if not 2 <= len(chain) <= _MAX_CHAIN:
        refuse(Refusal.CHAIN_BROKEN, f"the {what} chain has {len(chain)} certificates")
    # The last certificate is paired with itself, so that it must be self-signed.
    for below, (certificate, issuer) in enumerate(pairwise((*chain, chain[-1]))):
        if not is_issued_by(certificate, issuer) or not _may_issue(issuer, min(below, len(chain) - 2)):
            refuse(Refusal.CHAIN_BROKEN, f"the {what} chain breaks at '{common_name(certificate)}'")


def check_certificate_windows(chain: Sequence[x509.Certificate], now: datetime, what: str) -> datetime:
    """Return the first instant at which one of the certificates expires.

    Raises:
        EvidenceError: ``collateral_stale`` if ``now`` is outside the validity of one of them.
    """
    for certificate in chain:
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            refuse(Refusal.COLLATERAL_STALE, f"'{common_name(certificate)}' in the {what} chain is not valid now")
    return min(certificate.not_valid_after_utc for certificate in chain)


@remembered
def load_crl(der: bytes, issuer: x509.Certificate, what: str) -> x509.CertificateRevocationList:
    """Read a revocation list and require that ``issuer`` signed it.

    Raises:
        EvidenceError: ``collateral_stale`` if it is missing or not a list. ``evidence_tampered`` if the signature
            does not hold.
    """
    try:
        crl = x509.load_der_x509_crl(der)
        genuine = crl.is_signature_valid(public_key(issuer))
    except _UNREADABLE:
        refuse(Refusal.COLLATERAL_STALE, f"there is no readable {what} revocation list")
    if not genuine:
        refuse(Refusal.EVIDENCE_TAMPERED, f"the {what} revocation list is not signed by its issuer")
    return crl


def crl_der(data: bytes) -> bytes:
    """Convert a revocation list from PEM or DER to DER. Other ``data`` is returned as it is; no reader accepts it."""
    try:
        return x509.load_pem_x509_crl(data).public_bytes(Encoding.DER)
    except _UNREADABLE:
        return data


def crl_issuer(der: bytes) -> x509.Name | None:
    """Return the issuer that the list names, unverified; None if the list cannot be read."""
    try:
        return x509.load_der_x509_crl(der).issuer
    except _UNREADABLE:
        return None


def crl_number(crl: x509.CertificateRevocationList) -> int | None:
    """Return the list's number, which grows from issue to issue (RFC 5280, 5.2.3); None if it has none."""
    try:
        return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return None


def crl_scope(crl: x509.CertificateRevocationList) -> str:
    """Return the address at which the issuer publishes this list (RFC 5280, 5.2.5); empty if the list names none.

    It tells several lists of one issuer apart.
    """
    try:
        names = crl.extensions.get_extension_for_class(x509.IssuingDistributionPoint).value.full_name or ()
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return ""
    return " ".join(sorted(str(name.value) for name in names))


def check_not_revoked(crl: x509.CertificateRevocationList, certificates: Sequence[x509.Certificate]) -> None:
    """Require that none of ``certificates`` is on the list; EvidenceError ``revoked`` otherwise."""
    for certificate in certificates:
        if crl.get_revoked_certificate_by_serial_number(serial_number(certificate)) is not None:
            refuse(Refusal.REVOKED, f"'{common_name(certificate)}' is revoked by its issuer")


def check_crl_window(crl: x509.CertificateRevocationList, now: datetime, what: str) -> datetime:
    """Return when the next list is due; EvidenceError ``collateral_stale`` outside [this update, next update)."""
    due = crl.next_update_utc
    # A list is no longer valid in the second of its next update.
    if due is None or not crl.last_update_utc <= now < due:
        refuse(Refusal.COLLATERAL_STALE, f"the {what} revocation list is not current")
    return due


@remembered
def signed_by(certificate: x509.Certificate, signature: bytes, message: bytes) -> bool:
    """Return whether raw r and s are the ECDSA signature of the certificate's key; see :func:`ecdsa_is_valid`."""
    key = public_key(certificate)
    return isinstance(key, EllipticCurvePublicKey) and ecdsa_is_valid(key, signature, message)


def ecdsa_is_valid(key: EllipticCurvePublicKey, signature: bytes, message: bytes) -> bool:
    """Return whether raw, big-endian r and s are ``key``'s signature of ``message``.

    64 bytes and SHA-256 for a P-256 key, 96 bytes and SHA-384 for a P-384 key. A high s is as good as a low one:
    about half of the signatures that hardware makes have it.
    """
    size = (key.curve.key_size + 7) // 8
    if len(signature) != 2 * size or not isinstance(key.curve, SECP256R1 | SECP384R1):
        return False
    r, s = int.from_bytes(signature[:size], "big"), int.from_bytes(signature[size:], "big")
    algorithm = SHA256() if isinstance(key.curve, SECP256R1) else SHA384()
    try:
        key.verify(encode_dss_signature(r, s), message, ECDSA(algorithm))
    except InvalidSignature:
        return False
    return True


def point(raw: bytes) -> EllipticCurvePublicKey | None:
    """Return the P-256 key with coordinates x and y (64 bytes); None if they are no point of the curve."""
    try:
        return EllipticCurvePublicKey.from_encoded_point(SECP256R1(), b"\x04" + raw)
    except ValueError:
        return None


@contextmanager
def _tolerating_serial_zero() -> Iterator[None]:
    """Silence the library's warning about serial number 0, which AMD's endorsement certificates have.

    It also warns of a country code that is not two letters. No vendor's name has one, so that counts as unreadable.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Parsed a serial number", CryptographyDeprecationWarning)
        warnings.filterwarnings("error", "Attribute's length", UserWarning)
        yield


def _read_through(certificate: x509.Certificate) -> None:
    """Read every part now: the library parses most of them lazily, and no later access may fail."""
    public_key(certificate)
    # A signature is whole bytes. Libraries ignore unused bits, which would give one certificate two encodings.
    if not certificate.public_bytes(Encoding.DER).endswith(b"\0" + certificate.signature):
        raise ValueError("the signature is not whole bytes")
    parts = (certificate.subject, certificate.issuer, certificate.extensions, certificate.serial_number)
    window = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    assert all(part is not None for part in (*parts, *window))


@remembered
def _may_issue(issuer: x509.Certificate, intermediates: int) -> bool:
    """Return whether ``issuer`` is a CA that may stand above so many intermediate certificates (RFC 5280, 6.1.4)."""
    found = {extension.oid: extension.value for extension in issuer.extensions}
    constraints, usage = (found.get(kind.oid) for kind in (x509.BasicConstraints, x509.KeyUsage))
    if not isinstance(constraints, x509.BasicConstraints) or not constraints.ca:
        return False
    # RFC 5280, 6.1.4 (n), looks at the extension only where there is one.
    if isinstance(usage, x509.KeyUsage) and not usage.key_cert_sign:
        return False
    return constraints.path_length is None or constraints.path_length >= intermediates
