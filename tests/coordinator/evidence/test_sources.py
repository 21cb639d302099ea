"""The policy decides the sources of a run's evidence and collateral."""

from pathlib import Path

import pytest

from raycloak.attestation.attester.guest import GuestEvidence, GuestGpus
from raycloak.attestation.attester.tsm import tee_nodes
from raycloak.attestation.core.evidence import CollateralBundle, EvidenceClass
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.attestation.trust.roots import pinned_anchors
from raycloak.coordinator.evidence.sources import Guests, LocalPlatform, given_collateral
from raycloak.metrics.errors import ConfigError, EvidenceError, RefusedError
from tests.protocol import trained


def hardware() -> Policy:
    anchors = pinned_anchors(EvidenceClass.AMD_SEV_SNP)
    return Policy(accepted_classes=(EvidenceClass.AMD_SEV_SNP,), anchors=anchors)


@pytest.fixture(scope="module")
def simulated() -> Policy:
    return simulated_policy(SimulatedVendor.create(), bytes(range(48)))


def test_a_hardware_policy_needs_collateral_and_a_simulated_one_takes_none(tmp_path: Path, simulated: Policy) -> None:
    (tmp_path / "collateral.yaml").write_text("snp_vcek_crls: []")
    assert given_collateral(hardware(), "collateral.yaml", tmp_path) == CollateralBundle()
    for policy in (None, simulated):
        assert given_collateral(policy, None, tmp_path) is None
    for policy, file in ((hardware(), None), (hardware(), "absent"), (None, "collateral.yaml"), (simulated, "x")):
        with pytest.raises(ConfigError) as refused:
            given_collateral(policy, file, tmp_path)
        assert refused.value.code == "collateral"


def test_a_guests_source_asks_the_machine_that_it_is_on() -> None:
    if tee_nodes():
        pytest.skip("this machine has a device of a trusted execution environment")
    assert Guests().source() is None
    with pytest.raises(EvidenceError, match="/sys/kernel/config/tsm/report is missing"):
        GuestEvidence().collect(bytes(64))


def test_a_worker_has_the_gpus_that_the_policy_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = GuestGpus(2, tuple)
    for given, says in (("", "was given 0"), ("3", "was given 1"), ("GPU-1,GPU-2", "no indices of GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        with pytest.raises(EvidenceError, match=says) as refused:
            gpus.collect(bytes(32))
        assert refused.value.code == "gpu_unavailable"
        assert refused.value.remedy


def test_a_run_without_a_tee_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tee_nodes():
        pytest.skip("this machine has a device of a trusted execution environment")
    source = GuestEvidence()
    monkeypatch.setattr(LocalPlatform, "collect", lambda self, report_data: source.collect(report_data))
    with pytest.raises(RefusedError, match=r"tee_unavailable.*/dev/sev-guest is missing"):
        trained(tmp_path)
