"""Writes and signs reference integrity manifests in the form of NVIDIA's, for the simulated GPU vendor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lxml import etree
from signxml.algorithms import CanonicalizationMethod, DigestAlgorithm, SignatureConstructionMethod, SignatureMethod
from signxml.signer import XMLSigner

from raycloak.attestation.gpu.rim import HASH, SWID
from tests.simulators.gpu_pki import GpuCredential


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest's content.

    Attributes:
        version: of driver or VBIOS. ``product``: the chip.
        active: accepted values by index, counted from 0.
        inactive: indices that are listed without being compared.
    """

    version: str
    product: str
    active: Mapping[int, Sequence[bytes]]
    inactive: Sequence[int] = ()


def write_manifest(manifest: Manifest) -> Any:
    """Build the XML element, unsigned."""
    root = etree.Element(SWID + "SoftwareIdentity", {"name": manifest.product, "version": "1.0"})
    meta = {"colloquialVersion": manifest.version, "product": manifest.product, "edition": "GPU"}
    etree.SubElement(root, SWID + "Meta", meta)
    payload = etree.SubElement(root, SWID + "Payload")
    for index in sorted((*manifest.active, *manifest.inactive)):
        active = index in manifest.active
        _add_measurement(payload, index, manifest.active[index] if active else (bytes(48),), active)
    return root


def _add_measurement(payload: Any, index: int, values: Sequence[bytes], active: bool) -> None:
    hashes = {f"{HASH}Hash{i}": value.hex() for i, value in enumerate(values)}
    counts = {"index": str(index), "alternatives": str(len(values)), "size": str(len(values[0]))}
    fields = {"type": "Measurement", "active": str(active), "name": f"Measurement_{index}", **counts, **hashes}
    etree.SubElement(payload, SWID + "Resource", fields)


def sign_manifest(root: Any, signer: GpuCredential, issuers: Sequence[GpuCredential]) -> bytes:
    """Sign all of the manifest with an enveloped signature, and include the chain that leads to the root."""
    how = XMLSigner(
        method=SignatureConstructionMethod.enveloped,
        signature_algorithm=SignatureMethod.ECDSA_SHA384,
        digest_algorithm=DigestAlgorithm.SHA384,
        c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_1,
    )
    chain = [each.certificate for each in (signer, *issuers)]
    signed: bytes = etree.tostring(how.sign(root, key=signer.key, cert=chain))
    return signed
