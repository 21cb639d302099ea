"""Verifies an NVIDIA GPU's attestation report against pinned or simulated roots, reference values and OCSP answers.

Hardware and simulated evidence take the same path. The class of the result is the class of the anchor. Each stage sets
one refusal code, in the order of the design.

The GPUs of one worker are judged as a set: each genuine, each listed once, and all over a nonce that only this worker
has. The CPU's report data binds the list in its order (`raycloak.attestation.core.report_data`), so GPU reports are
collected first.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import product
from typing import Final

from cryptography import x509
from cryptography.x509.oid import ObjectIdentifier

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Refusal, refuse
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.ocsp import check_answers, check_coverage, check_current, find_answers
from raycloak.attestation.gpu.report import GpuReport, Opaque, parse_gpu_report
from raycloak.attestation.gpu.rim import GoldenValues, Rim, read_rim, verify_rim
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    common_name,
    has_only_blocks,
    is_pem,
    key_id,
    read_presented,
    signed_by,
)
from raycloak.attestation.trust.roots import Anchor, VerifierTerms
from raycloak.metrics.errors import EvidenceError, ProtocolError

MAX_GPUS: Final = 16
CHAIN_LENGTH: Final = 5  # firmware, boot ROM, provisioner, family, device root
_FIRMWARE_LEAF: Final = "FMC LF"
# A firmware id is a SHA-384.
_FWID_BYTES: Final = 48
_FWID_OIDS: Final = (ObjectIdentifier("2.23.133.5.4.1"), ObjectIdentifier("2.23.133.5.4.1.1"))  # Hopper, Blackwell
_SHA384_DIGEST: Final = bytes.fromhex("06096086480165030402020430")
"""DER of SHA-384's object identifier, then tag and length of the 48-byte digest that follows it."""

_CHIP: Final = re.compile(r"(G[A-Z])[0-9]\w*( |$)")
_MODES: Final[Mapping[int, str]] = {0: "single GPU", 1: "multi GPU", 2: "protected PCIe"}
_PPCIE_MODE, _PPCIE_ON = 2, 0xAA


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
    mode: str
    uncovered: tuple[int, ...]
    expires_at: int
    steps: tuple[tuple[str, str], ...]


def verify_gpu(
    report: bytes,
    chain: Sequence[bytes],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    nonce: bytes,
    rims: GpuReferences,
    ocsp: Sequence[bytes],
) -> GpuClaims:
    """Verify a GPU's ``report``.

    Guarantee: returns only for a canonical report over ``nonce``, signed by the firmware of a GPU in an accepted mode.
    Its five certificates end in an anchor of an accepted class, and none is known to be revoked. It equals every
    reference value supplied, and the signers of those are not known to be revoked either.

    Args:
        chain: the device's certificates, each entry DER or PEM, leaf first.
        terms: with roots of family ``nvidia_gpu``, and of ``nvidia_rim`` for reference values of the same class.
        nonce: 32 bytes that the report must be over.
        ocsp: answers, DER. Only answers about this chain and the manifests' signers count.

    Raises:
        EvidenceError: one of the codes of `raycloak.attestation.core.evidence.Refusal`.
    """
    instant = terms.instant
    parsed = parse_gpu_report(report)
    given = {"driver": rims.driver, "VBIOS": rims.vbios}
    manifests = {what: read_rim(data, what) for what, data in given.items() if data is not None}
    certificates = _read_chain(chain)
    anchor = _anchor_of(certificates, terms)
    answers = find_answers(ocsp, certificates)
    # The manifests' signers, roots excepted. Most have no answer. `find_answers` skips the first of a chain: a device's
    # is its firmware, about which no answers exist.
    signers = [rim.certificates for rim in manifests.values() if rim.certificates]
    of_signers = tuple(answer for signer in signers for answer in find_answers(ocsp, (signer[0], *signer)))
    if not signed_by(certificates[0], parsed.signature, parsed.signed):
        refuse(Refusal.EVIDENCE_TAMPERED, "the signature over the GPU's report does not hold")
    check_answers((*answers, *of_signers))
    ends = [check_certificate_windows(certificates, instant, "device")]
    ends += [
        check_certificate_windows(rim.certificates, instant, f"{what} manifest")
        for what, rim in manifests.items()
        if rim.certificates
    ]
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
        for each in terms.anchors
        if each.family == "nvidia_rim" and each.evidence_class is anchor.evidence_class
    ]
    mode, compared = _check_state(parsed, certificates, manifests, rim_roots, rules, instant)
    return _claims(parsed, certificates, anchor, mode, compared, len(answers), int(min(ends).timestamp()))


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


def _anchor_of(chain: Sequence[x509.Certificate], terms: VerifierTerms) -> Anchor:
    """Return the anchor of a whole chain."""
    anchor = terms.anchor_of("nvidia_gpu", chain, "device")
    if len(chain) != CHAIN_LENGTH:
        refuse(Refusal.CHAIN_BROKEN, f"a GPU presents {CHAIN_LENGTH} certificates, not {len(chain)}")
    if not common_name(chain[0]).endswith(_FIRMWARE_LEAF):
        refuse(Refusal.CHAIN_BROKEN, f"'{common_name(chain[0])}' is not the certificate of a device's firmware")
    return anchor


def chip_family(name: str) -> str:
    """Return the family of a chip's name, such as ``GH`` for ``GH100``; empty for names of other devices."""
    found = _CHIP.match(name)
    return found[1] if found else ""


def _check_state(
    report: GpuReport,
    chain: Sequence[x509.Certificate],
    rims: Mapping[str, Rim],
    rim_roots: Collection[bytes],
    rules: GpuRules,
    now: datetime,
) -> tuple[str, tuple[int, ...]]:
    """Judge the GPU's state; return its mode in words, and the measurements that were compared.

    Raises:
        EvidenceError: ``gpu_state``: for another kind of device, such as a switch, a model that is not accepted, other
            firmware, a mode that the rules do not allow, or other measurements than its manifests have.
    """
    name, family = common_name(chain[0]), chip_family(common_name(chain[0]))
    if not family:
        refuse(Refusal.GPU_STATE, f"'{name}' is not the firmware certificate of a GPU")
    # The device itself issues the leaf. NVIDIA issues the certificate of its boot ROM, and so vouches for that name.
    model = common_name(chain[1]).partition(" ")[0]
    if rules.models is not None and model not in rules.models:
        refuse(Refusal.GPU_STATE, f"the policy does not accept a GPU whose boot ROM is of '{model}'")
    certified, reported = _certified_fwid(chain[0]), report.opaque.get(Opaque.FWID)
    if certified is not None and reported is None:
        refuse(Refusal.GPU_STATE, "the GPU's certificate names its firmware, and the report does not")
    if certified is not None and certified != reported:
        refuse(Refusal.GPU_STATE, "the GPU's certificate is for other firmware than the report")
    mode = _mode_of(report, rules)
    for what in ("driver", "VBIOS"):
        if what not in rims and rules.require_rim:
            refuse(Refusal.GPU_STATE, f"there are no reference values for the GPU's {what}")
    golden = {what: verify_rim(rim, rim_roots, now, what) for what, rim in rims.items()}
    return mode, _compared(report, family, golden)


def _certified_fwid(leaf: x509.Certificate) -> bytes | None:
    """Find the firmware id. Hopper's extension ends with it; Blackwell's lists several, its own first, and more."""
    for extension in leaf.extensions:
        if extension.oid in _FWID_OIDS and isinstance(extension.value, x509.UnrecognizedExtension):
            _, found, rest = extension.value.value.partition(_SHA384_DIGEST)
            return rest[:_FWID_BYTES] if found else extension.value.value[-_FWID_BYTES:]
    return None


def _mode_of(report: GpuReport, rules: GpuRules) -> str:
    """Return the mode in words. Refuse an unknown mode, and protected PCIe or no mode unless the rules allow it."""
    flag = report.opaque.get(Opaque.FEATURE_FLAG)
    # A field without bytes states nothing, although it would read as zero, the mode of a single GPU.
    mode = int.from_bytes(flag, "little") if flag else None
    protected = mode == _PPCIE_MODE or report.opaque.get(Opaque.PROTECTED_PCIE_STATUS) == bytes((_PPCIE_ON,))
    if mode is not None and mode not in _MODES:
        refuse(Refusal.GPU_STATE, f"the GPU runs in a mode that is not known ({mode})")
    if protected and not rules.allow_ppcie:
        refuse(Refusal.GPU_STATE, "the GPU runs in protected-PCIe mode, not in confidential-computing mode")
    if protected:
        return _MODES[_PPCIE_MODE]
    if mode is None and not rules.allow_unstated_mode:
        refuse(Refusal.GPU_STATE, "the GPU does not state its mode, so nothing says that it is confidential computing")
    return "not stated" if mode is None else _MODES[mode]


def _compared(report: GpuReport, family: str, golden: Mapping[str, GoldenValues]) -> tuple[int, ...]:
    """Compare the report with the given reference values; return the measurements, from 1, that were compared."""
    versions = {"driver": report.driver_version, "VBIOS": report.vbios_version}
    values: dict[int, tuple[bytes, ...]] = {}
    for what, described in golden.items():
        version = versions[what]
        if not version or described.version.casefold() != version.casefold():
            told = f"{described.version!r}, the GPU runs {version!r}"
            refuse(Refusal.GPU_STATE, f"the {what} manifest is for version {told}")
        if chip_family(described.product) not in ("", family):
            refuse(Refusal.GPU_STATE, f"the {what} manifest is for {described.product!r}, which the GPU is not")
        if both := values.keys() & described.values.keys():
            refuse(Refusal.GPU_STATE, f"driver and VBIOS manifest both claim measurement {min(both)}")
        values.update(described.values)
    # Reference values count from 0, and a report from 1.
    differing = [index for index, accepted in values.items() if report.measurements.get(index + 1) not in accepted]
    if differing:
        refuse(Refusal.GPU_STATE, f"measurements {differing} of the GPU differ from its manifests")
    return tuple(sorted(index + 1 for index in values))


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
    covered = f"{len(compared)} equal their reference values" if compared else "not compared"
    if compared and uncovered:
        covered += f"; in no reference manifest: {', '.join(map(str, uncovered))}"
    steps = (
        ("parse", f"{len(report.measurements)} measurements"),
        ("root", anchor.evidence_class.value),
        ("signatures", "report and device chain"),
        ("revocation", f"{answers} OCSP answers" if answers else "not checked"),
        ("collateral", f"until {expires_at}"),
        ("nonce", report.nonce.hex()),
        ("mode", mode),
        ("measurements", covered),
    )
    return GpuClaims(
        evidence_class=anchor.evidence_class,
        platform_id=key_id(chain[1]),
        measurement=hashlib.sha384(values).digest(),
        report_data=report.nonce,
        hwmodel=common_name(chain[1]),
        dbgstat="disabled" if compared else "",
        uncovered=uncovered,
        mode=mode,
        expires_at=expires_at,
        steps=steps,
    )


def gpu_nonce(nonce: bytes, hpke_key: bytes) -> bytes:
    """Derive the 32-byte nonce for every GPU of a worker, from the challenge's nonce and the worker's key."""
    return hashlib.sha256(length_prefixed("raycloak/gpu/v1", nonce, hpke_key)).digest()


def verify_gpus(
    evidence: Sequence[bytes],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    count: int,
    nonce: bytes,
    rims: Sequence[bytes],
    ocsp: Sequence[bytes],
) -> tuple[GpuClaims, ...]:
    """Verify the GPUs of one worker, in the order in which it presents them.

    Guarantee: returns only if exactly ``count`` different GPUs vouch for ``nonce``, each as `verify_gpu` demands.

    Args:
        evidence: encoded `GpuEvidence` messages.
        count: the number of GPUs that the worker declared.
        nonce: the result of :func:`gpu_nonce` for this challenge and worker.
        rims: reference values for any driver and VBIOS that may occur, XML.
        ocsp: answers about any device, DER.

    Raises:
        EvidenceError: ``gpu_not_bound`` if a GPU is missing, extra, there twice or over another nonce. Otherwise the
            codes of `verify_gpu`.
    """
    if len(evidence) > MAX_GPUS:
        refuse(Refusal.EVIDENCE_MALFORMED, f"{len(evidence)} GPUs are more than the {MAX_GPUS} that a worker may have")
    try:
        presented = [parse(GpuEvidence, each) for each in evidence]
    except ProtocolError as error:
        refuse(Refusal.EVIDENCE_MALFORMED, f"{error.message}.")
    if len(presented) != count:
        refuse(Refusal.GPU_NOT_BOUND, f"evidence of {len(presented)} GPUs where {count} are declared")
    verify = partial(verify_gpu, rules=rules, terms=terms, nonce=nonce, ocsp=ocsp)
    claims = tuple(_verified(each, tuple(_references(each, rims)), verify) for each in presented)
    # A genuine GPU that is presented twice passes every check before this one.
    if len({each.platform_id for each in claims}) != count:
        refuse(Refusal.GPU_NOT_BOUND, "one GPU is presented twice")
    return claims


def _verified(gpu: GpuEvidence, references: Sequence[GpuReferences], verify: Callable[..., GpuClaims]) -> GpuClaims:
    """Verify one GPU against each fitting pair of references, as boards of several kinds share a version number."""
    for position, rims in enumerate(references, 1):
        try:
            return verify(gpu.report, gpu.chain, rims=rims)
        except EvidenceError as error:
            if error.code == Refusal.NONCE_FOREIGN:
                refuse(Refusal.GPU_NOT_BOUND, "a GPU's report is not over the nonce of this worker and its key")
            # A state may differ because these references are of another board; any other refusal holds for all.
            if error.code != Refusal.GPU_STATE or position == len(references):
                raise
    raise AssertionError("there is always one combination of references, if an empty one")


def _references(gpu: GpuEvidence, rims: Sequence[bytes]) -> Iterator[GpuReferences]:
    """Yield every pair of driver and VBIOS manifest that claims to fit this GPU, or a pair of None."""
    report = parse_gpu_report(gpu.report)
    try:
        family = chip_family(common_name(read_presented(gpu.chain[0])[0]))
    except (IndexError, ValueError):
        refuse(Refusal.CHAIN_BROKEN, "the certificate of a GPU's firmware is missing or cannot be read")
    stated = [(data, read_rim(data, "reference")) for data in rims]
    fitting: list[tuple[bytes | None, str]] = [
        (data, rim.stated_version.casefold()) for data, rim in stated if chip_family(rim.stated_product) == family
    ]
    drivers, vbioses = (
        [data for data, of in fitting if of == version.casefold()] or [None]
        for version in (report.driver_version, report.vbios_version)
    )
    for driver, vbios in product(drivers, vbioses):
        yield GpuReferences(driver, vbios)
