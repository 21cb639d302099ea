"""Verifies an NVIDIA device, a GPU or a switch, in what both share: chain, signature, revocation, nonce, measurements.

What a device's state has to be is for `verify` and `switches` to say. Hardware and simulated evidence take the same
path. The class of the result is the class of the anchor.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID, ObjectIdentifier

from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Refusal, SwitchEvidence, refuse
from raycloak.attestation.gpu.ocsp import check_answers, check_coverage, check_current, find_answers
from raycloak.attestation.gpu.report import DEVICE_ID_BYTES, DeviceReport, Opaque, parse_device_report
from raycloak.attestation.gpu.rim import GoldenValues, Rim, read_rim, verify_rim
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    common_name,
    has_only_blocks,
    is_pem,
    key_id,
    read_certificates,
    read_presented,
    signed_by,
)
from raycloak.attestation.trust.roots import Anchor, VerifierTerms
from raycloak.metrics.errors import EvidenceError

Manifests = Mapping[str, bytes | None]
"""Signed reference values of a device, XML, by the part that they describe: ``driver`` or ``VBIOS``."""

CHAIN_LENGTH: Final = 5  # firmware, boot ROM, provisioner, family, device root
_FIRMWARE_LEAF: Final = "FMC LF"
# A firmware id is a SHA-384.
_FWID_BYTES: Final = 48
_FWID_OIDS: Final = (ObjectIdentifier("2.23.133.5.4.1"), ObjectIdentifier("2.23.133.5.4.1.1"))  # Hopper, Blackwell
_SHA384_DIGEST: Final = bytes.fromhex("06096086480165030402020430")
"""DER of SHA-384's object identifier, then tag and length of the 48-byte digest that follows it."""
_CHIP: Final = re.compile(r"([GL][A-Z])_?[0-9]\w*( |$)")


def chip_family(name: str) -> str:
    """Return the family of a chip's name: ``GH`` for the GPU ``GH100``, ``LS`` for the switch ``LS_10``; else empty."""
    found = _CHIP.match(name)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class DeviceClaims:
    """The claims of a verified report, named as in RFC 9711 where that has a name.

    Attributes:
        evidence_class: class of the anchor whose root verified the report.
        platform_id: SHA-384 of the boot ROM's public key, 48 bytes: one per device, whatever its firmware.
        measurement: SHA-384 over all measurements in the order of their indices, 48 bytes.
        report_data: the nonce of the request, 32 bytes.
        hwmodel: the model that the device's certificate names.
        dbgstat: ``disabled`` if it was compared with reference values, empty if that is unknown.
        mode: of a GPU its mode of confidential computing, ``not stated`` if the report does not say and the rules
            allow that; of a switch ``locked``.
        uncovered: measurements, from 1, that are in no reference manifest.
        expires_at: unix seconds at which a certificate, OCSP answer or manifest signer stops being valid.
        device_id: the id by which NVLink devices name it, 8 bytes; empty if its certificate has none.
        linked: ids of the devices at its links, 8 bytes each; empty if it reports none. Of a switch as it writes them.
        steps: (step, verdict) in the order in which they were taken.
    """

    evidence_class: EvidenceClass
    platform_id: bytes
    measurement: bytes
    report_data: bytes
    hwmodel: str
    dbgstat: str
    mode: str
    uncovered: tuple[int, ...]
    expires_at: int
    device_id: bytes
    linked: frozenset[bytes]
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device whose certified firmware signed a report over the verifier's nonce. Its state is not judged yet.

    Attributes:
        what: ``GPU`` or ``switch``.
        chain: its certificates, the firmware's first.
        manifests: reference values by what they describe, not verified yet.
        rim_roots: key ids of the roots that may sign them.
        answers: number of OCSP answers about it.
        expires_at: unix seconds at which a certificate, OCSP answer or manifest signer stops being valid.
    """

    what: str
    report: DeviceReport
    chain: tuple[x509.Certificate, ...]
    anchor: Anchor
    manifests: Mapping[str, Rim]
    rim_roots: frozenset[bytes]
    answers: int
    instant: datetime
    expires_at: int

    @property
    def device_id(self) -> bytes:
        """The id by which NVLink devices name each other, 8 bytes; empty if the boot ROM's certificate has none.

        The serial number of that certificate's subject ends with it. It is what a switch states as its own id.
        """
        stated = self.chain[1].subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
        try:
            number = bytes.fromhex(str(stated[0].value)) if len(stated) == 1 else b""
        except ValueError:
            return b""
        return number[-DEVICE_ID_BYTES:] if len(number) >= DEVICE_ID_BYTES else b""

    def check_firmware_id(self, required: bool) -> None:
        """Require that the report states the firmware of the device's certificate, if it states one.

        Raises:
            EvidenceError: ``gpu_state``, also for a certificate with an id and a report without where one is
                ``required``.
        """
        certified, reported = _certified_fwid(self.chain[0]), self.report.opaque.get(Opaque.FWID)
        if certified is not None and reported is None and required:
            refuse(Refusal.GPU_STATE, f"the {self.what}'s certificate names its firmware, and the report does not")
        if certified is not None and reported is not None and certified != reported:
            refuse(Refusal.GPU_STATE, f"the {self.what}'s certificate is for other firmware than the report")

    def compared(self, parts: Sequence[str], rules: GpuRules) -> tuple[int, ...]:
        """Compare the report with its manifests; return the measurements, from 1, that were compared.

        Args:
            parts: those of which such a device has a manifest.

        Raises:
            EvidenceError: ``gpu_state`` for a manifest that is missing where ``rules`` require it, that is not signed
                under the vendor's root, that is for another version or chip, or that has other measurements.
        """
        for what in parts:
            if what not in self.manifests and rules.require_rim:
                refuse(Refusal.GPU_STATE, f"there are no reference values for the {self.what}'s {what}")
        golden = {what: verify_rim(rim, self.rim_roots, self.instant, what) for what, rim in self.manifests.items()}
        values: dict[int, tuple[bytes, ...]] = {}
        for what, described in golden.items():
            self._check_fit(what, described)
            if both := values.keys() & described.values.keys():
                refuse(Refusal.GPU_STATE, f"driver and VBIOS manifest both claim measurement {min(both)}")
            values.update(described.values)
        # Reference values count from 0, and a report from 1.
        measured = self.report.measurements
        differing = [index for index, accepted in values.items() if measured.get(index + 1) not in accepted]
        if differing:
            refuse(Refusal.GPU_STATE, f"measurements {differing} of the {self.what} differ from its manifests")
        return tuple(sorted(index + 1 for index in values))

    def _check_fit(self, what: str, described: GoldenValues) -> None:
        version, family = _versions(self.report)[what], chip_family(common_name(self.chain[0]))
        if not version or described.version.casefold() != version.casefold():
            told = f"{described.version!r}, the {self.what} runs {version!r}"
            refuse(Refusal.GPU_STATE, f"the {what} manifest is for version {told}")
        if chip_family(described.product) not in ("", family):
            refuse(Refusal.GPU_STATE, f"the {what} manifest is for {described.product!r}, which the {self.what} is not")

    def claims(self, mode: str, compared: tuple[int, ...], linked: frozenset[bytes]) -> DeviceClaims:
        """Return the claims of the device, in a ``mode`` that was judged.

        Args:
            compared: from :meth:`compared`.
            linked: ids of the devices at its links.
        """
        measured = self.report.measurements
        uncovered = tuple(sorted(measured.keys() - set(compared)))
        covered = f"{len(compared)} equal their reference values" if compared else "not compared"
        if compared and uncovered:
            covered += f"; in no reference manifest: {', '.join(map(str, uncovered))}"
        return DeviceClaims(
            evidence_class=self.anchor.evidence_class,
            platform_id=key_id(self.chain[1]),
            measurement=hashlib.sha384(b"".join(measured[index] for index in sorted(measured))).digest(),
            report_data=self.report.nonce,
            hwmodel=common_name(self.chain[1]),
            dbgstat="disabled" if compared else "",
            mode=mode,
            uncovered=uncovered,
            expires_at=self.expires_at,
            device_id=self.device_id,
            linked=linked,
            steps=(
                ("parse", f"{len(measured)} measurements"),
                ("root", self.anchor.evidence_class.value),
                ("signatures", "report and device chain"),
                ("revocation", f"{self.answers} OCSP answers" if self.answers else "not checked"),
                ("collateral", f"until {self.expires_at}"),
                ("nonce", self.report.nonce.hex()),
                ("mode", mode),
                ("measurements", covered),
            ),
        )


def verify_device(
    report: bytes,
    chain: Sequence[bytes],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    what: str,
    nonce: bytes,
    manifests: Manifests,
    ocsp: Sequence[bytes],
) -> Device:
    """Verify a device's ``report`` in all but its state.

    Guarantee: returns only for a canonical report over ``nonce``, signed by the firmware of a device whose five
    certificates end in an anchor of an accepted class. None of them, and no signer of a manifest, is known to be
    revoked.

    Args:
        chain: the device's certificates, each entry DER or PEM, leaf first.
        terms: with roots of family ``nvidia_gpu``, and of ``nvidia_rim`` for reference values of the same class.
        nonce: 32 bytes that the report must be over.
        ocsp: answers, DER. Only answers about this chain and the manifests' signers count.

    Raises:
        EvidenceError: one of the codes of `raycloak.attestation.core.evidence.Refusal`.
    """
    instant = terms.instant
    parsed = parse_device_report(report, what)
    given = {name: read_rim(data, name) for name, data in manifests.items() if data is not None}
    certificates = _read_chain(chain, what)
    anchor = _anchor_of(certificates, terms, what)
    answers = find_answers(ocsp, certificates)
    # The manifests' signers, roots excepted. Most have no answer. `find_answers` skips the first of a chain: a device's
    # is its firmware, about which no answers exist.
    signers = [rim.certificates for rim in given.values() if rim.certificates]
    of_signers = tuple(answer for signer in signers for answer in find_answers(ocsp, (signer[0], *signer)))
    if not signed_by(certificates[0], parsed.signature, parsed.signed):
        refuse(Refusal.EVIDENCE_TAMPERED, f"the signature over the {what}'s report does not hold")
    check_answers((*answers, *of_signers))
    ends = [check_certificate_windows(certificates, instant, "device")]
    ends += [
        check_certificate_windows(rim.certificates, instant, f"{name} manifest")
        for name, rim in given.items()
        if rim.certificates
    ]
    # Present answers are always judged, even where the rules require none.
    if ocsp or rules.require_ocsp:
        ends.append(check_coverage(answers, certificates, instant))
    if of_signers:
        ends.append(check_current(of_signers, instant))
    if parsed.nonce != nonce:
        refuse(Refusal.NONCE_FOREIGN, f"the {what}'s report is over a nonce other than the issued one")
    return Device(
        what=what,
        report=parsed,
        chain=certificates,
        anchor=anchor,
        manifests=given,
        rim_roots=_rim_roots(terms, anchor.evidence_class),
        answers=len(answers),
        instant=instant,
        expires_at=int(min(ends).timestamp()),
    )


def verify_presented(
    device: GpuEvidence | SwitchEvidence,
    rims: Sequence[bytes],
    *,
    what: str,
    parts: Sequence[str],
    verify: Callable[[Manifests], DeviceClaims],
    foreign: Refusal,
) -> DeviceClaims:
    """Return what ``verify`` returns with the first combination of fitting manifests that it does not refuse.

    Args:
        rims: reference values for any version that may occur, XML.
        parts: those of which such a device has a manifest.
        foreign: the code of a report over another nonce.

    Raises:
        EvidenceError: that of the last combination, if each is refused as ``gpu_state``.
    """
    fitting = list(_fitting(device, rims, what, parts))
    try:
        for manifests in fitting[:-1]:
            try:
                return verify(manifests)
            except EvidenceError as error:
                # A state may differ because these are of another board. Any other refusal holds for all.
                if error.code != Refusal.GPU_STATE:
                    raise
        return verify(fitting[-1])
    except EvidenceError as error:
        if error.code == Refusal.NONCE_FOREIGN:
            refuse(foreign, f"a {what}'s report is not over the nonce of this worker and its key")
        raise


def _fitting(
    device: GpuEvidence | SwitchEvidence, rims: Sequence[bytes], what: str, parts: Sequence[str]
) -> Iterator[Manifests]:
    """Yield each combination of manifests, one of each of ``parts``, that claims to fit a device's chip and versions.

    Boards of several kinds share a version number, so that several may claim it. None stands for a missing one.
    """
    parsed = parse_device_report(device.report, what)
    try:
        family = chip_family(common_name(read_presented(device.chain[0])[0]))
    except (IndexError, ValueError):
        refuse(Refusal.CHAIN_BROKEN, f"the certificate of a {what}'s firmware is missing or cannot be read")
    stated = [(data, read_rim(data, "reference")) for data in rims]
    of_chip = [(data, rim.stated_version) for data, rim in stated if chip_family(rim.stated_product) == family]
    found: list[list[bytes | None]] = []
    for part in parts:
        version = _versions(parsed)[part].casefold()
        found.append([data for data, of in of_chip if of.casefold() == version] or [None])
    for combination in product(*found):
        yield dict(zip(parts, combination, strict=True))


def _versions(report: DeviceReport) -> dict[str, str]:
    """Return by what a manifest can describe the version that a report states."""
    return {"driver": report.driver_version, "VBIOS": report.vbios_version}


def chain_in(pem: bytes) -> tuple[bytes, ...]:
    """Return the certificates of a device's chain in DER, the firmware's first; empty if it is not a whole chain.

    Args:
        pem: as a driver gives it, in either order, padded with zeros.
    """
    try:
        certificates = list(read_certificates(pem.rstrip(b"\0")))
    except ValueError:
        return ()
    if len(certificates) != CHAIN_LENGTH:
        return ()
    if certificates[0].subject == certificates[0].issuer:
        certificates.reverse()
    return tuple(each.public_bytes(Encoding.DER) for each in certificates)


def _rim_roots(terms: VerifierTerms, evidence_class: EvidenceClass) -> frozenset[bytes]:
    # Devices and reference values have roots of two families, so that a device's key cannot vouch for its own values.
    families = (each for each in terms.anchors if each.family == "nvidia_rim")
    return frozenset(each.root_key_id for each in families if each.evidence_class is evidence_class)


def _read_chain(chain: Sequence[bytes], what: str) -> tuple[x509.Certificate, ...]:
    # Nothing signs text around the blocks, so it would give one chain several encodings.
    if any(is_pem(data) and not has_only_blocks(data.rstrip(b"\0")) for data in chain):
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what}'s chain contains text other than certificates")
    try:
        # One more than allowed is enough to refuse, so the rest is not read.
        certificates = tuple(each for data in chain[: CHAIN_LENGTH + 1] for each in read_presented(data))
    except ValueError:
        refuse(Refusal.CHAIN_BROKEN, f"a certificate of the {what} cannot be read")
    if not 1 <= len(certificates) <= CHAIN_LENGTH:
        refuse(Refusal.CHAIN_BROKEN, f"a {what} presents {CHAIN_LENGTH} certificates, not {len(certificates)}")
    return certificates


def _anchor_of(chain: Sequence[x509.Certificate], terms: VerifierTerms, what: str) -> Anchor:
    """Return the anchor of a whole chain."""
    anchor = terms.anchor_of("nvidia_gpu", chain, "device")
    if len(chain) != CHAIN_LENGTH:
        refuse(Refusal.CHAIN_BROKEN, f"a {what} presents {CHAIN_LENGTH} certificates, not {len(chain)}")
    if not common_name(chain[0]).endswith(_FIRMWARE_LEAF):
        refuse(Refusal.CHAIN_BROKEN, f"'{common_name(chain[0])}' is not the certificate of a device's firmware")
    return anchor


def _certified_fwid(leaf: x509.Certificate) -> bytes | None:
    """Find the firmware id. Hopper's extension ends with it; Blackwell's lists several, its own first, and more."""
    for extension in leaf.extensions:
        if extension.oid in _FWID_OIDS and isinstance(extension.value, x509.UnrecognizedExtension):
            _, found, rest = extension.value.value.partition(_SHA384_DIGEST)
            return rest[:_FWID_BYTES] if found else extension.value.value[-_FWID_BYTES:]
    return None
