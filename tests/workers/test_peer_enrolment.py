"""A worker counts machines and GPUs over the whole roster itself, whatever the orchestrator admitted."""

import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import Challenge, CollateralBundle
from raycloak.attestation.core.roster import Roster
from raycloak.attestation.log.evidence_log import Entry
from raycloak.attestation.policy.policy import Policy
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import NOW, HandRun
from tests.simulators.gpu import SimulatedGpu, SimulatedGpus, SimulatedGpuVendor
from tests.simulators.tdx import CollateralVariant

SPARE = "spare"


class StrictRun(HandRun):
    """A run with every worker on a platform of its own with a GPU of its own, as the policy wants it."""

    def judged_by(self) -> tuple[Policy, CollateralBundle]:
        policy, collateral = super().judged_by()
        nvidia = SimulatedGpuVendor.create()
        names = ("worker-0", "worker-1", "worker-2", SPARE)
        self.gpus: dict[str, SimulatedGpu] = {name: nvidia.gpu() for name in names}
        self.platforms = {name: LocalPlatform(self.vendor.platform()) for name in names}
        references = nvidia.references()
        known = {
            "gpu_rims": tuple(each for each in (references.driver, references.vbios) if each),
            "gpu_ocsp": tuple(answer for gpu in self.gpus.values() for answer in nvidia.ocsp(gpu, NOW)),
        }
        strict = {"anchors": (*policy.anchors, *nvidia.anchors), "workers_per_platform": 1, "gpus_per_worker": 1}
        return policy.model_copy(update=strict), collateral.model_copy(update=known)

    def new_worker(self, name: str) -> TrainWorker:
        return TrainWorker(name, self.platforms[name], self.clock, SimulatedGpus((self.gpus[name],)))

    def code_beside(self, platform: str, gpu: str) -> str:
        """Return the code of worker-0's answer to a roster in which worker-1 is on ``platform`` with ``gpu``."""
        other = Attester("worker-1", self.platforms[platform], SimulatedGpus((self.gpus[gpu],)))
        challenge = Challenge(
            nonce=b"n" * 32,
            run_id=self.run_id,
            member_id="worker-1",
            role="worker",
            manifest_digest=self.manifest.digest(),
            expires_at=0,
        )
        shown = other.present(challenge, self.manifest.digest(), self.known_answer)
        entry = {
            "mask_key": other.agreement.public,
            "identity_key": other.identity.public,
            "evidence_digest": other.evidence_digest,
        }
        honest = self.roster()
        members = Roster.model_validate_json(honest.body).members
        changed = [each.model_copy(update=entry) if each.member_id == "worker-1" else each for each in members]
        forged = self.forged(honest, changed)
        request = self.request(forged, presentations=(*self.presentations.values(), shown))
        return self.code("worker-0", request)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> StrictRun:
    return StrictRun(tmp_path_factory.mktemp("strict"))


def test_a_second_worker_on_a_platform_or_with_a_gpu_refuses_the_roster(strict: StrictRun) -> None:
    """The orchestrator signed it; each member's evidence alone is accepted."""
    assert strict.code_beside("worker-0", SPARE) == "peer_not_bound"
    assert strict.code_beside(SPARE, "worker-0") == "peer_not_bound"
    assert strict.code_beside(SPARE, SPARE) == "ok"


def test_a_worker_refuses_collateral_older_than_it_has_seen(strict: StrictRun) -> None:
    """Handing it collateral anew, as for every renewal, cannot turn it back while the process lives."""
    worker = strict.workers["worker-2"]

    def present(number: int) -> str | None:
        older = strict.vendor.tdx_collateral(NOW, CollateralVariant(evaluation_number=number))
        admission = strict.admission.model_copy(
            update={"collateral": strict.collateral.model_copy(update={"tdx": (older,)})}
        )
        try:
            worker.present(strict.orchestrator.challenge("worker-2", "worker"), admission)
        except EvidenceError as error:
            return error.code
        return None

    assert [present(number) for number in (18, 17, 19, 18, 19)] == [
        None, "collateral_rollback", None, "collateral_rollback", None,
    ]  # fmt: skip


def test_the_log_names_the_class_of_every_gpu(strict: StrictRun) -> None:
    entries: list[Entry] = [each for each in strict.orchestrator._run.books.log.entries() if each.kind == "admitted"]
    of = {entry.content["member_id"]: entry.content["claims"]["submods"] for entry in entries}
    assert of["aggregator-0"] == {}
    for name in ("worker-0", "worker-1", "worker-2"):
        assert of[name]["gpu-0"]["evidence_class"] == "simulated"
        assert of[name]["gpu-0"]["hwmodel"]
