from typing import Any

import pytest

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.policy.explain import LAXER, explain, laxer_than_default
from raycloak.attestation.policy.policy import KeyQuotas, Policy, simulated_policy
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.tdx.rules import TdxRules
from raycloak.attestation.trust.roots import pinned_anchors
from tests.attestation.conftest import MEASUREMENT, Session

SNP = {"measurements": (MEASUREMENT,)}
TDX = SNP | dict.fromkeys(("rtmr0", "rtmr1", "rtmr2", "rtmr3"), (MEASUREMENT,))
ANY = dict.fromkeys(("rtmr0", "rtmr1", "rtmr2", "rtmr3"), "any")
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
        "classes", "roots", "TDX", "SEV-SNP", "GPU", "machines", "code", "boundary", "collateral", "lifetime", "keys",
    }  # fmt: skip


LAX = {
    "statuses": ({"tdx": TdxRules(**TDX, tcb_statuses=("UpToDate", "OutOfDate"))}, "OutOfDate"),
    "debug": ({"tdx": TdxRules(**TDX, allow_debug=True)}, "Debug guests are accepted"),
    "page faults": ({"tdx": TdxRules(**TDX, require_sept_ve_disable=False)}, "SEPT_VE_DISABLE"),
    "open registers": ({"tdx": TdxRules(**SNP, **ANY)}, "rtmr1 (kernel and boot loader), rtmr2 (command line"),
    "one open register": ({"tdx": TdxRules(**TDX | {"rtmr3": "any"})}, "anything may be in it: rtmr3 (what the guest"),
    "no value": ({"tdx": TdxRules(**TDX | {"rtmr1": ()})}, "No value of rtmr1 is known, so no guest"),
    "zero register": ({"tdx": TdxRules(**TDX | {"rtmr3": (bytes(48),)})}, "rtmr3 may be zero"),
    "no measurement": ({"tdx": TdxRules(**ANY)}, "no guest is accepted"),
    "zero measurement": ({"sev_snp": SnpRules(measurements=(bytes(48),))}, "no guest is accepted"),
    "Milan": ({"sev_snp": SnpRules(**SNP, allowed_generations=("Milan",))}, "arXiv"),
    "no generation": ({"sev_snp": SnpRules(**SNP, allowed_generations=("Turin",))}, "Processors: none"),
    "low floor": ({"sev_snp": SnpRules(**SNP, min_snp_svn={"Genoa": 0})}, "Genoa from SNP firmware 0"),
    "no floor for Turin": (
        {"sev_snp": SnpRules(**SNP, allowed_generations=("Turin",), min_snp_svn={"Turin": 0})},
        "Turin from SNP firmware 0",
    ),
    "every level": ({"sev_snp": SnpRules(**SNP, allowed_vmpl=(0, 1, 2, 3))}, "(VMPL): 0, 1, 2, 3"),
    "shared keys": ({"sev_snp": SnpRules(**SNP, key_kinds=("VCEK", "VLEK"))}, "no particular machine"),
    "masked ids": (
        {"sev_snp": SnpRules(**SNP, key_kinds=("VLEK",)), "workers_per_platform": None},
        "revoking a platform reaches one guest alone",
    ),
    "no host data": ({"sev_snp": SnpRules(**SNP, host_data=())}, "must be one of 0 known"),
    "a year": ({"evidence_lifetime_s": 365 * 24 * 3600}, "after 8760 hours"),
    "many draws": ({"key_quotas": KeyQuotas(per_run=2**20)}, "1048576 in a run"),
    "a list that nobody fetches": (
        {
            "sev_snp": SnpRules(**SNP, key_kinds=("VCEK", "VLEK")),
            "collateral_service": CollateralService(amd="https://a.example", snp_lists=("vcek/Genoa",)),
        },
        "Of vlek/Genoa no list is fetched",
    ),
    "silent GPU": ({"nvidia_gpu": GpuRules(allow_unstated_mode=True)}, "does not state that it is in confidential"),
    "no model": ({"nvidia_gpu": GpuRules(models=())}, "no model"),
    "two a machine": ({"workers_per_platform": 2}, "at most 2 worker(s)"),
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
                {"rejected_advisories": ("INTEL-SA-00837",)},
                {"rtmr0": "any"},
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
                {"min_boot_loader_svn": {"Genoa": 10}},
                {"min_tee_svn": {"Genoa": 1}},
                {"min_microcode_svn": {"Genoa": 84}},
                {"key_kinds": ("VCEK", "VLEK")},
                {"host_data": (bytes(32),)},
            )
        ],
        "nvidia_gpu": [GpuRules(models=("GH100",))],
        "gpus_per_worker": [1, 4],
        "workers_per_platform": [2],
        "evidence_lifetime_s": [60],
        "platforms": [(bytes(16), bytes([1] * 16))],
        "code": [(), (bytes(32),), (bytes(32), bytes([1] * 32))],
        "accepted_classes": [HARDWARE[:2]],
        "require_boundary": [("tdx.rtmr2", "sev_snp.measurements"), ("tdx.rtmr3", "sev_snp.measurements")],
    }
    plain = explain(strict())
    for name, values in changed.items():
        for value in values:
            assert explain(strict(**{name: value})) != plain, (name, value)


NEVER_LAXER = {
    *("anchors", "platforms", "gpus_per_worker", "collateral_service", "code", "require_boundary", "nvidia_gpu.models"),
    *("tdx.measurements", "tdx.rtmr0", "tdx.rtmr1", "tdx.rtmr2", "tdx.rtmr3", "tdx.mr_config_id"),
    *("tdx.rejected_advisories", "tdx.min_tcb_evaluation_data_number"),
    *("tdx.allow_dynamic_platform", "tdx.allow_cached_keys", "tdx.allow_smt"),
    *("sev_snp.min_boot_loader_svn", "sev_snp.min_tee_svn", "sev_snp.min_microcode_svn"),
    *("sev_snp.allow_smt", "sev_snp.measurements", "sev_snp.host_data"),
}
"""Nothing is laxer than the default of these, or they have none."""


def test_each_field_of_every_rule_is_compared_with_its_default() -> None:
    """A field that is added is named here, or this fails."""
    nested = {"tdx": TdxRules, "sev_snp": SnpRules, "nvidia_gpu": GpuRules, "key_quotas": KeyQuotas}
    fields = {name for name in Policy.model_fields if name not in nested}
    fields |= {f"{family}.{name}" for family, rules in nested.items() for name in rules.model_fields}
    assert set(LAXER) | NEVER_LAXER == fields
    assert not set(LAXER) & NEVER_LAXER


LAXER_VALUES = {
    "accepted_classes": {"accepted_classes": (*HARDWARE, EvidenceClass.SIMULATED)},
    "evidence_lifetime_s": {"evidence_lifetime_s": 24 * 3600 + 1},
    "workers_per_platform": {"workers_per_platform": None},
    "key_quotas.per_member": {"key_quotas": KeyQuotas(per_member=65)},
    "key_quotas.per_run": {"key_quotas": KeyQuotas(per_run=4097)},
    "tdx.tcb_statuses": {"tdx": TdxRules(**TDX, tcb_statuses=("UpToDate", "OutOfDate"))},
    "tdx.allow_debug": {"tdx": TdxRules(**TDX, allow_debug=True)},
    "tdx.require_sept_ve_disable": {"tdx": TdxRules(**TDX, require_sept_ve_disable=False)},
    "sev_snp.allowed_generations": {"sev_snp": SnpRules(**SNP, allowed_generations=("Genoa", "Milan"))},
    "sev_snp.min_snp_svn": {"sev_snp": SnpRules(**SNP, min_snp_svn={"Genoa": 22})},
    "sev_snp.require_alias_check": {"sev_snp": SnpRules(**SNP, require_alias_check=False)},
    "sev_snp.allow_debug": {"sev_snp": SnpRules(**SNP, allow_debug=True)},
    "sev_snp.allow_migrate_ma": {"sev_snp": SnpRules(**SNP, allow_migrate_ma=True)},
    "sev_snp.allowed_vmpl": {"sev_snp": SnpRules(**SNP, allowed_vmpl=(0, 1))},
    "sev_snp.key_kinds": {"sev_snp": SnpRules(**SNP, key_kinds=("VLEK",))},
    "sev_snp.require_crl": {"sev_snp": SnpRules(**SNP, require_crl=False)},
    "nvidia_gpu.allow_ppcie": {"nvidia_gpu": GpuRules(allow_ppcie=True)},
    "nvidia_gpu.allow_unstated_mode": {"nvidia_gpu": GpuRules(allow_unstated_mode=True)},
    "nvidia_gpu.require_rim": {"nvidia_gpu": GpuRules(require_rim=False)},
    "nvidia_gpu.require_ocsp": {"nvidia_gpu": GpuRules(require_ocsp=False)},
}


@pytest.mark.parametrize("name", LAXER_VALUES)
def test_a_field_that_is_laxer_than_its_default_is_named(name: str) -> None:
    assert laxer_than_default(strict()) == ()
    lax = strict(**LAXER_VALUES[name])
    assert laxer_than_default(lax) == (name,)
    assert f"Laxer than the defaults: {name}." in warnings(lax)
