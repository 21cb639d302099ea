"""The switches of a machine in protected-PCIe mode: exactly those that its GPUs name, each genuine and locked."""

import random
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.evidence import EvidenceClass, SwitchEvidence
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.gpu.switches import (
    MAX_SWITCHES,
    links_of,
    verify_switch,
    verify_switches,
)
from raycloak.attestation.gpu.verify import gpu_nonce, verify_gpus
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.simulators.gpu import GENUINE, GpuVariant, SimulatedGpuVendor
from tests.simulators.gpu_rim import Manifest
from tests.simulators.switch import (
    SWITCH_VBIOS_VERSION,
    SimulatedSwitch,
    SwitchedMachine,
    SwitchVariant,
    simulated_switch,
    switch_references,
    switched_machine,
)

NOW = 1_800_000_000
NONCE = gpu_nonce(b"c" * 32, b"k" * 1216)


class Hall:
    """A machine of two GPUs and two switches, a second one of the same vendor, and what a verifier holds."""

    def __init__(self) -> None:
        self.vendor = SimulatedGpuVendor.create()
        self.machine, self.other = switched_machine(self.vendor), switched_machine(self.vendor)
        of_gpus = self.vendor.references()
        self.rims = [each for each in (of_gpus.driver, of_gpus.vbios) if each] + [switch_references(self.vendor)]
        devices = [each for one in (self.machine, self.other) for each in (*one.gpus, *one.switches)]
        self.ocsp = [answer for each in devices for answer in self.vendor.ocsp(each, NOW)]
        self.terms = VerifierTerms(self.vendor.anchors, (EvidenceClass.SIMULATED,), NOW)
        self.rules = GpuRules(allow_ppcie=True)

    def gpus(self, *presented: bytes) -> tuple[DeviceClaims, ...]:
        evidence = presented or self.machine.collect(NONCE)
        published = {"rims": self.rims, "ocsp": self.ocsp}
        return verify_gpus(evidence, self.rules, self.terms, count=len(evidence), nonce=NONCE, **published)

    def verify(
        self, evidence: Any = None, gpus: tuple[DeviceClaims, ...] | None = None, **changes: Any
    ) -> tuple[DeviceClaims, ...]:
        arguments = {"nonce": NONCE, "rims": self.rims, "ocsp": self.ocsp} | changes
        rules = arguments.pop("rules", self.rules)
        presented = self.machine.collect_switches(NONCE) if evidence is None else evidence
        return verify_switches(presented, self.gpus() if gpus is None else gpus, rules, self.terms, **arguments)

    def code(self, evidence: Any = None, gpus: tuple[DeviceClaims, ...] | None = None, **changes: Any) -> str:
        with pytest.raises(EvidenceError) as refused:
            self.verify(evidence, gpus, **changes)
        return refused.value.code

    def code_of(self, switch: SimulatedSwitch, report: bytes | None = None, chain: Any = None, **changes: Any) -> Any:
        """Return the code with which one switch is refused; None if it is accepted."""
        arguments = {"nonce": NONCE, "rim": self.rims[-1], "ocsp": self.ocsp} | changes
        rules = arguments.pop("rules", self.rules)
        shown = switch.report(NONCE) if report is None else report
        try:
            verify_switch(shown, switch.chain if chain is None else chain, rules, self.terms, **arguments)
        except EvidenceError as error:
            return error.code
        return None


@pytest.fixture(scope="module")
def hall() -> Hall:
    return Hall()


def test_a_machine_passes_with_all_its_switches(hall: Hall) -> None:
    claims = hall.verify()
    assert [each.device_id for each in claims] == [each.device_id for each in hall.machine.switches]
    assert [each.dbgstat for each in claims] == ["disabled", "disabled"]
    assert dict(claims[0].steps)["mode"] == "locked"
    assert links_of(hall.gpus()) == "clear over attested switches"
    # In any order, and for a worker that has a part of the machine's GPUs.
    assert len(hall.verify(hall.machine.collect_switches(NONCE)[::-1])) == 2
    assert len(hall.verify(gpus=hall.gpus()[:1])) == 2


def test_both_orders_of_the_bytes_of_a_gpus_id_are_read(hall: Hall) -> None:
    backwards = SwitchVariant(gpus_last_byte_first=True)
    assert len(hall.verify([each.evidence(NONCE, backwards) for each in hall.machine.switches])) == 2


def test_a_missing_switch_is_refused(hall: Hall) -> None:
    first, second = hall.machine.collect_switches(NONCE)
    assert hall.code([first]) == hall.code([second]) == hall.code([]) == "switch_missing"


def test_a_doubled_switch_is_refused(hall: Hall) -> None:
    first, second = hall.machine.collect_switches(NONCE)
    assert hall.code([first, second, second]) == "switch_doubled"
    assert hall.code([first, first]) == "switch_doubled"
    assert hall.code([first, second, hall.machine.switches[0].evidence(NONCE)]) == "switch_doubled"
    assert hall.code([first] * (MAX_SWITCHES + 1)) == "evidence_malformed"


def test_a_foreign_switch_is_refused(hall: Hall) -> None:
    first, second = hall.machine.collect_switches(NONCE)
    elsewhere = simulated_switch(hall.vendor, [each.device_id for each in hall.machine.gpus])
    ocsp = [*hall.ocsp, *hall.vendor.ocsp(elsewhere, NOW)]
    assert hall.code([first, second, elsewhere.evidence(NONCE)], ocsp=ocsp) == "switch_foreign"
    assert hall.code([first, elsewhere.evidence(NONCE)], ocsp=ocsp) == "switch_foreign"


def test_another_machines_switches_are_refused(hall: Hall) -> None:
    """Whether they are over this worker's nonce or over their own."""
    first, second = hall.machine.collect_switches(NONCE)
    assert hall.code(hall.other.collect_switches(NONCE)) == "switch_foreign"
    assert hall.code([first, hall.other.collect_switches(NONCE)[0]]) == "switch_foreign"
    assert hall.code([first, hall.machine.switches[1].evidence(gpu_nonce(b"o" * 32, b"k"))]) == "switch_foreign"
    one_of_each = (hall.machine.collect(NONCE)[0], hall.other.collect(NONCE)[0])
    assert hall.code([first, second], hall.gpus(*one_of_each)) == "gpu_not_bound"


def test_a_switch_with_another_gpus_ids_is_refused(hall: Hall) -> None:
    """The GPUs name it, but it does not name all of them."""
    ids = [each.device_id for each in hall.machine.gpus]
    first = simulated_switch(hall.vendor, ids)
    second = simulated_switch(hall.vendor, [ids[0], hall.other.gpus[0].device_id])
    machine = SwitchedMachine(hall.machine.gpus, (first, second))
    answers = [answer for each in machine.switches for answer in hall.vendor.ocsp(each, NOW)]
    gpus = hall.gpus(*machine.collect(NONCE))
    assert hall.code(machine.collect_switches(NONCE), gpus, ocsp=hall.ocsp + answers) == "switch_other_gpus"
    # Of two GPUs, one in each order: the same 64 bits do not stand for both.
    mixed = simulated_switch(hall.vendor, [ids[0], ids[1][::-1]])
    machine = SwitchedMachine(hall.machine.gpus, (mixed,))
    answers = list(hall.vendor.ocsp(mixed, NOW))
    gpus = hall.gpus(*machine.collect(NONCE))
    assert hall.code(machine.collect_switches(NONCE), gpus, ocsp=hall.ocsp + answers) == "switch_other_gpus"


def test_gpus_without_clear_links_have_no_switches(hall: Hall) -> None:
    encrypted = hall.gpus(*(each.evidence(NONCE, GENUINE) for each in hall.machine.gpus))
    assert hall.verify([], encrypted) == ()
    assert hall.code(gpus=encrypted) == "switch_foreign"
    assert hall.code(gpus=()) == "switch_foreign"
    assert links_of(encrypted) == "encrypted"
    assert links_of(()) is None
    mixed = (hall.gpus()[0], encrypted[1])
    assert hall.code(gpus=mixed) == "gpu_state"


def test_a_gpu_that_names_no_switch_is_refused(hall: Hall) -> None:
    silent = GpuVariant(feature_flag=2, protected_pcie=True)
    assert hall.code(gpus=hall.gpus(hall.machine.gpus[0].evidence(NONCE, silent))) == "gpu_state"


def test_a_report_is_judged_like_a_gpus(hall: Hall) -> None:
    switch, forger = hall.machine.switches[0], SimulatedGpuVendor.create()
    forged = simulated_switch(forger, switch.gpu_ids)
    assert hall.code_of(switch) is None
    assert hall.code_of(forged, ocsp=()) == "root_unknown"
    assert hall.code_of(switch, chain=hall.machine.switches[1].chain) == "evidence_tampered"
    assert hall.code_of(switch, chain=switch.chain[:4]) == "chain_broken"
    assert hall.code_of(switch, chain=(switch.chain[0], *switch.chain[2:])) == "chain_broken"
    assert hall.code_of(switch, nonce=bytes(32)) == "nonce_foreign"
    assert hall.code_of(switch, ocsp=()) == "collateral_stale"
    gpu: Any = hall.machine.gpus[0]
    assert hall.code_of(gpu, gpu.report(NONCE, hall.machine.mode)) == "gpu_state", "a GPU is not a switch"
    pem = b"".join(each.certificate.public_bytes(Encoding.PEM) for each in switch.credentials)
    assert hall.code_of(switch, chain=(pem,)) is None


def test_the_state_of_a_switch(hall: Hall) -> None:
    switch = hall.machine.switches[0]
    for variant in (
        SwitchVariant(lock_status=0),
        SwitchVariant(lock_status=None),
        SwitchVariant(lock_status=3),
        SwitchVariant(device_id=b""),
        SwitchVariant(device_id=hall.machine.switches[1].device_id),
        SwitchVariant(measurements={7: bytes(48)}),
        SwitchVariant(vbios_version="96.10.55.00.02"),
    ):
        assert hall.code_of(switch, switch.report(NONCE, variant)) == "gpu_state", variant


def test_a_switchs_manifest_is_its_own(hall: Hall) -> None:
    switch = hall.machine.switches[0]
    assert hall.code_of(switch, rim=None) == "gpu_state"
    assert hall.code_of(switch, rim=None, rules=GpuRules(require_rim=False)) is None
    of_gpu = hall.vendor.sign(Manifest(SWITCH_VBIOS_VERSION, "GH100", {0: (bytes(48),)}))
    assert hall.code_of(switch, rim=of_gpu) == "gpu_state"
    unsigned = switch_references(SimulatedGpuVendor.create())
    assert hall.code_of(switch, rim=unsigned) == "gpu_state"
    # Of several for one version, the one that fits is found.
    other_board = hall.vendor.sign(Manifest(SWITCH_VBIOS_VERSION, "LS10", {0: (bytes(48),)}))
    assert len(hall.verify(rims=[other_board, *hall.rims])) == 2
    assert hall.code(rims=[*hall.rims[:2], other_board]) == "gpu_state"
    assert hall.code(rims=hall.rims[:2]) == "gpu_state"


def test_no_changed_byte_of_a_switchs_evidence_passes(hall: Hall) -> None:
    """A seeded choice of positions, each changed by a non-zero XOR; a cut at each of some; and bytes behind the end."""
    switch, draw = hall.machine.switches[0], random.Random(12)
    report = switch.report(NONCE)
    for position in draw.sample(range(len(report)), 25):
        changed = bytearray(report)
        changed[position] ^= draw.randrange(1, 256)
        assert hall.code_of(switch, bytes(changed)) is not None
    for length in draw.sample(range(len(report)), 10):
        assert hall.code_of(switch, report[:length]) == "evidence_malformed"
    assert hall.code_of(switch, report + bytes(7)) is None
    assert hall.code_of(switch, report + b"\x01") == "evidence_malformed"
    other = SwitchEvidence(report=report, chain=switch.chain).encode()
    assert hall.code([other[:-1], hall.machine.collect_switches(NONCE)[1]]) == "evidence_malformed"
