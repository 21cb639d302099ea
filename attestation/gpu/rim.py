"""Reads NVIDIA's reference integrity manifests (RIM): SWID tags in XML, signed under the vendor's RIM root.

Document types, entities and encodings other than UTF-8 are refused before anything is parsed. The parser opens no file
and no connection. Values are read only from what the signature covers.

Guarantee: for any bytes, :func:`read_rim` returns a manifest or raises EvidenceError ``evidence_malformed``.
:func:`verify_rim` returns values only if a certificate under the RIM root signed exactly them.
"""

import base64
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cryptography import x509
from lxml import etree
from signxml.algorithms import DigestAlgorithm, SignatureMethod
from signxml.exceptions import SignXMLException
from signxml.verifier import SignatureConfiguration, XMLVerifier

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.trust.certificates import check_links, key_id, read_root
from raycloak.metrics.errors import EvidenceError

# Bounds the work of the XML parser, which runs before any signature is verified.
MAX_RIM_BYTES: Final = 1 << 18
SWID: Final = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
HASH: Final = "{http://www.w3.org/2001/04/xmlenc#sha384}"
_SIGNATURE: Final = "{http://www.w3.org/2000/09/xmldsig#}Signature"
_CERTIFICATE: Final = "{http://www.w3.org/2000/09/xmldsig#}X509Certificate"
_DECLARED_ENCODING: Final = re.compile(r"""^<\?xml[^>]*?encoding\s*=\s*["']([^"']*)["']""")
_MAX_CERTIFICATES: Final = 5
_MAX_INDEX: Final = 255  # a report gives an index one byte


@dataclass(frozen=True, slots=True)
class Rim:
    """A parsed manifest, not verified yet.

    Attributes:
        certificates: signer first; empty if they cannot be read.
    """

    root: Any
    certificates: tuple[x509.Certificate, ...]

    @property
    def stated_version(self) -> str:
        """The version that it claims to be for: a hint for choosing among several, no more."""
        return _version_and_product(self.root)[0]

    @property
    def stated_product(self) -> str:
        """The chip that it claims to be for, also just a hint."""
        return _version_and_product(self.root)[1]


@dataclass(frozen=True, slots=True)
class GoldenValues:
    """The content of a verified manifest.

    Attributes:
        version: the version of the driver or VBIOS that it describes.
        product: the chip, such as ``GH100``.
        values: the accepted values of each measurement, by index from 0; active ones only.
    """

    version: str
    product: str
    values: Mapping[int, tuple[bytes, ...]]


def read_rim(data: bytes, what: str) -> Rim:
    """Parse a manifest.

    Raises:
        EvidenceError: ``evidence_malformed`` if it is too large, no UTF-8, no XML, or defines a type or entities.
    """
    if len(data) > MAX_RIM_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest of {len(data)} bytes is larger than {MAX_RIM_BYTES}")
    _check_text(data, what)
    # A second defence behind `_check_text`: the parser expands no entity and fetches nothing.
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, dtd_validation=False, huge_tree=False
    )
    try:
        root = etree.fromstring(data, parser)
    except (etree.LxmlError, ValueError):
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest is not XML")
    if root.getroottree().docinfo.doctype or next(root.iter(etree.Entity), None) is not None:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest has a document type or entities")
    return Rim(root, _read_certificates(root))


def _check_text(data: bytes, what: str) -> None:
    """Refuse unsafe text before parsing. It must be UTF-8, so that the text searched is the text the parser reads."""
    try:
        text = data.decode("utf-8-sig").lstrip()
    except UnicodeDecodeError:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest is not UTF-8")
    declared = _DECLARED_ENCODING.match(text)
    if declared and declared[1].upper() not in ("UTF-8", "US-ASCII", "ASCII"):
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest is in encoding {declared[1]!r}")
    if "<!DOCTYPE" in text or "<!ENTITY" in text or "\0" in text:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} manifest has a document type or entities")


def _read_certificates(root: Any) -> tuple[x509.Certificate, ...]:
    found = list(root.iter(_CERTIFICATE))
    if len(found) > _MAX_CERTIFICATES:
        return ()
    try:
        return tuple(read_root(base64.b64decode("".join((each.text or "").split()), validate=True)) for each in found)
    except ValueError:
        return ()


def verify_rim(rim: Rim, roots: Collection[bytes], now: datetime, what: str) -> GoldenValues:
    """Return the values that a certificate under one of ``roots`` signed.

    Args:
        roots: `raycloak.attestation.trust.certificates.key_id` of each accepted RIM root.

    Raises:
        EvidenceError: ``gpu_state``.
    """
    if not rim.certificates:
        refuse(Refusal.GPU_STATE, f"the {what} manifest names no readable signer")
    try:
        check_links(rim.certificates, what)
    except EvidenceError as error:
        refuse(Refusal.GPU_STATE, error.message)
    if key_id(rim.certificates[-1]) not in roots:
        refuse(Refusal.GPU_STATE, f"the {what} manifest is not signed under the vendor's RIM root")
    signatures = list(rim.root.iter(_SIGNATURE))
    # A signature deeper in the tree would cover only a part of the manifest.
    if len(signatures) != 1 or signatures[0].getparent() is not rim.root:
        refuse(Refusal.GPU_STATE, f"the {what} manifest does not have exactly one signature over all of it")
    config = SignatureConfiguration(
        location="./",
        signature_methods=frozenset({SignatureMethod.ECDSA_SHA384}),
        digest_algorithms=frozenset({DigestAlgorithm.SHA384}),
        verification_time=now,
    )
    try:
        verified = XMLVerifier().verify(rim.root, x509_cert=rim.certificates[0], expect_config=config)
    # signxml passes on errors of its parsers; none of them proves the signature.
    except (SignXMLException, etree.LxmlError, ValueError, TypeError, AttributeError, LookupError):
        refuse(Refusal.GPU_STATE, f"the signature over the {what} manifest does not hold")
    # Continue with what the signature covers, never with the document around it.
    signed = None if isinstance(verified, list) else verified.signed_xml
    if signed is None or signed.tag != SWID + "SoftwareIdentity":
        refuse(Refusal.GPU_STATE, f"the signed part of the {what} manifest is not a software identity")
    return _golden_values(signed, what)


def _version_and_product(identity: Any) -> tuple[str, str]:
    meta = identity.find(SWID + "Meta")
    return ("", "") if meta is None else (meta.get("colloquialVersion", ""), meta.get("product", ""))


def _golden_values(identity: Any, what: str) -> GoldenValues:
    values: dict[int, tuple[bytes, ...]] = {}
    seen: set[int] = set()
    for resource in identity.findall(f"{SWID}Payload/{SWID}Resource"):
        if resource.get("type") != "Measurement":
            continue
        try:
            index, count, size = (int(resource.get(name, "")) for name in ("index", "alternatives", "size"))
            active = {"true": True, "false": False}[resource.get("active", "").lower()]
            if not (0 <= index <= _MAX_INDEX and 1 <= count <= _MAX_INDEX):
                raise ValueError("index or number of alternatives out of range")
            alternatives = tuple(bytes.fromhex(resource.get(f"{HASH}Hash{i}", "?")) for i in range(count))
            if any(len(value) != size or not value for value in alternatives):
                raise ValueError("a value of another size than stated")
        except (LookupError, ValueError):
            refuse(Refusal.GPU_STATE, f"the {what} manifest has a measurement that cannot be read")
        if index in seen:
            refuse(Refusal.GPU_STATE, f"the {what} manifest has index {index} twice")
        seen.add(index)
        if active:
            values[index] = alternatives
    if not values:
        refuse(Refusal.GPU_STATE, f"the {what} manifest has no active measurement")
    version, product = _version_and_product(identity)
    return GoldenValues(version, product, values)
