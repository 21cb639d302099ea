"""Verifies the NVSwitches between the GPUs of a worker in protected-PCIe mode, in which NVLink carries data in clear.

A switch reports as a GPU does, under the same device root. It names itself by an id that its boot ROM's certificate
ends with, and it names the GPUs at its ports. A GPU names the switches at its links. The two lists have to agree.
"""

from collections.abc import Iterable, Sequence
from typing import Final, get_args

from raycloak.attestation.core.evidence import Links, Refusal, SwitchEvidence, refuse
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.device import DeviceClaims, Manifests, chip_family, verify_device, verify_presented
from raycloak.attestation.gpu.report import DEVICE_ID_BYTES, Opaque, device_ids
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.verify import NOT_STATED, PROTECTED_PCIE
from raycloak.attestation.trust.certificates import common_name
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import ProtocolError

MAX_SWITCHES: Final = 16
_PARTS: Final = ("VBIOS",)
# A switch of eight GPUs states eight ids, and the port of each of its 64 links behind them.
_MAX_GPUS_OF_SWITCH: Final = 8
_LOCKED: Final = 1  # its configuration can no longer be changed from the guest or the host
_WEAKEST_FIRST: Final[tuple[Links, ...]] = get_args(Links)


def verify_switch(
    report: bytes,
    chain: Sequence[bytes],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    nonce: bytes,
    rim: bytes | None,
    ocsp: Sequence[bytes],
) -> DeviceClaims:
    """Verify a switch's ``report``.

    Guarantee: as `raycloak.attestation.gpu.device.verify_device`, of a locked switch whose certificate has the id that
    it states. Its report equals the reference values, if they are given.

    Args:
        rim: signed reference values of its VBIOS, XML; None where there are none.

    Raises:
        EvidenceError: as `raycloak.attestation.gpu.verify.verify_gpu`.
    """
    manifests = {"VBIOS": rim}
    device = verify_device(report, chain, rules, terms, what="switch", nonce=nonce, manifests=manifests, ocsp=ocsp)
    name, stated = common_name(device.chain[0]), device.report.opaque
    if not chip_family(name).startswith("L"):
        refuse(Refusal.GPU_STATE, f"'{name}' is not the firmware certificate of a switch")
    # Switches of the first generation report no firmware id; their measurements cover the firmware.
    device.check_firmware_id(required=False)
    if not device.device_id or stated.get(Opaque.DEVICE_ID) != device.device_id:
        refuse(Refusal.GPU_STATE, "the switch does not state the id that its certificate has")
    lock = stated.get(Opaque.LOCK_STATUS, b"")
    if int.from_bytes(lock, "little") != _LOCKED:
        refuse(Refusal.GPU_STATE, "the switch is not locked, so its configuration can still be changed")
    linked = device_ids(stated.get(Opaque.SWITCH_TOPOLOGY, b"")[: _MAX_GPUS_OF_SWITCH * DEVICE_ID_BYTES])
    return device.claims("locked", device.compared(_PARTS, rules), linked)


def verify_switches(
    evidence: Sequence[bytes],
    gpus: Sequence[DeviceClaims],
    rules: GpuRules,
    terms: VerifierTerms,
    *,
    nonce: bytes,
    rims: Sequence[bytes],
    ocsp: Sequence[bytes],
) -> tuple[DeviceClaims, ...]:
    """Verify the switches of one worker's machine, in the order in which it presents them.

    Guarantee: returns for GPUs in protected-PCIe mode only if exactly the switches that each of them names vouch for
    ``nonce``, each once and as `verify_switch` demands, and each names every one of these GPUs. For other GPUs, only if
    there is no switch.

    Args:
        evidence: encoded `SwitchEvidence` messages.
        gpus: the verified GPUs of the worker.
        nonce: the result of `raycloak.attestation.gpu.verify.gpu_nonce` for this challenge and worker.
        rims: reference values for any VBIOS that may occur, XML.
        ocsp: answers about any device, DER.

    Raises:
        EvidenceError: ``switch_missing`` for one that a GPU names and that is not presented; ``switch_doubled``;
            ``switch_foreign`` for one that no GPU names, or over another nonce, or where no GPU needs one;
            ``switch_other_gpus`` for one that does not name a GPU of the worker. ``gpu_not_bound`` for GPUs that name
            different switches, and ``gpu_state`` for GPUs in different modes. Else the codes of `verify_switch`.
    """
    if len(evidence) > MAX_SWITCHES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"{len(evidence)} switches are more than {MAX_SWITCHES}")
    protected = [gpu for gpu in gpus if gpu.mode == PROTECTED_PCIE]
    if not protected:
        if evidence:
            refuse(Refusal.SWITCH_FOREIGN, "switches are presented, and no GPU is in protected-PCIe mode")
        return ()
    if len(protected) != len(gpus):
        refuse(Refusal.GPU_STATE, "some GPUs of the worker are in protected-PCIe mode, and some are not")
    named = _named_by(protected)
    try:
        presented = [parse(SwitchEvidence, each) for each in evidence]
    except ProtocolError as error:
        refuse(Refusal.EVIDENCE_MALFORMED, f"{error.message}.")

    def verified(switch: SwitchEvidence) -> DeviceClaims:
        def with_manifests(found: Manifests) -> DeviceClaims:
            return verify_switch(switch.report, switch.chain, rules, terms, nonce=nonce, rim=found["VBIOS"], ocsp=ocsp)

        foreign = Refusal.SWITCH_FOREIGN
        return verify_presented(switch, rims, what="switch", parts=_PARTS, verify=with_manifests, foreign=foreign)

    claims = tuple(map(verified, presented))
    found = {each.device_id for each in claims}
    # A genuine switch that is presented twice passes every check before this one.
    if len(found) != len(claims) or len({each.platform_id for each in claims}) != len(claims):
        refuse(Refusal.SWITCH_DOUBLED, "one switch is presented twice")
    if foreign := sorted(found - named):
        refuse(Refusal.SWITCH_FOREIGN, f"no GPU of the worker has a link to the switch {foreign[0].hex()}")
    if missing := sorted(named - found):
        refuse(Refusal.SWITCH_MISSING, f"the GPUs have links to the switch {missing[0].hex()}, which is not presented")
    for switch in claims:
        _check_gpus(switch, protected)
    return claims


def links_of(gpus: Sequence[DeviceClaims]) -> Links | None:
    """Return what evidence shows of the links between verified GPUs of one worker; None without a GPU.

    Links of GPUs in protected-PCIe mode are in clear, and :func:`verify_switches` has found their switches.
    """
    modes = {gpu.mode for gpu in gpus}
    if NOT_STATED in modes:
        return "not attested"
    if PROTECTED_PCIE in modes:
        return "clear over attested switches"
    return "encrypted" if modes else None


def weakest_links(found: Iterable[Links | None]) -> Links | None:
    """Return the weakest links of several workers; None if none has a GPU."""
    return min((each for each in found if each is not None), key=_WEAKEST_FIRST.index, default=None)


def _named_by(gpus: Sequence[DeviceClaims]) -> frozenset[bytes]:
    """Return the switches that every one of at least one GPU names."""
    named = gpus[0].linked
    for gpu in gpus:
        if not gpu.device_id or not gpu.linked:
            refuse(Refusal.GPU_STATE, "a GPU in protected-PCIe mode has no id, or names no switch")
        if gpu.linked != named:
            refuse(Refusal.GPU_NOT_BOUND, "the GPUs of the worker have links to different switches")
    return named


def _check_gpus(switch: DeviceClaims, gpus: Sequence[DeviceClaims]) -> None:
    """Require that a switch names every GPU.

    No public document states in which order a switch writes the bytes of a GPU's id, so both orders are tried, one for
    all GPUs. That another device fits needs 64 equal bits.
    """
    expected = {gpu.device_id for gpu in gpus}
    if not expected <= switch.linked and not {each[::-1] for each in expected} <= switch.linked:
        lacking = min(expected - switch.linked).hex()
        refuse(Refusal.SWITCH_OTHER_GPUS, f"the switch {switch.device_id.hex()} has no link to the GPU {lacking}")
