"""Verifies an NVIDIA GPU's attestation report, and the GPUs of one worker as a set.

The GPUs of one worker are judged as a set: each genuine, each listed once, and all over a nonce that only this worker
has. The CPU's report data binds the list in its order (`raycloak.attestation.core.report_data`), so GPU reports are
collected first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Refusal, refuse
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.device import chip_family, fitting_manifests, verify_device, verify_with
from raycloak.attestation.gpu.report import DeviceReport, Opaque, device_ids
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.trust.certificates import common_name
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError, ProtocolError

MAX_GPUS: Final = 16
PROTECTED_PCIE: Final = "protected PCIe"
NOT_STATED: Final = "not stated"
_MODES: Final[Mapping[int, str]] = {0: "single GPU", 1: "multi GPU", 2: PROTECTED_PCIE}
_PPCIE_MODE, _PPCIE_ON = 2, 0xAA
_PARTS: Final = ("driver", "VBIOS")


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
        device_id: the id by which NVLink devices name it, 8 bytes; empty if its certificate has none.
        switch_ids: ids of the switches that its links lead to, 8 bytes each; empty if it reports none.
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
    switch_ids: frozenset[bytes]
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

    Guarantee: as `raycloak.attestation.gpu.device.verify_device`, of a GPU in an accepted mode. Its report equals every
    reference value supplied.

    Args:
        chain: the device's certificates, each entry DER or PEM, leaf first.
        terms: with roots of family ``nvidia_gpu``, and of ``nvidia_rim`` for reference values of the same class.
        nonce: 32 bytes that the report must be over.
        ocsp: answers, DER. Only answers about this chain and the manifests' signers count.

    Raises:
        EvidenceError: one of the codes of `raycloak.attestation.core.evidence.Refusal`. Of them ``gpu_state`` is for
            another kind of device, such as a switch, a model that is not accepted, other firmware, a mode that the
            rules do not allow, or other measurements than its manifests have.
    """
    manifests = {"driver": rims.driver, "VBIOS": rims.vbios}
    device = verify_device(report, chain, rules, terms, what="GPU", nonce=nonce, manifests=manifests, ocsp=ocsp)
    name = common_name(device.chain[0])
    if not chip_family(name).startswith("G"):
        refuse(Refusal.GPU_STATE, f"'{name}' is not the firmware certificate of a GPU")
    # The device itself issues the leaf. NVIDIA issues the certificate of its boot ROM, and so vouches for that name.
    if rules.models is not None and device.model not in rules.models:
        refuse(Refusal.GPU_STATE, f"the policy does not accept a GPU whose boot ROM is of '{device.model}'")
    device.check_firmware_id(required=True)
    mode = _mode_of(device.report, rules)
    compared = device.compared(_PARTS, rules)
    return GpuClaims(
        evidence_class=device.anchor.evidence_class,
        platform_id=device.platform_id,
        measurement=device.measurement,
        report_data=device.report.nonce,
        hwmodel=common_name(device.chain[1]),
        dbgstat="disabled" if compared else "",
        mode=mode,
        uncovered=device.uncovered(compared),
        expires_at=device.expires_at,
        device_id=device.device_id,
        # A GPU writes the ids of others last byte first.
        switch_ids=frozenset(each[::-1] for each in device_ids(device.report.opaque.get(Opaque.DEVICE_ID, b""))),
        steps=device.steps(mode, compared),
    )


def _mode_of(report: DeviceReport, rules: GpuRules) -> str:
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
    return NOT_STATED if mode is None else _MODES[mode]


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
    claims = tuple(_verified(each, rules, terms, nonce, rims, ocsp) for each in presented)
    # A genuine GPU that is presented twice passes every check before this one.
    if len({each.platform_id for each in claims}) != count:
        refuse(Refusal.GPU_NOT_BOUND, "one GPU is presented twice")
    return claims


def _verified(
    gpu: GpuEvidence,
    rules: GpuRules,
    terms: VerifierTerms,
    nonce: bytes,
    rims: Sequence[bytes],
    ocsp: Sequence[bytes],
) -> GpuClaims:
    """Verify one GPU against each fitting pair of references."""
    found = fitting_manifests(gpu.report, gpu.chain, rims, "GPU", _PARTS)
    references = [GpuReferences(each["driver"], each["VBIOS"]) for each in found]
    verify = partial(verify_gpu, gpu.report, gpu.chain, rules, terms, nonce=nonce, ocsp=ocsp)
    try:
        return verify_with(references, lambda each: verify(rims=each))
    except EvidenceError as error:
        if error.code == Refusal.NONCE_FOREIGN:
            refuse(Refusal.GPU_NOT_BOUND, "a GPU's report is not over the nonce of this worker and its key")
        raise
