"""The GPUs of one worker as a set: each genuine, each listed once, and all over a nonce that only this worker has.

The CPU's report data binds the list in its order (`raycloak.attestation.core.report_data`), so GPU reports are
collected first.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Final

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence, Refusal, refuse
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.report import parse_gpu_report
from raycloak.attestation.gpu.rim import read_rim
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import GpuClaims, GpuReferences, chip_family, verify_gpu
from raycloak.attestation.trust.certificates import common_name, read_presented
from raycloak.attestation.trust.roots import Anchor
from raycloak.metrics.errors import EvidenceError, ProtocolError

MAX_GPUS: Final = 16
_LABEL: Final = "raycloak/gpu/v1"


def gpu_nonce(nonce: bytes, hpke_key: bytes) -> bytes:
    """Derive the 32-byte nonce for every GPU of a worker, from the challenge's nonce and the worker's key."""
    return hashlib.sha256(length_prefixed(_LABEL, nonce, hpke_key)).digest()


def verify_gpus(
    evidence: Sequence[bytes],
    *,
    count: int,
    nonce: bytes,
    anchors: Sequence[Anchor],
    accepted: Collection[EvidenceClass],
    rules: GpuRules,
    rims: Sequence[bytes],
    ocsp: Sequence[bytes],
    now: int,
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
    verify = partial(verify_gpu, anchors=anchors, accepted=accepted, rules=rules, nonce=nonce, ocsp=ocsp, now=now)
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
