"""Keys in two halves: whole runs with the data owner's key service on loopback."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.release import RunKeys, VirtualWorkerKeys
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.orchestrator.orchestrator import RunSession
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.service.key_service import fetch_halves
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config import home
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.evidence.standalone_service import ServiceConfig
from raycloak.coordinator.report.words import keys_rows, verdict_rows
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.metrics.errors import ConfigError, EvidenceError, RefusedError
from raycloak.workers.inputs.code_bundle import CodeBundle
from tests.owner import Owner, key_service
from tests.protocol import SECRET, VIRTUAL_WORKERS, trained, whole_run


@pytest.fixture
def owner(tmp_path) -> Iterator[Owner]:
    with key_service(tmp_path) as owner:
        yield owner


def refused(kind: type[Exception] = EvidenceError, **arguments) -> str:
    """Return the code of a run that must not begin."""
    run = whole_run(home.home(), **arguments)
    with pytest.raises(kind) as error:
        run.train()
    assert not run.reports
    assert not run.stage.calls("step")
    return error.value.code


def unkeyed(**arguments) -> set[str]:
    """Return why the workers of a run were given up that got no keys; none of them has computed anything."""
    run = whole_run(home.home(), **arguments)
    with pytest.raises(RefusedError) as error:
        run.train()
    assert error.value.code == "too_few_workers"
    assert not run.reports
    assert not run.stage.calls("step")
    assert sorted(name for name, _ in run.left) == ["worker-0", "worker-1", "worker-2"]
    return {code for _, code in run.left}


def session() -> tuple[LocalPlatform, Policy]:
    """Return the machine and the policy of this home."""
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    return LocalPlatform(vendor.platform()), simulated_policy(vendor, code_measurement())


def fetch(
    owner: Owner, attester: Attester, policy: Policy, v: int, code: bytes = b""
) -> Mapping[int, VirtualWorkerKeys]:
    """Return the half of one key in epoch 0, for somebody who was never here before."""
    at = owner.contract, owner.address, attester
    return fetch_halves(*at, policy=policy, epoch=0, virtual_workers=(v,), watch=LogWatch(), code=code)


def test_a_run_needs_both_halves_and_repeats_with_them(owner, undisturbed):
    """Every worker is attested by the service and given its halves; the same two secrets give the same weights."""
    run = trained(home.home(), key_service=owner.section())
    log = owner.log
    named = {member.partition(".")[0] for kind, member in log if kind == "admitted"}
    assert named == {"worker-0", "worker-1", "worker-2"}
    assert sum(kind == "released" for kind, _ in log) == 3
    assert run.finished is not None
    verdict = verdict_of(run.finished, run.folder, 1.0, "complete", ())
    assert ("keys", f"half of each from {owner.address}") in verdict_rows(verdict)
    assert set(keys_rows(owner.address)) <= set(plan_rows(run.finished.plan))
    assert run.digests != undisturbed, "the same run secret alone gave the same weights"
    assert trained(home.home(), key_service=owner.section()).digests == run.digests


def test_the_service_gives_no_half_for_code_that_its_policy_does_not_list(tmp_path):
    listed, other = b"l" * 32, b"o" * 32
    machine, policy = session()
    policy = policy.model_copy(update={"code": (listed,)})
    with key_service(tmp_path, listed=(listed,)) as owner:
        with pytest.raises(EvidenceError, match=f"code_unlisted: the code {other.hex()}"):
            fetch(owner, Attester("worker-0", machine), policy, 0, other)
        assert [kind for kind, _ in owner.log] == ["session", "refused"]
        for code in (listed, b""):
            assert set(fetch(owner, Attester("worker-0", machine).beside(), policy, 0, code)) == {0}


def test_a_run_of_listed_code_states_it_to_the_service(tmp_path, monkeypatch, own_imports):
    shown, genuine = [], EvidenceClient.attest

    def attest(client, envelope):
        shown.append(parse(Presentation, envelope.body).code)
        return genuine(client, envelope)

    monkeypatch.setattr(EvidenceClient, "attest", attest)
    base = home.home() / "data"
    base.mkdir(parents=True)
    (base / "bundled_code.py").write_text("from torch import nn\n\ndef model():\n    return nn.Linear(6, 3)\n")
    listed = (CodeBundle.read(base).digest,)
    with key_service(tmp_path, listed=listed) as owner:
        run = trained(home.home(), listed=listed, model="bundled_code:model", key_service=owner.section())
    assert run.finished is not None
    assert run.finished.manifest.code == listed[0]
    assert shown == [listed[0]] * 3


def test_each_epoch_needs_fresh_evidence_at_the_service_too(tmp_path):
    with key_service(tmp_path, epochs=3) as owner:
        run = trained(home.home(), key_service=owner.section(), epoch_steps=1)
        kinds = [kind for kind, _ in owner.log]
    assert len(run.digests) == 3
    assert kinds == ["session", *["admitted", "released", "expelled"] * 9]


def test_the_workers_compute_with_the_combined_keys_alone(owner):
    """The key that a worker uses is HKDF over both halves, and is neither of them."""
    held, manifests = {}, []

    def tamper(worker, member_id):
        accept = worker.accept_keys

        def accepted(release):
            commitments = accept(release)
            manifests.append(worker._stage._admission.manifest)
            held.update({v: keys.stream.reveal() for (epoch, v), keys in worker._stage._keys.items()})
            return commitments

        worker.accept_keys = accepted

    trained(home.home(), key_service=owner.section(), tamper=tamper)
    manifest = manifests[0]
    context = manifest.key_context
    orchestrators = RunKeys(Secret(bytes.fromhex(SECRET)), manifest.run_id)
    assert sorted(held) == list(range(VIRTUAL_WORKERS))
    for v, key in held.items():
        first, second = orchestrators.of(context, v, 0).stream.reveal(), owner.half(v).reveal()
        whole = derive(Secret(first + second), Purpose.VIRTUAL_WORKER_HALVES, manifest.run_id, context, v, 0)
        assert key == whole.reveal()
        assert key not in (first, second)


def test_without_the_service_no_worker_computes_anything(tmp_path):
    with key_service(tmp_path) as owner:
        section = owner.section()
    assert unkeyed(key_service=section) == {"release_denied"}


def test_another_service_on_the_address_is_refused(owner, tmp_path):
    """The channel ends at the key of the contract or nowhere; a thief of the address gets no evidence."""
    (tmp_path / "other").mkdir()
    with key_service(tmp_path / "other", secret="ef" * 32) as other:
        assert unkeyed(key_service=owner.section(address=other.address)) == {"release_denied"}
        assert [kind for kind, _ in other.log] == ["session"]


@pytest.mark.parametrize("side", ["owner", "orchestrator"])
def test_a_half_that_was_not_committed_to_is_refused(side, owner):
    """The manifest fixes both: the orchestrator's halves itself, the owner's by the contract in it."""

    def disturb(call):
        of_run = run.session.control.actors["orchestrator"].handle
        if call.method == "release":
            _swap_secret(owner.session if side == "owner" else of_run._session)

    run = whole_run(home.home(), key_service=owner.section(), disturb=disturb)
    with pytest.raises(RefusedError):
        run.train()
    assert {code for _, code in run.left} == {"key_not_committed"}
    assert not run.stage.calls("step")


def _swap_secret(session: RunSession) -> None:
    run = session.run
    run.keys = replace(run.keys, secret=Secret(b"?" * 32))


@pytest.mark.parametrize(
    ("terms", "fields"),
    [
        ({"virtual_workers": VIRTUAL_WORKERS + 1}, {}),
        ({"epochs": 1}, {"epoch_steps": 1}),
        ({"secret": SECRET}, {}),
    ],
    ids=["virtual workers", "epochs", "one secret for both"],
)
def test_a_contract_of_other_terms_is_refused(terms, fields, tmp_path):
    with key_service(tmp_path, **terms) as owner:
        assert refused(key_service=owner.section(), **fields) == "key_service_mismatch"


def test_a_contract_under_another_policy_is_refused(owner, tmp_path):
    """By the run, by each worker, and by the service for evidence that its own policy does not accept."""
    run = whole_run(tmp_path / "elsewhere", key_service=owner.section())  # another vendor, so another policy
    with pytest.raises(EvidenceError) as error:
        run.train()
    assert error.value.code == "key_service_mismatch"
    stranger = Attester("worker-0", LocalPlatform(SimulatedVendor.load_or_create(run.home / "simulator").platform()))
    with pytest.raises(RefusedError) as refusal:
        fetch(owner, stranger, run.session.policy, 0)
    assert refusal.value.code == "root_unknown"
    assert owner.log[-1] == ("refused", "worker-0")


def test_an_attestation_serves_one_release(owner):
    """A worker that asks again attests again; one that takes its place under the same name is not held up."""
    source, policy = session()
    for _ in range(2):
        newcomer = Attester("worker-0", source)
        halves = fetch(owner, newcomer, policy, 1)
        assert halves[1].stream.reveal() == owner.half(1).reveal()
    kinds = [kind for kind, _ in owner.log]
    assert kinds == ["session", "admitted", "released", "expelled", "admitted", "released", "expelled"]


def test_a_worker_that_died_before_it_had_its_halves_holds_nobody_up(tmp_path, monkeypatch):
    """It holds up neither another worker on its machine, nor one of its name, as after a resume."""
    source, policy = session()
    policy = policy.model_copy(update={"workers_per_platform": 1})
    monkeypatch.setattr("raycloak.coordinator.evidence.standalone_service.simulated_policy", lambda *_: policy)
    with key_service(tmp_path) as owner:
        contract, terms = owner.contract, owner.contract.digest()
        at = {"manifest_digest": terms, "orchestrator_key": contract.orchestrator_key}
        for dead, name in (("worker-0", "worker-3"), ("worker-1", "worker-1")):
            lost, newcomer = Attester(dead, source).beside(), Attester(name, source).beside()
            with EvidenceClient(owner.address, attester=lost, **at) as client:
                client.attest(lost.present(client.challenge(), terms, contract.known_answer))
            assert set(owner.session.admission.view().admitted) == {lost.member_id}
            assert fetch(owner, newcomer, policy, 1)[1].stream.reveal() == owner.half(1).reveal()
            told = [("expelled", lost.member_id)]
            told += [(kind, newcomer.member_id) for kind in ("admitted", "released", "expelled")]
            assert owner.log[-4:] == told
            assert owner.session.admission.view().admitted == {}


def test_a_member_that_never_came_for_its_keys_is_forgotten_when_its_evidence_expires(owner):
    """Also on disk, without ``workers_per_platform``; before, everybody who had ever attested was kept."""
    source, policy = session()
    contract, terms = owner.contract, owner.contract.digest()
    at = {"manifest_digest": terms, "orchestrator_key": contract.orchestrator_key}
    for name, later in (("worker-0", 0), ("worker-1", policy.evidence_lifetime_s)):
        owner.session.run._clock = lambda later=later: time.time() + later
        lost = Attester(name, source).beside()
        with EvidenceClient(owner.address, attester=lost, **at) as client:
            client.attest(lost.present(client.challenge(), terms, contract.known_answer))
        assert set(owner.session.admission.view().admitted) == {lost.member_id}
        assert [row.member_id for row in owner.session.run.books.state.members()] == [lost.member_id]


def test_a_file_that_is_no_contract_is_refused_by_name(tmp_path):
    (tmp_path / "no.json").write_text("{}")
    for name in ("no.json", "none.json"):
        section = {"address": "127.0.0.1:1", "contract": str(tmp_path / name)}
        assert refused(ConfigError, key_service=section) == "key_service"


def test_a_key_service_has_a_contract_and_no_aggregators(tmp_path):
    for changes in ({"contract": None, "manifest": "m.json"}, {"aggregators": ["aggregator-0"]}):
        raw = {"run_secret": "own.hex", "hosting": "any", "contract": {"virtual_workers": 2}}
        with pytest.raises(ConfigError, match="hosting: any"):
            validated(ServiceConfig, raw | changes)
