"""Verifies an NVIDIA GPU's attestation report, and the GPUs of one worker as a set.

The GPUs of one worker are judged as a set: each genuine, each listed once, and all over a nonce that only this worker
has. The CPU's report data binds the list in its order (`raycloak.attestation.core.report_data`), so GPU reports are
collected first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import GpuEvidence, Refusal, refuse
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.device import DeviceClaims, Manifests, chip_family, verify_device, verify_presented
from raycloak.attestation.gpu.report import DeviceReport, Opaque, device_ids
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.trust.certificates import common_name
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import ProtocolError

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


def verify_gpu(
    report: bytes,
    chain: Sequence[bytes],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    nonce: bytes,
    rims: GpuReferences,
    ocsp: Sequence[bytes],
) -> DeviceClaims:
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
    model = common_name(device.chain[1]).partition(" ")[0]
    if rules.models is not None and model not in rules.models:
        refuse(Refusal.GPU_STATE, f"the policy does not accept a GPU whose boot ROM is of '{model}'")
    device.check_firmware_id(required=True)
    mode = _mode_of(device.report, rules)
    # A GPU writes the ids of others last byte first.
    linked = frozenset(each[::-1] for each in device_ids(device.report.opaque.get(Opaque.DEVICE_ID, b"")))
    return device.claims(mode, device.compared(_PARTS, rules), linked)


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
) -> tuple[DeviceClaims, ...]:
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

    def verified(gpu: GpuEvidence) -> DeviceClaims:
        def with_manifests(found: Manifests) -> DeviceClaims:
            references = GpuReferences(found["driver"], found["VBIOS"])
            return verify_gpu(gpu.report, gpu.chain, rules, terms, nonce=nonce, rims=references, ocsp=ocsp)

        foreign = Refusal.GPU_NOT_BOUND
        return verify_presented(gpu, rims, what="GPU", parts=_PARTS, verify=with_manifests, foreign=foreign)

    claims = tuple(map(verified, presented))
    # A genuine GPU that is presented twice passes every check before this one.
    if len({each.platform_id for each in claims}) != count:
        refuse(Refusal.GPU_NOT_BOUND, "one GPU is presented twice")
    return claims
