"""Verifies an NVIDIA GPU's attestation report against pinned or simulated roots, reference values and OCSP answers.

Hardware and simulated evidence take the same path. The class of the result is the class of the anchor. Each stage sets
one refusal code, in the order of the design. Not checked here: whether the GPU belongs to a worker.
`raycloak.attestation.gpu.gpu_set` checks that, for all GPUs of a worker together.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from raycloak.attestation.core.evidence import EvidenceClass, Refusal, refuse, require_class
from raycloak.attestation.gpu.ocsp import (
    OcspAnswer,
    check_coverage,
    check_current,
    check_good,
    check_responders,
    check_signatures,
    find_answers,
)
from raycloak.attestation.gpu.report import GpuReport, parse_gpu_report
from raycloak.attestation.gpu.rim import Rim, check_rim_windows, read_rim, verify_rim
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.state import check_device, check_firmware_identity, check_mode, check_references
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    check_links,
    common_name,
    has_only_blocks,
    is_pem,
    key_id,
    read_presented,
    signed_by,
)
from raycloak.attestation.trust.roots import Anchor, anchor_of

CHAIN_LENGTH: Final = 5  # firmware, boot ROM, provisioner, family, device root
_FIRMWARE_LEAF: Final = "FMC LF"


@dataclass(frozen=True, slots=True)
class GpuReferences:
    """The signed reference values for one GPU, XML; None where there are none."""

    driver: bytes | None = None
    vbios: bytes | None = None


@dataclass(frozen=True, slots=True)
class GpuClaims:
    """The claims of a verified report, named as in RFC 9711 where that has a name.

    Attributes:
        evidence_class: class of the anchor whose root verified the report.
        platform_id: SHA-384 of the boot ROM's public key, 48 bytes: one per GPU, whatever its firmware.
        measurement: SHA-384 over all measurements in the order of their indices, 48 bytes.
        report_data: the nonce of the request, 32 bytes.
        hwmodel: the model that the device's certificate names.
        dbgstat: ``disabled`` if reference values of driver and VBIOS matched, empty if that is unknown.
        mode: the mode of confidential computing; ``not stated`` if the report does not say and the rules allow that.
        uncovered: measurements, from 1, that are in no reference manifest.
        expires_at: unix seconds at which a certificate, OCSP answer or manifest signer stops being valid.
        steps: (step, verdict) in the order in which they were taken.
    """

    evidence_class: EvidenceClass
    platform_id: bytes
    measurement: bytes
    report_data: bytes
    hwmodel: str
    dbgstat: str
    driver_version: str
    vbios_version: str
    mode: str
    uncovered: tuple[int, ...]
    expires_at: int
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Rims:
    driver: Rim | None
    vbios: Rim | None

    def windows(self, now: datetime) -> list[datetime]:
        """Return when the certificates of each manifest end, as far as they can be read."""
        named = ((self.driver, "driver manifest"), (self.vbios, "VBIOS manifest"))
        ends = [check_rim_windows(rim, now, what) for rim, what in named if rim is not None]
        return [end for end in ends if end is not None]

    def signer_answers(self, ocsp: Sequence[bytes]) -> tuple[OcspAnswer, ...]:
        """Return the OCSP answers about the manifests' signers, roots excepted. Most signers have none."""
        chains = [rim.certificates for rim in (self.driver, self.vbios) if rim is not None and rim.certificates]
        # `find_answers` skips the first of a chain: for a device it is firmware, about which no answers exist.
        return tuple(answer for chain in chains for answer in find_answers(ocsp, (chain[0], *chain)))


def verify_gpu(
    report: bytes,
    chain: Sequence[bytes],
    *,
    anchors: Sequence[Anchor],
    accepted: Collection[EvidenceClass],
    rules: GpuRules,
    nonce: bytes,
    rims: GpuReferences,
    ocsp: Sequence[bytes],
    now: int,
) -> GpuClaims:
    """Verify a GPU's ``report`` at unix second ``now``.

    Guarantee: returns only for a canonical report over ``nonce``, signed by the firmware of a GPU in an accepted mode.
    Its five certificates end in an anchor of an accepted class, and none is known to be revoked. It equals every
    reference value supplied, and the signers of those are not known to be revoked either.

    Args:
        chain: the device's certificates, each entry DER or PEM, leaf first.
        anchors: roots of family ``nvidia_gpu``, and of ``nvidia_rim`` for reference values of the same class.
        nonce: 32 bytes that the report must be over.
        ocsp: answers, DER. Only answers about this chain and the manifests' signers count.

    Raises:
        EvidenceError: one of the codes of `raycloak.attestation.core.evidence.Refusal`.
    """
    instant = datetime.fromtimestamp(now, UTC)
    parsed = parse_gpu_report(report)
    manifests = _Rims(*(read_rim(each, what) if each is not None else None for each, what in _named(rims)))
    certificates = _read_chain(chain)
    anchor = _select_anchor(certificates, anchors)
    require_class(anchor.evidence_class, accepted)
    _check_chain(certificates)
    answers = find_answers(ocsp, certificates)
    of_signers = manifests.signer_answers(ocsp)
    # The order of these checks decides the code of a refusal.
    _check_signatures(parsed, certificates[0], (*answers, *of_signers))
    check_responders((*answers, *of_signers))
    check_good((*answers, *of_signers))
    ends = [check_certificate_windows(certificates, instant, "device"), *manifests.windows(instant)]
    # Present answers are always judged, even where the rules require none.
    if ocsp or rules.require_ocsp:
        ends.append(check_coverage(answers, certificates, instant))
    if of_signers:
        ends.append(check_current(of_signers, instant))
    if parsed.nonce != nonce:
        refuse(Refusal.NONCE_FOREIGN, "the GPU's report is over a nonce other than the issued one")
    # Devices and reference values have roots of two families, so that a device's key cannot vouch for its own values.
    rim_roots = [
        each.root_key_id
        for each in anchors
        if each.family == "nvidia_rim" and each.evidence_class is anchor.evidence_class
    ]
    mode, compared = _check_state(parsed, certificates, manifests, rim_roots, rules, instant)
    return _claims(parsed, certificates, anchor, mode, compared, len(answers), int(min(ends).timestamp()))


def _named(rims: GpuReferences) -> tuple[tuple[bytes | None, str], ...]:
    return (rims.driver, "driver"), (rims.vbios, "VBIOS")


def _read_chain(chain: Sequence[bytes]) -> tuple[x509.Certificate, ...]:
    # Nothing signs text around the blocks, so it would give one chain several encodings.
    if any(is_pem(data) and not has_only_blocks(data.rstrip(b"\0")) for data in chain):
        refuse(Refusal.EVIDENCE_MALFORMED, "the GPU's chain contains text other than certificates")
    try:
        # One more than allowed is enough to refuse, so the rest is not read.
        certificates = tuple(each for data in chain[: CHAIN_LENGTH + 1] for each in read_presented(data))
    except ValueError:
        refuse(Refusal.CHAIN_BROKEN, "a certificate of the GPU cannot be read")
    if not 1 <= len(certificates) <= CHAIN_LENGTH:
        refuse(Refusal.CHAIN_BROKEN, f"a GPU presents {CHAIN_LENGTH} certificates, not {len(certificates)}")
    return certificates


def _select_anchor(chain: Sequence[x509.Certificate], anchors: Sequence[Anchor]) -> Anchor:
    """Find the anchor of a chain. A consistent chain to a foreign root is unknown, any other chain is broken."""
    anchor = anchor_of(anchors, "nvidia_gpu", chain[-1])
    if anchor is None:
        check_links(chain, "device")
        refuse(Refusal.ROOT_UNKNOWN, f"'{common_name(chain[-1])}' is not a root that the policy trusts for GPUs")
    return anchor


def _check_chain(chain: Sequence[x509.Certificate]) -> None:
    if len(chain) != CHAIN_LENGTH:
        refuse(Refusal.CHAIN_BROKEN, f"a GPU presents {CHAIN_LENGTH} certificates, not {len(chain)}")
    check_links(chain, "device")
    if not common_name(chain[0]).endswith(_FIRMWARE_LEAF):
        refuse(Refusal.CHAIN_BROKEN, f"'{common_name(chain[0])}' is not the certificate of a device's firmware")


def _check_signatures(report: GpuReport, leaf: x509.Certificate, answers: Sequence[OcspAnswer]) -> None:
    if not signed_by(leaf, report.signature, report.signed):
        refuse(Refusal.EVIDENCE_TAMPERED, "the signature over the GPU's report does not hold")
    check_signatures(answers)


def _check_state(
    report: GpuReport,
    chain: Sequence[x509.Certificate],
    rims: _Rims,
    rim_roots: Collection[bytes],
    rules: GpuRules,
    now: datetime,
) -> tuple[str, tuple[int, ...]]:
    """Judge the GPU's state; return its mode in words, and the measurements that were compared."""
    leaf, boot_rom, *_ = chain
    family = check_device(leaf, boot_rom, rules)
    check_firmware_identity(leaf, report)
    mode = check_mode(report, rules)
    for rim, what in ((rims.driver, "driver"), (rims.vbios, "VBIOS")):
        if rim is None and rules.require_rim:
            refuse(Refusal.GPU_STATE, f"there are no reference values for the GPU's {what}")
    driver, vbios = (
        verify_rim(rim, rim_roots, now, what) if rim is not None else None
        for rim, what in ((rims.driver, "driver"), (rims.vbios, "VBIOS"))
    )
    return mode, check_references(report, family, driver, vbios)


def _claims(
    report: GpuReport,
    chain: Sequence[x509.Certificate],
    anchor: Anchor,
    mode: str,
    compared: tuple[int, ...],
    answers: int,
    expires_at: int,
) -> GpuClaims:
    uncovered = tuple(sorted(report.measurements.keys() - set(compared)))
    values = b"".join(report.measurements[index] for index in sorted(report.measurements))
    steps = (
        ("parse", f"{len(report.measurements)} measurements"),
        ("root", anchor.evidence_class.value),
        ("signatures", "report and device chain"),
        ("revocation", f"{answers} OCSP answers" if answers else "not checked"),
        ("collateral", f"until {expires_at}"),
        ("nonce", report.nonce.hex()),
        ("mode", mode),
        ("measurements", _covered(compared, uncovered)),
    )
    return GpuClaims(
        evidence_class=anchor.evidence_class,
        platform_id=key_id(chain[1]),
        measurement=hashlib.sha384(values).digest(),
        report_data=report.nonce,
        hwmodel=common_name(chain[1]),
        dbgstat="disabled" if compared else "",
        uncovered=uncovered,
        driver_version=report.driver_version,
        vbios_version=report.vbios_version,
        mode=mode,
        expires_at=expires_at,
        steps=steps,
    )


def _covered(compared: tuple[int, ...], uncovered: tuple[int, ...]) -> str:
    if not compared:
        return "not compared"
    rest = f"; in no reference manifest: {', '.join(map(str, uncovered))}" if uncovered else ""
    return f"{len(compared)} equal their reference values{rest}"
