"""Every refusal there is, provoked through appraisal, admission and release; and none that nothing provokes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

from raycloak.attestation.core.evidence import CollateralBundle, EvidenceClass, Presentation, Refusal
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import seal
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.vectors.index import read_index
from raycloak.metrics.errors import EvidenceError
from tests.anchors import INTEL_TDX_ANCHOR
from tests.attestation.composite_site import Site, composite_site
from tests.attestation.conftest import MEASUREMENT, NOW, Session, with_tdx
from tests.attestation.orchestrator.test_orchestrator import Desk
from tests.attestation.tdx.test_verify import QUOTE_VARIANTS, collateral_variants
from tests.simulators.snp import SNP_SVN, ReportVariant
from tests.simulators.snp_pki import AuthorityKeys
from tests.simulators.switch import SwitchedMachine


@dataclass(frozen=True)
class Bench:
    """A TDX guest, an SEV-SNP guest with GPUs, and a folder for an orchestrator."""

    session: Session
    site: Site
    folder: Path

    def guest(self, name: str) -> None:
        """Verify a guest or quoting enclave of `test_tdx.QUOTE_VARIANTS`."""
        variant, _ = QUOTE_VARIANTS[name]
        self.session.appraise(self.session.member().envelope(variant))

    def collateral(self, name: str) -> None:
        """Judge an honest guest with collateral of `test_tdx.collateral_variants`."""
        variant, _ = collateral_variants(self.session)[name]
        self.honest(collateral=self.session.vendor.collateral(NOW, variant))

    def honest(self, **changes: Any) -> None:
        """Judge an honest guest with ``changes``."""
        self.session.appraise(self.session.member().envelope(), **changes)

    def changed(self, change: Callable[[Presentation], dict[str, Any]]) -> None:
        """Send a presentation that its sender changed after the quote was made, and signed."""
        member = self.session.member()
        honest = member.presentation()
        self.session.appraise(seal(honest.model_copy(update=change(honest)), member.identity))

    def desk(self) -> Desk:
        (self.folder / "orchestrator").mkdir()
        return Desk(self.session, self.folder / "orchestrator")


def _flipped(quote: bytes) -> bytes:
    return quote[:200] + bytes((quote[200] ^ 1,)) + quote[201:]


def _without_certificates(quote: bytes) -> bytes:
    pem_at = quote.index(b"-----BEGIN")
    return quote[:pem_at] + b" " * (len(quote) - pem_at)


def _for_hardware_only(bench: Bench) -> None:
    policy = bench.session.policy
    anchors = (*policy.anchors, INTEL_TDX_ANCHOR)
    bench.honest(policy=policy.model_copy(update={"accepted_classes": (EvidenceClass.INTEL_TDX,), "anchors": anchors}))


def _below_the_floor(bench: Bench) -> None:
    facts = bench.session.appraise(bench.session.member().envelope()).facts
    bench.honest(floors={name: number + 1 for name, number in facts})


def _old_firmware(bench: Bench) -> None:
    rules = SnpRules(measurements=(MEASUREMENT,), min_snp_svn={"Genoa": SNP_SVN + 1})
    site = bench.site
    site.appraise(site.presentation(), policy=site.policy.model_copy(update={"sev_snp": rules}))


def _presented_twice(bench: Bench) -> None:
    desk = bench.desk()
    envelope = desk.present("worker-0")
    desk.orchestrator.admit(envelope)
    desk.orchestrator.expel("worker-0", "died")
    desk.orchestrator.admit(envelope)


def _never_challenged(bench: Bench) -> None:
    bench.desk().orchestrator.admit(bench.session.member().envelope())


def _without_references(bench: Bench) -> None:
    site = bench.site
    site.appraise(site.presentation(), collateral=site.collateral.model_copy(update={"gpu_rims": ()}))


def _unlisted_code(bench: Bench) -> None:
    listing = bench.session.policy.model_copy(update={"code": (b"l" * 32,)})
    bench.session.appraise(bench.session.member().envelope(code=b"c" * 32), policy=listing)


def _one_gpu_of_two(bench: Bench) -> None:
    site = bench.site
    site.appraise(site.presentation(gpu_evidence=site.gpu_evidence(site.gpus[0])))


def _switched(bench: Bench, shown: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]) -> None:
    """Present, of the switches of a machine, those that ``shown`` picks."""
    site = bench.site
    switches = shown(site.switched().switch_evidence)
    site.appraise(site.switched(switch_evidence=switches), policy=site.clear_links)


def _switches_of_encrypted_gpus(bench: Bench) -> None:
    site = bench.site
    site.appraise(site.presentation(switch_evidence=site.switched().switch_evidence), policy=site.clear_links)


def _switches_of_other_gpus(bench: Bench) -> None:
    site = bench.site
    claimed = SwitchedMachine(site.gpus, site.machine_of_switches.switches)
    site.appraise(site.switched(claimed), policy=site.clear_links)


PROVOKED: Final[Mapping[Refusal, Callable[[Bench], object]]] = MappingProxyType(
    {
        Refusal.EVIDENCE_TAMPERED: lambda b: b.changed(lambda p: {"quote": _flipped(p.quote)}),
        Refusal.EVIDENCE_MALFORMED: lambda b: b.changed(lambda p: {"quote": p.quote + b"x"}),
        Refusal.ROOT_UNKNOWN: lambda b: b.honest(policy=simulated_policy(SimulatedVendor.create(), MEASUREMENT)),
        Refusal.SIMULATOR_NOT_ALLOWED: _for_hardware_only,
        Refusal.CHAIN_BROKEN: lambda b: b.changed(lambda p: {"quote": _without_certificates(p.quote)}),
        Refusal.SIGNER_ROLE: lambda b: b.collateral("platform signs its own TCB info"),
        Refusal.ATTESTATION_KEY_UNCERTIFIED: lambda b: b.guest("foreign attestation key"),
        Refusal.REVOKED: lambda b: b.collateral("platform revoked"),
        Refusal.COLLATERAL_STALE: lambda b: b.honest(collateral=CollateralBundle()),
        Refusal.COLLATERAL_ROLLBACK: _below_the_floor,
        Refusal.PLATFORM_MISMATCH: lambda b: b.collateral("other platform family"),
        Refusal.TCB_STATUS: lambda b: b.collateral("out of date"),
        Refusal.TCB_UNACCEPTABLE: lambda b: b.collateral("level revoked"),
        Refusal.FIRMWARE_FLOOR: _old_firmware,
        Refusal.DEBUG: lambda b: b.guest("debug"),
        Refusal.ATTRIBUTES: lambda b: b.guest("migratable"),
        Refusal.PRIVILEGE_LEVEL: lambda b: b.site.appraise(b.site.presentation(ReportVariant(vmpl=1))),
        Refusal.MEASUREMENT_UNKNOWN: lambda b: b.honest(policy=with_tdx(b.session.policy, measurements=())),
        Refusal.NONCE_REPLAYED: _presented_twice,
        Refusal.NONCE_FOREIGN: _never_challenged,
        Refusal.KEY_NOT_BOUND: lambda b: b.changed(lambda _: {"hpke_key": HpkeKey.generate().public}),
        Refusal.CODE_UNLISTED: _unlisted_code,
        Refusal.PEER_NOT_BOUND: lambda b: b.session.appraise(
            seal(b.session.member().presentation(), IdentityKey.generate())
        ),
        Refusal.GPU_NOT_BOUND: _one_gpu_of_two,
        Refusal.GPU_STATE: _without_references,
        Refusal.SWITCH_MISSING: lambda b: _switched(b, lambda all_: all_[1:]),
        Refusal.SWITCH_DOUBLED: lambda b: _switched(b, lambda all_: (*all_, all_[0])),
        Refusal.SWITCH_FOREIGN: _switches_of_encrypted_gpus,
        Refusal.SWITCH_OTHER_GPUS: _switches_of_other_gpus,
        Refusal.RELEASE_DENIED: lambda b: b.desk().orchestrator.release("worker-0", 0, (0,)),
    }
)
"""What provokes each refusal, with simulated evidence."""

IN_NO_FILE: Final = {
    Refusal.NONCE_REPLAYED,
    Refusal.PEER_NOT_BOUND,
    Refusal.CODE_UNLISTED,
    Refusal.GPU_NOT_BOUND,
    Refusal.SWITCH_MISSING,
    Refusal.SWITCH_DOUBLED,
    Refusal.SWITCH_FOREIGN,
    Refusal.SWITCH_OTHER_GPUS,
    Refusal.RELEASE_DENIED,
}
"""Refusals that need an orchestrator, several members or devices, or a list of code; no recorded case can show them."""


@pytest.fixture(scope="module")
def site(session: Session, amd_keys: AuthorityKeys) -> Site:
    return composite_site(session, amd_keys)


@pytest.mark.parametrize("code", PROVOKED)
def test_what_is_wrong_is_refused_by_its_name(session: Session, site: Site, tmp_path: Path, code: Refusal) -> None:
    with pytest.raises(EvidenceError) as refused:
        PROVOKED[code](Bench(session, site, tmp_path))
    assert refused.value.code == code


def test_nothing_is_refused_that_is_as_it_should_be(session: Session, site: Site, tmp_path: Path) -> None:
    """Otherwise a refusal above could have another cause than the one it is about."""
    bench = Bench(session, site, tmp_path)
    bench.honest()
    bench.changed(lambda _: {})
    site.appraise(site.presentation())
    site.appraise(site.switched(), policy=site.clear_links)
    desk = bench.desk()
    desk.admit("worker-0")
    desk.orchestrator.release("worker-0", 0, (0,))


def test_every_refusal_is_provoked() -> None:
    assert set(PROVOKED) == set(Refusal)


def test_recorded_evidence_provokes_every_refusal_that_a_file_can(vectors: Path) -> None:
    """`test_check` tests that each case has its verdict."""
    found = {case.fields.refusal for case in read_index(vectors / "INDEX.json")} - {None}
    assert found == set(Refusal) - IN_NO_FILE
