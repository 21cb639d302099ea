"""Attacks on signed reference values: what is read must be what was signed, and nothing is fetched or expanded."""

import random
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree
from signxml.algorithms import CanonicalizationMethod, DigestAlgorithm, SignatureConstructionMethod, SignatureMethod
from signxml.signer import XMLSigner

from raycloak.attestation.gpu.rim import HASH, MAX_RIM_BYTES, SWID, GoldenValues, read_rim, verify_rim
from raycloak.metrics.errors import EvidenceError
from tests.simulators.gpu import SimulatedGpuVendor
from tests.simulators.gpu_rim import Manifest, write_manifest

NOW = datetime(2027, 1, 15, tzinfo=UTC)
GENUINE = Manifest("590.12", "GH100", {3: (b"\x03" * 48,), 4: (b"\x04" * 48, b"\x05" * 48)}, inactive=(9,))
SIGNATURE = "{http://www.w3.org/2000/09/xmldsig#}Signature"


class Signed:
    """A genuine manifest, and the root it is verified under."""

    def __init__(self) -> None:
        self.vendor = SimulatedGpuVendor.create()
        self.roots = [self.vendor.anchors[1].root_key_id]
        self.data = self.vendor.sign(GENUINE)

    @property
    def tree(self) -> Any:
        return etree.fromstring(self.data)

    def verify(self, data: bytes | Any) -> GoldenValues:
        raw = data if isinstance(data, bytes) else etree.tostring(data)
        return verify_rim(read_rim(raw, "driver"), self.roots, NOW, "driver")

    def code(self, data: bytes | Any) -> str | None:
        try:
            self.verify(data)
        except EvidenceError as error:
            return error.code
        return None


@pytest.fixture(scope="module")
def signed() -> Signed:
    return Signed()


def test_a_genuine_manifest_is_read(signed: Signed) -> None:
    golden = signed.verify(signed.data)
    assert (golden.version, golden.product) == (GENUINE.version, GENUINE.product)
    assert golden.values == GENUINE.active
    assert signed.verify(b"\xef\xbb\xbf" + signed.data) == golden
    assert signed.verify(b'<?xml version="1.0" encoding="utf-8"?>\n' + signed.data + b"\n\n") == golden


@pytest.mark.parametrize(
    "prefix",
    [
        b"<!DOCTYPE SoftwareIdentity>",
        b'<!DOCTYPE x [<!ENTITY a "b">]>',
        b'<!DOCTYPE x SYSTEM "http://192.0.2.1/x.dtd">',
        b'<?xml version="1.0"?><!-- c --><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]>',
        b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;">]>',
        b'<?xml version="1.0" encoding="UTF-7"?>',
        b"<?xml version='1.0' encoding = 'UTF-16'?>",
        b'<?xml version="1.0" encoding="EBCDIC-CP-US"?>',
    ],
)
def test_types_entities_and_other_encodings_are_refused_before_parsing(signed: Signed, prefix: bytes) -> None:
    assert signed.code(prefix + signed.data) == "evidence_malformed"


def test_what_is_no_text_or_no_xml_is_malformed(signed: Signed) -> None:
    text = signed.data.decode()
    for data in (b"", b"\xff", b"<a>", b"<a></b>", b"<a/><b/>", b"<a>&b;</a>", b"\0<a/>", text.encode("utf-16")):
        assert signed.code(data) == "evidence_malformed"
    padding = b"<!--" + b"x" * MAX_RIM_BYTES + b"-->"
    assert signed.code(signed.data + padding) == "evidence_malformed"
    deep = b"<a>" * 10_000 + b"</a>" * 10_000
    assert signed.code(deep) == "evidence_malformed"


def test_a_changed_value_breaks_the_signature(signed: Signed) -> None:
    def change(path: str, name: str, value: str) -> Any:
        tree = signed.tree
        tree.find(path).set(name, value)
        return tree

    resource = f"{SWID}Payload/{SWID}Resource"
    for path, name, value in (
        (f"{SWID}Meta", "colloquialVersion", "590.13"),
        (f"{SWID}Meta", "product", "GB100"),
        (resource, f"{HASH}Hash0", "00" * 48),
        (resource, "active", "False"),
        (resource, "index", "5"),
        (resource, "added", "1"),
    ):
        assert signed.code(change(path, name, value)) == "gpu_state"


def test_an_added_or_removed_element_breaks_the_signature(signed: Signed) -> None:
    added, removed, behind = signed.tree, signed.tree, signed.tree
    etree.SubElement(added.find(f"{SWID}Payload"), f"{SWID}Resource", {"type": "Measurement", "index": "1"})
    removed.find(f"{SWID}Payload").remove(removed.find(f"{SWID}Payload/{SWID}Resource"))
    etree.SubElement(behind, f"{SWID}Payload")
    for tree in (added, removed, behind):
        assert signed.code(tree) == "gpu_state"


def test_comments_and_processing_instructions_cannot_change_a_value(signed: Signed) -> None:
    """Comments are not signed, and not read either; processing instructions are signed."""
    commented = signed.data.replace(b"<ns0:Payload>", b"<ns0:Payload><!-- 590.13 -->", 1)
    assert commented != signed.data
    assert signed.verify(commented) == signed.verify(signed.data)
    instructed = signed.data.replace(b"<ns0:Payload>", b"<ns0:Payload><?a b?>", 1)
    assert signed.code(instructed) == "gpu_state"


def evil(signed: Signed) -> Any:
    """Return an unsigned manifest of the attacker's own values."""
    return write_manifest(Manifest(GENUINE.version, GENUINE.product, {3: (bytes(48),)}))


def test_wrapping_a_signed_manifest_gives_no_other_values(signed: Signed) -> None:
    """The classic wrappings: the genuine element moved to a place that is verified, other values where one reads."""
    inside, moved, beside = evil(signed), evil(signed), evil(signed)
    inside.append(signed.tree)
    genuine = signed.tree
    signature = genuine.find(SIGNATURE)
    moved.append(signature)
    signature.append(genuine)
    beside.append(signed.tree)
    beside.append(signed.tree.find(SIGNATURE))
    envelope = etree.Element("envelope")
    envelope.extend([evil(signed), signed.tree])
    for tree in (evil(signed), inside, moved, beside, envelope):
        assert signed.code(tree) == "gpu_state"


def test_a_second_signature_or_signed_element_is_refused(signed: Signed) -> None:
    twice, nested = signed.tree, signed.tree
    twice.append(signed.tree.find(SIGNATURE))
    nested.find(f"{SWID}Payload").append(signed.tree.find(SIGNATURE))
    for tree in (twice, nested):
        assert signed.code(tree) == "gpu_state"


def sign(signed: Signed, root: Any, **changes: Any) -> bytes:
    """Return a signature of the vendor's genuine signer, made in another way."""
    signer, chain = signed.vendor.rim_signer, [c.certificate for c in _chain(signed)]
    how = {
        "method": SignatureConstructionMethod.enveloped,
        "signature_algorithm": SignatureMethod.ECDSA_SHA384,
        "digest_algorithm": DigestAlgorithm.SHA384,
        "c14n_algorithm": CanonicalizationMethod.CANONICAL_XML_1_1,
    }
    uri = changes.pop("reference_uri", None)
    result: bytes = etree.tostring(XMLSigner(**how | changes).sign(root, key=signer.key, cert=chain, reference_uri=uri))
    return result


def _chain(signed: Signed) -> tuple[Any, ...]:
    vendor = signed.vendor
    return vendor.rim_signer, vendor._rim_ca, vendor._rim_root


def test_only_the_vendors_algorithms_are_accepted(signed: Signed) -> None:
    root = write_manifest(GENUINE)
    assert signed.code(sign(signed, root)) is None
    for changes in (
        {"signature_algorithm": SignatureMethod.ECDSA_SHA256},
        {"signature_algorithm": SignatureMethod.ECDSA_SHA512},
        {"digest_algorithm": DigestAlgorithm.SHA256},
        {"digest_algorithm": DigestAlgorithm.SHA3_384},
    ):
        assert signed.code(sign(signed, write_manifest(GENUINE), **changes)) == "gpu_state"


def test_a_signature_over_a_part_gives_the_part_alone(signed: Signed) -> None:
    """A genuine signer who signs an inner element vouches for nothing that stands around it."""
    root = write_manifest(GENUINE)
    root.find(f"{SWID}Payload").set("Id", "part")
    assert signed.code(sign(signed, root, reference_uri="#part")) == "gpu_state"
    outer, inner = evil(signed), write_manifest(GENUINE)
    inner.set("Id", "inner")
    outer.append(inner)
    assert signed.verify(sign(signed, outer, reference_uri="#inner")).values == GENUINE.active


def test_an_enveloping_signature_is_refused(signed: Signed) -> None:
    root = write_manifest(GENUINE)
    assert signed.code(sign(signed, root, method=SignatureConstructionMethod.enveloping)) == "gpu_state"


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest("590.12", "GH100", {}),
        Manifest("590.12", "GH100", {3: (b"",)}),
        Manifest("590.12", "GH100", {3: (bytes(48), bytes(47))}),
        Manifest("590.12", "GH100", {300: (bytes(48),)}),
        Manifest("590.12", "GH100", {3: (bytes(48),)}, inactive=(3,)),
    ],
    ids=["empty", "no value", "two sizes", "index out of range", "index twice"],
)
def test_signed_nonsense_is_refused(signed: Signed, manifest: Manifest) -> None:
    assert signed.code(signed.vendor.sign(manifest)) == "gpu_state"


@pytest.mark.parametrize(
    ("name", "value"),
    [("index", "x"), ("index", "-1"), ("alternatives", "0"), ("alternatives", "3"), ("active", "maybe"), ("size", "47"),
     (f"{HASH}Hash0", "zz")],
)  # fmt: skip
def test_signed_fields_that_cannot_be_read_are_refused(signed: Signed, name: str, value: str) -> None:
    root = write_manifest(GENUINE)
    root.find(f"{SWID}Payload/{SWID}Resource").set(name, value)
    assert signed.code(sign(signed, root)) == "gpu_state"


def test_no_changed_byte_gives_other_values(signed: Signed) -> None:
    """Either refused, or what is read is what was signed. A seeded choice of positions and changes."""
    draw, genuine = random.Random(7), signed.verify(signed.data)
    for position in draw.sample(range(len(signed.data)), 150):
        changed = bytearray(signed.data)
        changed[position] ^= draw.randrange(1, 256)
        with suppress(EvidenceError):
            assert signed.verify(bytes(changed)) == genuine


@given(
    st.binary(max_size=300) | st.text("<>&;!?[]-\"'=:/ax \0", max_size=120).map(lambda text: f"<a>{text}</a>".encode())
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(EvidenceError):
        read_rim(data, "driver")
