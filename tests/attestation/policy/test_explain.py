from typing import Any

import pytest

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.policy.explain import explain
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.tdx.rules import TdxRules
from raycloak.attestation.trust.roots import pinned_anchors
from tests.attestation.conftest import MEASUREMENT, Session

SNP = {"measurements": (MEASUREMENT,)}
TDX = SNP | dict.fromkeys(("rtmr0", "rtmr1", "rtmr2", "rtmr3"), (MEASUREMENT,))
HARDWARE = (EvidenceClass.INTEL_TDX, EvidenceClass.AMD_SEV_SNP, EvidenceClass.NVIDIA_GPU)


def strict(**changes: Any) -> Policy:
    fields: dict[str, Any] = {
        "accepted_classes": HARDWARE,
        "anchors": tuple(anchor for each in HARDWARE for anchor in pinned_anchors(each)),
        "platforms": (bytes(16),),
        "gpus_per_worker": 8,
        "tdx": TdxRules(**TDX),
        "sev_snp": SnpRules(measurements=(MEASUREMENT,)),
    }
    return Policy(**(fields | changes))


def warnings(policy: Policy) -> str:
    return "\n".join(each.text for each in explain(policy) if each.warning)


def test_a_strict_policy_has_no_warning() -> None:
    assert warnings(strict()) == ""
    assert {each.topic for each in explain(strict())} == {
        "classes", "roots", "TDX", "SEV-SNP", "GPU", "machines", "collateral", "lifetime", "keys",
    }  # fmt: skip


LAX = {
    "statuses": ({"tdx": TdxRules(**TDX, tcb_statuses=("UpToDate", "OutOfDate"))}, "OutOfDate"),
    "debug": ({"tdx": TdxRules(**TDX, allow_debug=True)}, "Debug guests are accepted"),
    "page faults": ({"tdx": TdxRules(**TDX, require_sept_ve_disable=False)}, "SEPT_VE_DISABLE"),
    "open registers": ({"tdx": TdxRules(**SNP)}, "rtmr1 (kernel and boot loader), rtmr2 (command line"),
    "one open register": ({"tdx": TdxRules(**TDX | {"rtmr3": None})}, "anything may be in it: rtmr3 (what the guest"),
    "no value": ({"tdx": TdxRules(**TDX | {"rtmr1": ()})}, "No value of rtmr1 is known, so no guest"),
    "zero register": ({"tdx": TdxRules(**TDX | {"rtmr3": (bytes(48),)})}, "rtmr3 may be zero"),
    "no measurement": ({"tdx": TdxRules()}, "no guest is accepted"),
    "zero measurement": ({"sev_snp": SnpRules(measurements=(bytes(48),))}, "no guest is accepted"),
    "Milan": ({"sev_snp": SnpRules(**SNP, allowed_generations=("Milan",))}, "arXiv"),
    "no generation": ({"sev_snp": SnpRules(**SNP, allowed_generations=("Turin",))}, "Processors: none"),
    "migration": ({"sev_snp": SnpRules(**SNP, allow_migrate_ma=True)}, "migration agent"),
    "aliases": ({"sev_snp": SnpRules(**SNP, require_alias_check=False)}, "BadRAM"),
    "no CRL": ({"sev_snp": SnpRules(**SNP, require_crl=False)}, "revocation list of AMD's root may be missing"),
    "no RIM": ({"nvidia_gpu": GpuRules(require_rim=False)}, "reference values of driver and VBIOS may be missing"),
    "no OCSP": ({"nvidia_gpu": GpuRules(require_ocsp=False)}, "OCSP"),
    "PPCIE": ({"nvidia_gpu": GpuRules(allow_ppcie=True)}, "Protected-PCIe"),
    "any machine": ({"platforms": None}, "memory bus"),
    "no machine": ({"platforms": ()}, "0 listed"),
    "crowded": ({"workers_per_platform": None}, "any number of workers"),
    "no root": ({"anchors": pinned_anchors(EvidenceClass.INTEL_TDX)}, "No root vouches for GPUs"),
}


@pytest.mark.parametrize("name", LAX)
def test_what_is_laxer_than_the_defaults_is_a_warning(name: str) -> None:
    changes, words = LAX[name]
    assert words in warnings(strict(**changes))


def test_a_simulated_policy_says_so(session: Session) -> None:
    assert "SIMULATED" in warnings(simulated_policy(session.vendor, MEASUREMENT))


def test_rules_of_a_family_without_a_root_are_not_explained(session: Session) -> None:
    assert "SEV-SNP" not in {each.topic for each in explain(simulated_policy(session.vendor, MEASUREMENT))}


def test_every_rule_makes_a_difference_to_what_is_said() -> None:
    """Each rule, set to another value, changes the explanation."""
    changed: dict[str, list[Any]] = {
        "tdx": [
            TdxRules(**(TDX | change))
            for change in (
                {"measurements": (MEASUREMENT, bytes([1] * 48))},
                {"rejected_advisories": ("INTEL-SA-1",)},
                {"rtmr0": None},
                {"rtmr2": (MEASUREMENT, bytes([1] * 48))},
                {"mr_config_id": (MEASUREMENT,)},
                {"min_tcb_evaluation_data_number": 20},
                {"allow_dynamic_platform": False},
                {"allow_cached_keys": False},
                {"allow_smt": False},
            )
        ],
        "sev_snp": [
            SnpRules(**(SNP | change))
            for change in (
                {"min_snp_svn": {"Genoa": 24}},
                {"allow_debug": True},
                {"allow_smt": False},
                {"allowed_vmpl": (1,)},
            )
        ],
        "gpus_per_worker": [0, 4],
        "workers_per_platform": [2],
        "evidence_lifetime_s": [60],
        "platforms": [(bytes(16), bytes([1] * 16))],
        "accepted_classes": [HARDWARE[:2]],
    }
    plain = explain(strict())
    for name, values in changed.items():
        for value in values:
            assert explain(strict(**{name: value})) != plain, (name, value)
